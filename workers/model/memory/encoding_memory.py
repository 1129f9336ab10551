"""How much memory of a GPU pictures take: kept embeddings, the largest calls of the encoder, and the rows of a step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isqrt

from crossdock.workers.model.memory.memory_budget import MemoryBudget
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.pictures.vision import PictureEncoder
from crossdock.workers.schedule.pictures.items import Item

_SMALL = 2  # size of a picture of which many fit into one call


def bytes_for_pictures(model: LoadedModel, budget: MemoryBudget, peak: Callable[[Callable[[], object]], int]) -> int:
    """Return the bytes that pictures may take on this rank beside steps of text. `peak`: measures a call.

    The rank that encodes keeps up to `mm_encoder_cache` of embeddings. Every rank may have the rows of a step twice: as
    collected or received, and in the inputs of the first layer.
    """
    encoder = model.encoder
    if encoder is None:
        return 0
    rows_of_step = 2 * budget.max_num_batched_tokens * encoder.row_bytes
    if not model.part.position.is_driver:
        return rows_of_step
    largest = max(peak(partial(encoder.measure, items)) for items in largest_calls(model, encoder, budget))
    return rows_of_step + budget.mm_encoder_cache + largest


def largest_calls(model: LoadedModel, encoder: PictureEncoder, budget: MemoryBudget) -> list[list[Item]]:
    """Return items to measure: the largest picture, and as many small ones as one call encodes.

    No picture has more rows than the cache holds, or than a prompt has tokens: the scheduler refuses it. Some models
    divide a large picture into tiles of one size, which take as much as so many small pictures.
    """
    most_of_one = min(budget.mm_encoder_cache // encoder.row_bytes, model.max_model_len)
    most = max(budget.max_num_batched_tokens, most_of_one)
    large, small = encoder.example(max(isqrt(most_of_one), _SMALL)), encoder.example(_SMALL)
    most_small = 1 if "image_sizes" in small.tensors else max(most // small.num_rows, 1)
    return [[large], [replace(small, content_hash=number.to_bytes(16, "little")) for number in range(most_small)]]
