"""The rows of one forward pass that LoRA adapters change, and what they add to the outputs of a linear."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from crossdock.kernels.low_rank import Pair, Rows, add_low_rank

if TYPE_CHECKING:  # Triton is not installed everywhere
    from crossdock.kernels.gpu.triton_low_rank import LowRankRows


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AdapterWeights:
    """The matrices of an adapter on this rank, by the name of the module that they change."""

    pairs: Mapping[str, Pair]
    table: Tensor  # addresses and ranks, as `LowRankRows` takes them


class AdapterRows(NamedTuple):
    """The rows of one adapter in a flat batch."""

    weights: AdapterWeights
    rows: Rows


@dataclass(frozen=True, slots=True, eq=False)
class RowAdapters:
    """The adapters of a flat batch. Rows without an adapter are in no group, and cost nothing."""

    groups: Sequence[AdapterRows]
    numbers: Mapping[str, int] = field(default_factory=dict)  # of modules, in each adapter's table
    in_triton: "LowRankRows | None" = None  # None: products of torch, one adapter after the other

    def add(self, name: str, x: Tensor, y: Tensor) -> None:
        """Add what adapters change in the outputs of the module `name`, in place; see `add_low_rank`."""
        if self.in_triton is not None:
            self.in_triton.add(self.numbers[name], x, y)
            return
        pairs = ((weights.pairs.get(name), rows) for weights, rows in self.groups)
        add_low_rank(((pair, rows) for pair, rows in pairs if pair is not None), x, y)

    def add_joined(self, names: Sequence[str], x: Tensor, y: Tensor, sizes: Sequence[int]) -> None:
        """Do as `add` for modules of one input, whose outputs are side by side in y [T, sum of `sizes`]."""
        numbers = [self.numbers[name] for name in names] if self.in_triton is not None else []
        if self.in_triton is not None and numbers == [*range(numbers[0], numbers[0] + len(numbers))]:
            self.in_triton.add(numbers[0], x, y, sizes)
            return
        for name, part in zip(names, torch.split(y, [*sizes], 1), strict=True):
            self.add(name, x, part)

    def first(self, num_rows: int) -> "RowAdapters":
        """Return the room of a recorded step of up to `num_rows` rows in this one; see `Adapters.room`."""
        assert self.in_triton is not None
        return RowAdapters(self.groups, self.numbers, self.in_triton.first(num_rows))
