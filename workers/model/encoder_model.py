"""A model's encoder of pictures without its decoder: its KV pages hold the rows of embeddings that it computes.

To the engine it is a model with one layer: the key of a token is a row of embeddings, and there are no values. So
prompts of rows have chunks, prefix hits, preemption and transfers as other prompts have.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.backend import CPP
from crossdock.kvtransfer.layout import LayerShape
from crossdock.workers.model.architecture import num_deep_layers, text_config
from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.forward.row_adapters import RowAdapters
from crossdock.workers.model.forward.step_pictures import PictureRows
from crossdock.workers.model.kv_pool import KVPool
from crossdock.workers.model.load import dtype_of, longest_request
from crossdock.workers.model.memory.memory_fit import free_memory, size_of, used_by_all_but_torch
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.pictures.vision import PictureEncoder, PromptPictures, why_text_alone
from crossdock.workers.model.pooling import HiddenTap
from crossdock.workers.model.weights.checkpoint import resolve_model
from crossdock.workers.model.weights.weights import auto_model, load_weights, read_config, without_quantisation
from crossdock.workers.schedule.pictures.items import row_prompt
from crossdock.workers.schedule.request import Request
from crossdock.workers.schedule.submission import InvalidField

VARIANT = "embeddings"
"""Follows the name of the weights in the name of a pool of rows: no other pages of these weights go there."""


def row_layer(config: PretrainedConfig) -> LayerShape:
    """Return the one layer of pages that hold rows: `[1 + L, E]` flattened, for the input and L deep layers."""
    width: int = text_config(config).hidden_size
    return LayerShape(1, (1 + num_deep_layers(config)) * width, 0)


@dataclass(slots=True, eq=False)
class RowEncoder(PictureEncoder):
    """Encodes the items of prompts in which tokens are rows of items, see `row_prompt`."""

    def __post_init__(self) -> None:
        """Add no hooks of deep layers: their rows are added where the decoder is."""

    pool: KVPool = field(default_factory=KVPool)  # whose pages hold the rows

    def locate(self, request: Request) -> PromptPictures:
        """Check that the items of a request are its prompt, as `row_prompt` lays them out.

        Raises:
            InvalidField: an item is of a kind that the model does not take, or tokens and rows do not match.
        """
        expected, num_tokens = row_prompt(request.items, self.pool.page_size)
        places = []
        for number, (item, there) in enumerate(zip(request.items, expected, strict=True)):
            where = f"item {number} of the prompt, {item.kind} at row {item.start},"
            if not self.takes(item.kind):
                raise InvalidField(f"{where} is of a kind that this model does not take", "prompt")
            if item.length != item.num_rows or not item.num_rows:
                raise InvalidField(f"{where} has {item.num_rows} rows, and {item.length} tokens for them", "prompt")
            if item.start != there.start:
                raise InvalidField(
                    f"{where} must begin at {there.start}, with pages of {self.pool.page_size} rows", "prompt"
                )
            places.append((item.content_hash, np.arange(item.start, item.end)))
        if num_tokens != request.num_prompt_tokens:
            raise InvalidField(
                f"the items need a prompt of {num_tokens} tokens, and this one has {request.num_prompt_tokens}",
                "prompt",
            )
        return PromptPictures(places, None)


@dataclass(frozen=True, eq=False)
class EncoderModel(LoadedModel):
    """The encoder of a multimodal model. A step writes the rows of its items to the slots of their tokens."""

    @property
    def vocab_size(self) -> int:
        """Return the width of the logits: there is one token, which stands for a row."""
        return 1

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights in memory."""
        return sum(parameter.nbytes for parameter in self.module.parameters())

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        rows: Tensor,
        pictures: PictureRows | None = None,
        states: tuple[Tensor, Tensor] | None = None,
        adapters: RowAdapters | None = None,
    ) -> Tensor:
        """Write the embeddings of a step to its pages, and return logits [N, 1] of zeros.

        Arguments as in `LoadedModel.forward`. Tokens of no item, as measurements have, get rows of zeros.
        """
        ((pages, _),) = self.pool.pages  # [page, 1, token, (1 + L) * E]
        width = pages.shape[-1]
        found = pages.new_zeros(len(token_ids), width)
        if pictures is not None:
            found[pictures.rows] = pictures.embeddings.transpose(0, 1).flatten(1)
        pages.view(-1, width)[batch.slots] = found
        return found.new_zeros(len(rows), self.vocab_size)


def load_encoder(spec: ModelSpec, device: str = "cpu", kv_bytes: int | None = None) -> EncoderModel:
    """Load the encoder of pictures of a Hugging Face directory; no weight of its decoder is read.

    `kv_bytes` of pages must fit into memory beside the weights; None checks nothing.

    Raises:
        ValueError: the model has no pictures, or none that are supported here, or there is not enough memory. Or
            `max_model_len` is more than the model was made for, or weights are stored in a way that is not read.
    """
    path = resolve_model(spec.path)
    config = read_config(path)
    if reason := why_text_alone(config):
        raise ValueError(f"an encode replica needs a model that takes pictures: {reason}")
    longest_request(config, spec.max_model_len)  # raises before the weights are read
    dtype = dtype_of(spec, config, device)
    if kv_bytes is not None:
        _check_fits(config, dtype, kv_bytes, device)
    used_by_others = used_by_all_but_torch() if device != "cpu" else 0
    module, _ = load_weights(config, path, dtype, drop_decoder, needs_all=False)
    return wrap_encoder(module.to(device), spec.max_model_len, used_by_others)


def wrap_encoder(module: Any, max_model_len: int | None = None, used_by_others: int = 0) -> EncoderModel:
    """Return the encoder that `drop_decoder` has left of a transformers model.

    `max_model_len`: of the whole model, whose prompts have at most so many rows. `used_by_others`: see `LoadedModel`.
    """
    config: PretrainedConfig = module.config
    module.eval().requires_grad_(False)
    pool, no_hidden_states = KVPool(), HiddenTap(nn.Identity())
    return EncoderModel(
        module,
        config,
        longest_request(config, max_model_len),
        ModelPart(RankPosition()),
        *(CPP, {}, no_hidden_states, frozenset()),
        layers=[row_layer(config)],
        variant=VARIANT,
        encoder=RowEncoder(module, config, pool=pool),
        why_text_alone="",
        used_by_others=used_by_others,
        pool=pool,
    )


def drop_decoder(module: Any) -> ModelPart:
    """Take the decoder and the output projection out of a transformers model, and return the rest as a part."""
    dropped = {module.get_decoder(), module.get_output_embeddings()}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if child in dropped:
                setattr(parent, name, None)
    module.all_tied_weights_keys = {}  # these are the two
    return ModelPart(RankPosition())


def _check_fits(config: PretrainedConfig, dtype: torch.dtype, kv_bytes: int, device: str) -> None:
    """Raise ValueError where the weights of the encoder and `kv_bytes` of pages exceed the free memory."""
    with torch.device("meta"):
        module = auto_model(config).from_config(without_quantisation(config), dtype=dtype)
    drop_decoder(module)
    weights, free = sum(parameter.nbytes for parameter in module.parameters()), free_memory(device)
    if weights + kv_bytes > free:
        raise ValueError(
            f"the encoder needs {size_of(weights)} for weights and {size_of(kv_bytes)} for pages of embeddings, and "
            f"{size_of(free)} are free on {device}. Lower kv_cache_memory"
        )
