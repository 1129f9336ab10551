"""Give Llama 4's attention its chunks and positions of rows, which transformers takes from masks and caches."""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from crossdock.kernels.backend import Attention
from crossdock.workers.model.architecture import layer_kinds
from crossdock.workers.model.forward.forward_context import context_or_none


def attention_chunks(decoder: PretrainedConfig, max_model_len: int, attention: Attention) -> dict[int, int]:
    """Return the tokens of the attention chunks of each layer that has them, by layer number.

    Chunks that no request leaves are left out: within the first one, attention is causal.

    Raises:
        ValueError: `attention` does not take such layers.
    """
    size: int | None = getattr(decoder, "attention_chunk_size", None)
    layers = [layer for layer, kind in enumerate(layer_kinds(decoder)) if kind == "chunked_attention"]
    if not layers or size is None or size >= max_model_len:
        return {}
    if not attention.takes_attention_chunks:
        raise ValueError(
            f"attention_backend {attention.name} has no attention chunks, and {decoder.model_type} has some of {size} "
            f"tokens: triton and torch take them, and max_model_len {size} or less needs none"
        )
    return dict.fromkeys(layers, size)


def scale_by_position(module: Any) -> None:
    """Let layers whose queries grow with the position (`attn_temperature_tuning`) find the position of each row.

    transformers counts rows from the tokens in its cache, as if a flat batch were one sequence.
    """
    for attention in module.modules():
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            attention.register_forward_pre_hook(_give_positions, with_kwargs=True)


def _give_positions(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = context_or_none()
    if context is None or context.positions is None:
        return None
    return args, {**kwargs, "past_key_values": _RowPositions(context.positions)}


class _RowPositions:
    """Stands in for transformers' cache: each row has its own number of earlier tokens, and keys lie in pages."""

    def __init__(self, positions: Tensor) -> None:
        """`positions`: [T]."""
        self._positions = positions

    def get_seq_length(self, _layer: int) -> Tensor:
        """Return the offsets [T] that transformers adds to the number of each row to get its position."""
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def update(self, keys: Tensor, values: Tensor, _layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the batch alone."""
        return keys, values
