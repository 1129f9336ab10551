"""The part of a model that one rank holds: the slice of every weight, the attention heads and the range of layers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.expert_slots import ExpertSlots
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.cut.stage import PipelineStage


class SliceRange(NamedTuple):
    """The indices `[start, stop)` of a tensor that has `whole`."""

    start: int
    stop: int
    whole: int


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of a parameter along `dim`. Where the parameter holds several tensors, one after the other along `dim`, a
    range of each of them."""

    dim: int
    ranges: tuple[SliceRange, ...]

    def read(self, source: Any, num_dims: int) -> Tensor:
        """Read this slice of `source`, a tensor or a safetensors slice, and no more of it.

        `num_dims` is the parameter's. Of a packed or stacked parameter, a checkpoint may hold the single tensors.
        """
        shape = source.get_shape() if hasattr(source, "get_shape") else list(source.shape)
        dim = self.dim - (num_dims - len(shape))
        ranges = self.ranges
        if shape[dim] != sum(each.whole for each in ranges):  # a single tensor, of which an equal part is taken
            ranges = tuple(each for each in ranges if each.whole == shape[dim])[:1]
        if not ranges:
            return source[...]  # type: ignore[no-any-return]  # transformers reports the shape
        before = (slice(None),) * dim
        first = 0
        parts = []
        for start, stop, whole in ranges:
            parts.append(source[(*before, slice(first + start, first + stop))])
            first += whole
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def shape_of(self, whole: Sequence[int]) -> list[int]:
        """Return the shape of this slice of a parameter of shape `whole`."""
        shape = list(whole)
        shape[self.dim] = sum(stop - start for start, stop, _ in self.ranges)
        return shape

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the parameter of which this slice has `shape`."""
        whole = list(shape)
        whole[self.dim] = sum(each.whole for each in self.ranges)
        return whole

    def transposed(self, one: int, other: int) -> "TensorSlice":
        """Return this slice where the dimensions `one` and `other`, counted from the front, change places."""
        return TensorSlice({one: other, other: one}.get(self.dim, self.dim), self.ranges)


@dataclass(slots=True)
class ModelPart:
    """The part of a model that one rank holds, written by `cut_model`."""

    position: RankPosition
    slices: dict[str, TensorSlice] = field(default_factory=dict)  # by parameter
    heads: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By layer whose attention is cut: (first KV head, end, number of KV heads of the whole layer)."""
    experts: dict[str, range] = field(default_factory=dict)
    """The experts that this rank holds whole, by parameter; empty: it has slices of all experts, or there are none."""
    slots: list[ExpertSlots] = field(default_factory=list)
    """The slots of each layer whose experts may move between ranks; empty: no expert moves."""
    first_layer: int = 0
    num_layers: int = 0
    first_place: int = 0  # how many layers with attention are on earlier stages
    why_states_are_whole: str = ""  # why recurrent layers are not divided among tensor ranks; empty: they are
    why_experts_are_sliced: str = ""  # although whole ones were asked for; empty: they are not, or nothing was asked
    stage: PipelineStage | None = None  # None: one stage holds all layers
    collectives: Collectives | None = None  # None: this rank holds the whole model, or the part is only measured

    @property
    def held_layers(self) -> range:
        """Return the numbers of the layers of this rank."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which this rank computes without the others, see `Collectives.alone`."""
        return nullcontext() if self.collectives is None else self.collectives.alone()

    def checking(self) -> AbstractContextManager[None]:
        """Return a context in which every rank of the last stage has logits, see `Collectives.checking`."""
        return nullcontext() if self.collectives is None else self.collectives.checking()

    def from_driver(self, x: Tensor) -> Tensor:
        """Return the driver's `x`, whose shape and dtype every rank knows. Collective."""
        return x if self.collectives is None else self.collectives.from_driver(x)
