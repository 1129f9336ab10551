"""The part of a model that one rank holds: the slice of every weight, the attention heads and the range of layers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.cut.stage import PipelineStage


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The indices `[start, stop)` of `whole` along `dim`. A `packed` tensor holds several such tensors, one after the
    other along `dim`, and the slice is taken of each."""

    dim: int
    start: int
    stop: int
    whole: int
    packed: int = 1

    def read(self, source: Any, num_dims: int) -> Tensor:
        """Return this slice of `source`, a tensor or a safetensors slice, of which no more is read.

        `num_dims` is the parameter's. Of a packed or stacked parameter, a checkpoint may hold the single tensors.
        """
        shape = source.get_shape() if hasattr(source, "get_shape") else list(source.shape)
        dim = self.dim - (num_dims - len(shape))
        before = (slice(None),) * dim
        parts = [
            source[(*before, slice(first + self.start, first + self.stop))]
            for first in range(0, shape[dim], self.whole)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def shape_of(self, whole: Sequence[int]) -> list[int]:
        """Return the shape of this slice of a parameter of shape `whole`."""
        shape = list(whole)
        shape[self.dim] = (self.stop - self.start) * self.packed
        return shape


@dataclass(slots=True)
class ModelPart:
    """The part of a model that one rank holds, written by `cut_model`."""

    position: RankPosition
    slices: dict[str, TensorSlice] = field(default_factory=dict)  # by parameter
    heads: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By layer whose attention is cut: (first KV head, end, number of KV heads of the whole layer)."""
    first_layer: int = 0
    num_layers: int = 0
    first_place: int = 0  # how many layers with attention are on earlier stages
    stage: PipelineStage | None = None  # None: one stage holds all layers
    collectives: Collectives | None = None  # None: this rank holds the whole model, or the part is only measured

    @property
    def held_layers(self) -> range:
        """Return the numbers of the layers of this rank."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which this rank computes without the others, see `Collectives.alone`."""
        return nullcontext() if self.collectives is None else self.collectives.alone()

    def from_driver(self, x: Tensor) -> Tensor:
        """Return the driver's `x`, whose shape and dtype every rank knows. Collective."""
        return x if self.collectives is None else self.collectives.from_driver(x)
