"""The experts of one layer where they may move between ranks: which slot of which rank computes which rows.

A rank holds experts in slots. It may have more slots than a share of the experts: for copies. Every rank has all rows
of a step and the expert of each, so all ranks decide alike who computes a row, and nothing is exchanged.
"""

from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdock.workers.model.cut.expert_plan import (
    EMPTY,
    CopiedExperts,
    Loads,
    Placement,
    first_placement,
    holders,
    primary_ranks,
)
from crossdock.workers.model.cut.position import CannotCut, RankPosition

WORTH_A_COPY = {"cpu": 32, "cuda": 256}
"""Rows for which it pays to read a copy's weights, by device. Fewer take less time to compute than the weights to read:
on an H100 about 295 rows in bfloat16 (990 TFLOP/s, 3.35 TB/s, by data sheet), on a CPU 10 to 30."""


class ExpertSlots:
    """The slots of one layer on the ranks of a stage, and the counted rows of its experts."""

    def __init__(self, name: str, num_experts: int, position: RankPosition) -> None:
        """Place the experts in the order of the model. `name`: of the module of experts.

        Raises:
            CannotCut: the experts with their copies are no multiple of the ranks.
        """
        copies = position.num_redundant_experts or 0
        ranks = position.tensor_size
        if (num_experts + copies) % ranks:
            least = -num_experts % ranks
            raise CannotCut(
                f"eplb_config: num_redundant_experts is {copies}: {num_experts} experts and their copies must be a "
                f"multiple of {ranks} ranks; {least}, {least + ranks} or {least + 2 * ranks} would be"
            )
        if copies > num_experts * (ranks - 1):
            raise CannotCut(
                f"eplb_config: num_redundant_experts is {copies}: {num_experts} experts on {ranks} ranks can have at "
                f"most {num_experts * (ranks - 1)} copies"
            )
        self.name = name
        self.num_experts = num_experts
        self.num_slots = (num_experts + copies) // ranks
        self.has_moved = False  # since the weights were read
        self._rank = position.tensor_rank
        self._first = first_placement(num_experts, ranks, self.num_slots)
        self.placement: Placement = self._first
        self._has_no_copies = not copies
        self._copied = CopiedExperts(holders(self._first, num_experts))
        self._own: dict[int, int] = {}  # the slot here of each expert that this rank has
        self._alone = np.zeros(0, np.int64)  # [experts]: the slot here of each expert without copies
        self._tables: _Tables | None = None  # on the device, from the first step on

    @property
    def num_empty(self) -> int:
        """The slots here that no expert is in."""
        return int((self.placement[self._rank] == EMPTY).sum())

    @property
    def rows(self) -> Tensor:
        """The counted rows of each expert, [experts] int64, on the device."""
        assert self._tables is not None, "no step has been computed"
        return self._tables.rows

    def own_slot_of(self, expert: int) -> int:
        """Return the slot of this rank that has an expert, which one of them has."""
        return int((self.placement[self._rank] == expert).argmax())

    def slots_of(self, chosen: Tensor) -> Tensor:
        """Return in which slot of this rank each row is computed, [T, k]; `num_slots`: on another rank. Count the rows.

        chosen: [T, k], the experts of each row. On a CPU copies divide the rows of the step so that the ranks have
        equal work. On a GPU the host does not know the step: an expert with few rows is computed by one rank, and one
        with many has its rows divided evenly.
        """
        if self._tables is None or self._tables.rows.device != chosen.device:
            self._tables = _Tables(self.num_experts, len(self.placement), chosen.device)
            self._fill()
        tables = self._tables
        if _may_know_rows(chosen):
            return torch.from_numpy(self._known(chosen.numpy().ravel(), tables.rows.numpy())).view(chosen.shape)
        flat = chosen.flatten().long()
        rows = torch.zeros_like(tables.rows).scatter_add_(0, flat, torch.ones_like(flat))  # [experts]
        tables.rows.add_(rows)
        first = tables.slots[:, 0][chosen]
        if self._has_no_copies:
            return first
        least = WORTH_A_COPY["cuda"]
        if len(chosen) < 2 * least:
            return first
        used = torch.minimum(rows // least, tables.copies).clamp_min_(1)
        turn = torch.arange(len(chosen), device=chosen.device)[:, None] % used[chosen]
        return tables.slots[chosen, turn]

    def _known(self, chosen: NDArray[np.int64], counted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of `chosen` [T * k] on a CPU, and add the step's rows to `counted` [experts].

        It takes calls of numpy, few of them: beside a step of one stream each call of torch would be felt.
        """
        rows = np.bincount(chosen, minlength=self.num_experts)
        counted += rows
        return self._alone[chosen] if self._has_no_copies else self._divided(chosen, rows)

    def _divided(self, chosen: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of `chosen` [T * k] in a step with so many rows of each expert, where some have copies."""
        slot_of = self._alone.copy()
        shared = dict[int, tuple[int, int]]()  # the rows that are computed here, of each expert that ranks share
        for expert, parts in self._copied.divided(rows, WORTH_A_COPY["cpu"]).items():
            first = 0
            for rank, number in parts:
                if rank == self._rank and len(parts) == 1:
                    slot_of[expert] = self._own[expert]
                elif rank == self._rank:
                    shared[expert] = first, first + number
                first += number
        slots: NDArray[np.int64] = slot_of[chosen]
        if shared:
            order = np.argsort(chosen.astype(np.int16), kind="stable")  # of numbers of 16 bits numpy makes a radix sort
            ends = rows.cumsum()
            for expert, (first, end) in shared.items():
                before = ends[expert] - rows[expert]
                slots[order[before + first : before + end]] = self._own[expert]
        return slots

    def counted_rows(self) -> list[int]:
        """Return the rows of each expert since `clear_rows`. On a GPU the host waits."""
        rows: list[int] = self.rows.tolist()
        return rows

    @torch.inference_mode()
    def clear_rows(self) -> None:
        """Count the rows of each expert from now on."""
        if self._tables is not None:
            self._tables.rows.zero_()

    @torch.inference_mode()
    def place(self, placement: Placement, rows: Loads) -> None:
        """Compute the steps to come by another placement. rows: of each expert, as counted."""
        self.has_moved = True
        self.placement = placement
        self._fill(rows)

    @torch.inference_mode()
    def reset(self) -> None:
        """Compute the steps to come by the placement in which ranks read weights."""
        self.placement = self._first
        self.has_moved = False
        self._fill()

    def _fill(self, rows: Loads | None = None) -> None:
        """Write the placement to the tables, in place: recorded steps read them there. rows: see `place`."""
        if self._tables is None:
            return
        held = holders(self.placement, self.num_experts)
        copies = held.sum(0)
        primary = primary_ranks(self.placement, np.ones(self.num_experts) if rows is None else rows)
        slots = np.full((self.num_experts, len(held)), self.num_slots)
        for slot, expert in enumerate(self.placement[self._rank]):
            if expert != EMPTY:
                before = held[: self._rank, expert].sum() + (primary[expert] > self._rank)
                slots[expert, 0 if primary[expert] == self._rank else before] = slot
        self._copied = CopiedExperts(held)
        self._own = {int(each): slot for slot, each in enumerate(self.placement[self._rank]) if each != EMPTY}
        self._alone = np.where(copies > 1, self.num_slots, slots[:, 0])
        self._tables.slots.copy_(torch.from_numpy(slots))
        self._tables.copies.copy_(torch.from_numpy(copies))


class _Tables:
    """The numbers of a placement that a step reads, on the device."""

    def __init__(self, num_experts: int, num_ranks: int, device: torch.device) -> None:
        self.slots = torch.zeros(num_experts, num_ranks, dtype=torch.int64, device=device)
        """The slot here of each copy of an expert, the one that is computed alone first; the number of slots: none."""
        self.copies = torch.ones(num_experts, dtype=torch.int64, device=device)
        self.rows = torch.zeros(num_experts, dtype=torch.int64, device=device)


def _may_know_rows(chosen: Tensor) -> bool:
    """Return whether the host may wait for the rows of a step: not on GPUs, whose steps it only launches."""
    return not chosen.is_cuda


def slot_bytes(experts: Any) -> int:
    """Return the bytes of one slot of a module of experts: all slots are alike."""
    return sum(map(len, slot_tensors(experts, 0)))


def slot_form(experts: Any) -> str:
    """Return how the weights of a slot are kept: the kernels whose layouts they have, and their bytes.

    From how many rows on each kernel runs is left out: each rank measures that, and it changes no layout.
    """
    kernels = dict.fromkeys(name for child in experts.children() for name in getattr(child, "layouts", ()))
    return f"{' and '.join(kernels) or 'plain weights'} in {slot_bytes(experts)} bytes"


def slot_tensors(experts: Any, slot: int) -> list[Tensor]:
    """Return the memory of the weights in one slot of a module of experts, as bytes."""
    plain = [parameter.data[slot] for parameter in experts.parameters(recurse=False)]
    packed = [child.tensors_of(slot) for child in experts.children() if hasattr(child, "tensors_of")]
    return [tensor.view(-1).view(torch.uint8) for tensor in (*plain, *chain.from_iterable(packed))]
