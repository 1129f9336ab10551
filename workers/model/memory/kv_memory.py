"""How much memory KV pages get: the configured bytes, or on a GPU the rest of its share after the largest steps."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import NamedTuple

import torch

from crossdock.workers.model.graphs.decode_graphs import DecodeGraphs
from crossdock.workers.model.graphs.mixed_graphs import MixedGraphs
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.memory.memory_budget import MemoryBudget
from crossdock.workers.model.memory.memory_fit import size_of
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.pictures.vision import PictureEncoder
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.sampling.sampler import sample
from crossdock.workers.schedule.request.batch import Batch, Scheduled, StatePages
from crossdock.workers.schedule.request.items import Item
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission

logger = logging.getLogger(__name__)

GPU_RESERVE_BYTES = 512 << 20  # for what CUDA records graphs in and for gaps between allocations; an estimate
_SMALL = 2  # size of a picture of which many fit into one call


class PageBudget(NamedTuple):
    """How many pages a rank has memory for, and the size of one page on this rank."""

    num_pages: int
    page_bytes: int


def count_pages_that_fit(model: LoadedModel, budget: MemoryBudget, page_size: int) -> PageBudget:
    """Return how many KV pages fit on this rank. Collective: every rank must call it, before any pool is allocated."""
    known = budget.known(model.device.type)
    if model.encoder is not None and model.device.type == "cuda":
        model.encoder.limit_calls(budget.max_num_batched_tokens)
    page_bytes = model.layouts(page_size)[0].page_bytes
    return PageBudget((_measured(model, budget, page_size) if known is None else known) // page_bytes, page_bytes)


def _measured(model: LoadedModel, budget: MemoryBudget, page_size: int) -> int:
    """Return the bytes of a GPU that the largest possible steps leave for pages.

    One of these steps has `max_num_batched_tokens` prompt tokens with every token's logits, for prompt logprobs, and
    `max_num_seqs` rows sampled in each of the two ways that take most memory. The other has `max_num_seqs` decodes, or
    decodes and a recorded chunk. Pictures take `bytes_for_pictures` in addition.
    """
    width = model.state_pages(page_size)
    step = largest_step(
        budget.max_num_batched_tokens, model.max_model_len, page_size, width, num_groups=len(model.held_groups)
    )
    model.allocate_pool(int(max(step.pages.entries.max(), step.state_write.max(initial=0))) + 1, page_size)

    def prefill() -> None:
        logits = step.run(model)
        if model.part.position.is_driver:
            for params in (SamplingParams(), SamplingParams(top_p=0.9)):  # with equal logits every head is too narrow
                rows = [SampleRow(params, [0], 1)] * budget.max_num_seqs
                sample(logits.new_zeros(len(rows), logits.shape[1]), rows)

    def recorded() -> None:
        sizes = model, page_size, budget.max_num_seqs

        def skip(_: Callable[[], None]) -> Callable[[], None]:
            return lambda: None

        kept = [DecodeGraphs(*sizes, skip)]  # runs the largest once, and keeps its inputs and logits
        if budget.most_drafts:
            kept.append(DecodeGraphs(*sizes, skip, most_drafts=budget.most_drafts))
        MixedGraphs(*sizes, budget.max_num_batched_tokens, skip, most_drafts=budget.most_drafts)
        del kept

    transient = _peak(prefill) + _peak(recorded)  # a graph holds its memory, and a step may be both
    model.pool.free()
    adapters = 0 if model.adapters is None else model.adapters.reserved_bytes + GPU_RESERVE_BYTES  # twice the graphs
    pictures = bytes_for_pictures(model, budget, _peak)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    page_bytes = bytes_for_pages(
        budget.gpu_memory_utilization, total, free, model.used_by_others, transient + pictures + adapters
    )
    logger.info(
        "%s for KV pages: %g of %s, less %s held, %s for the largest steps, %s for pictures, %s for adapters and a "
        "reserve of %s",
        size_of(page_bytes),
        budget.gpu_memory_utilization,
        size_of(total),
        size_of(total - free - model.used_by_others),
        size_of(transient),
        size_of(pictures),
        size_of(adapters),
        size_of(GPU_RESERVE_BYTES),
    )
    return page_bytes


def bytes_for_pages(utilization: float, total: int, free: int, used_by_others: int, transient: int) -> int:
    """Return the bytes for KV pages on a GPU of `total` bytes, `free` of which no process uses.

    This process's share is `utilization` of the total. From it go the bytes that the process holds (weights, and what
    is not torch's), the bytes that steps take for a while (`transient`) and the reserve. `used_by_others` are the
    bytes that were in use when this process began.
    """
    held = total - free - used_by_others
    return max(0, int(min(utilization * total - held, free)) - transient - GPU_RESERVE_BYTES)


def largest_step(
    num_tokens: int, max_model_len: int, page_size: int, state_pages: int = 0, *, num_groups: int = 1
) -> StepInputs:
    """Return a step of whole prompts of `num_tokens` tokens in all, every token's logits wanted, in pages from 0 on.

    `state_pages`: of the recurrent state of each; `num_groups`: of layers.
    """
    parts: list[Scheduled] = []
    num_pages = 0
    for start in range(0, num_tokens, max_model_len):
        length = min(max_model_len, num_tokens - start)
        request = Request(Submission(f"largest-{start}", [0] * length, SamplingParams(prompt_logprobs=0)))
        held = -(-length // page_size)
        pages, *further = (
            range(start, start + held) for start in range(num_pages, num_pages + num_groups * held, held)
        )
        num_pages += num_groups * held
        state = StatePages((), range(num_pages, num_pages := num_pages + state_pages))
        parts.append(Scheduled(request, 0, length, pages, samples=True, further_pages=further, state=state))
    return StepInputs.of(Batch(parts, 0), page_size)[0]


def _peak(run: Callable[[], object]) -> int:
    """Return the most bytes that torch allocates during `run`, beyond those it has allocated before."""
    run()  # kernels compile, libraries allocate their workspaces
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def bytes_for_pictures(model: LoadedModel, budget: MemoryBudget, peak: Callable[[Callable[[], object]], int]) -> int:
    """Return the bytes that pictures may take on this rank beside steps of text. `peak`: measures a call.

    The rank that encodes keeps up to `mm_encoder_cache` of embeddings. Every rank may have the rows of a step twice: as
    collected or received, and in the inputs of the first layer.
    """
    encoder = model.encoder
    if encoder is None:
        return 0
    rows_of_step = 2 * budget.max_num_batched_tokens * encoder.embedding_token_bytes
    if not model.part.position.is_driver:
        return rows_of_step
    largest = max(peak(partial(encoder.measure, items)) for items in largest_calls(model, encoder, budget))
    return rows_of_step + budget.mm_encoder_cache + largest


def largest_calls(model: LoadedModel, encoder: PictureEncoder, budget: MemoryBudget) -> list[list[Item]]:
    """Return items to measure: the largest picture, and as many small ones as one call encodes.

    No picture has more rows than the cache holds, or than a prompt has tokens: the scheduler refuses it. Some models
    divide a large picture into tiles of one size, which take as much as so many small pictures.
    """
    most_of_one = min(budget.mm_encoder_cache // encoder.embedding_token_bytes, model.max_model_len)
    most = max(budget.max_num_batched_tokens, most_of_one)
    large = encoder.example(max(isqrt(most_of_one), _SMALL))
    small = encoder.example(_SMALL)
    most_small = 1 if "image_sizes" in small.tensors else max(most // small.num_embedding_tokens, 1)
    return [[large], [replace(small, content_hash=number.to_bytes(16, "little")) for number in range(most_small)]]
