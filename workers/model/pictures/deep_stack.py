"""Add embeddings of pictures to the hidden states after a decoder's first layers (Qwen3-VL's DeepStack)."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from crossdock.workers.model.forward.forward_context import context_or_none


def add_after(layers: Sequence[nn.Module]) -> None:
    """Add the step's embeddings `[1 + l]` to the output of each of `layers`, numbered l from 0, in every forward pass.

    A layer of another pipeline stage is a placeholder without weights. It stays as it is.
    """
    for layer, module in enumerate(layers):
        if any(True for _ in module.parameters()):
            # Before all other hooks: one of them leaves a pipeline stage after its last layer.
            module.register_forward_hook(partial(_add, layer), prepend=True)


def _add(layer: int, module: nn.Module, args: object, output: Tensor) -> Tensor | None:
    """Add the embeddings of items that belong behind a layer to its output [1, T, E]."""
    context = context_or_none()
    pictures = context.pictures if context is not None else None
    if pictures is None or not len(pictures.rows):
        return None
    output = output.clone()
    output[0, pictures.rows] += pictures.embeddings[1 + layer]
    return output
