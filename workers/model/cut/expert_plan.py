"""Which rank holds which experts of a layer, and computes which of their rows.

A rank holds experts in slots. An expert may be on several ranks: it has copies. A change of the placement is small: one
expert is copied to a slot, or two ranks exchange one each. So a layer can be changed between steps, piece by piece, and
after each change every expert is on some rank.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

EMPTY = -1  # in place of an expert
_TURNS = 2  # in which rows are divided: in the second one an expert knows where all others are
_SHARPNESS = 8  # exponent of the norm of loads: close to the largest of them, and lower where fewer ranks have it
_LEAST_GAIN = 0.002  # of that norm: an exchange that gains less is not worth its bytes
_HOTTER = 1.5  # times the rows of a copy, for which another expert gets its slot

Placement: TypeAlias = NDArray[np.int64]
"""The experts in the slots of each rank, [ranks, slots]; EMPTY: none. No rank has an expert twice."""

Loads: TypeAlias = NDArray[np.float64]


class Move(NamedTuple):
    """An expert that rank `source` sends to a slot of another rank."""

    expert: int
    source: int
    rank: int
    slot: int


def first_placement(num_experts: int, num_ranks: int, num_slots: int) -> Placement:
    """Return the experts in the order of the model, as ranks load them, and no copies.

    `num_slots`: of each rank, at least as many as the experts that it loads.
    """
    placement = np.full((num_ranks, num_slots), EMPTY)
    for rank in range(num_ranks):
        own = np.arange(num_experts * rank // num_ranks, num_experts * (rank + 1) // num_ranks)
        placement[rank, : len(own)] = own
    return placement


def holders(placement: Placement, num_experts: int) -> NDArray[np.bool_]:
    """Return which rank holds which expert, [ranks, experts]."""
    held = np.zeros((len(placement), num_experts + 1), bool)  # the last column is that of EMPTY
    held[np.arange(len(placement))[:, None], placement] = True
    return held[:, :num_experts]


def rank_loads(placement: Placement, rows: Loads) -> Loads:
    """Return the rows of each rank, [ranks], where copies of an expert divide its rows [experts] evenly."""
    held = holders(placement, len(rows))
    loads: Loads = held @ (rows / held.sum(0))
    return loads


def next_moves(placement: Placement, rows: Loads) -> tuple[Move, ...]:
    """Return the next change of a layer: moves that take effect together. None of them: no change gains enough.

    rows: [experts], those of each expert that were counted. Copies are for the experts with most rows. Then the rank
    with the most rows exchanges experts with others.
    """
    if not rows.any():
        return ()
    return _copy(placement, rows) or _exchange(placement, rows)


def after_moves(placement: Placement, moves: Sequence[Move]) -> Placement:
    """Return the placement after a change."""
    after = placement.copy()
    for move in moves:
        after[move.rank, move.slot] = move.expert
    return after


def primary_ranks(placement: Placement, rows: Loads) -> NDArray[np.int64]:
    """Return the rank that alone computes each expert where a step has few rows of it, [experts].

    Such a step takes the time to read its experts, each once, however many rows it has. So ranks are compared by their
    experts; one with fewer rows than the mean is not read in every step, and counts less. Experts with copies go to the
    rank with the least, of those that hold them.
    """
    held = holders(placement, len(rows))
    rows = np.minimum(rows, rows.mean())
    primary: NDArray[np.int64] = held.argmax(0)
    is_copied = held.sum(0) > 1
    loads = held[:, ~is_copied] @ rows[~is_copied]
    for expert in sorted(np.flatnonzero(is_copied), key=lambda each: (-rows[each], each)):
        ranks = np.flatnonzero(held[:, expert])
        primary[expert] = ranks[loads[ranks].argmin()]
        loads[primary[expert]] += rows[expert]
    return primary


class CopiedExperts:
    """The experts of one layer that have copies, prepared to divide the rows of many steps: some microseconds each."""

    def __init__(self, held: NDArray[np.bool_]) -> None:
        """Prepare the experts of a placement. `held`: see `holders`."""
        is_copied = held.sum(0) > 1
        self._alone = np.where(is_copied, 0, held.astype(np.int64))  # [ranks, experts]
        self._experts = np.flatnonzero(is_copied)
        self._ranks = {expert: np.flatnonzero(held[:, expert]).tolist() for expert in self._experts.tolist()}

    def divided(self, rows: NDArray[np.int64], least: int) -> dict[int, list[tuple[int, int]]]:
        """Divide a step's rows of the copied experts so that the rank with the most work has as little as it can.

        rows: [experts], of the step. An expert is as much work as its rows, and at least as `least` rows, since its
        weights are read: with fewer than twice as many rows it is computed by one rank. Returns the ranks that compute
        each expert that has copies and rows, and how many rows each has.
        """
        loads: list[int] = (self._alone @ np.where(rows == 0, 0, np.maximum(rows, least))).tolist()
        numbers = dict(zip(self._ranks, rows[self._experts].tolist(), strict=True))
        divided: dict[int, list[tuple[int, int]]] = {}
        for expert in sorted((each for each in numbers if numbers[each]), key=lambda each: -numbers[each]) * _TURNS:
            for rank, part in divided.get(expert, ()):
                loads[rank] -= max(part, least)
            divided[expert] = self._parts(expert, numbers[expert], loads, least)
            for rank, part in divided[expert]:
                loads[rank] += max(part, least)
        return divided

    def _parts(self, expert: int, number: int, loads: Sequence[int], least: int) -> list[tuple[int, int]]:
        """Return the ranks that compute `number` rows of an expert beside `loads`, and how many rows each has."""
        holding = self._ranks[expert]
        if number < 2 * least:
            return [(min(holding, key=loads.__getitem__), number)]
        ranks = sorted(holding, key=loads.__getitem__)[: number // least]
        return list(zip(ranks, _poured(number, [loads[rank] for rank in ranks], least), strict=False))


def _poured(rows: int, loads: Sequence[int], least: int) -> list[int]:
    """Return how many of an expert's rows the first ranks get, so that their loads become equal where they can.

    loads: of the ranks with a copy, in rising order. Ranks that would get fewer rows than `least` get none.
    """
    for number in range(len(loads), 1, -1):
        level, rest = divmod(rows + sum(loads[:number]), number)
        parts = [level - load + (place < rest) for place, load in enumerate(loads[:number])]
        if min(parts) >= least:
            return parts
    return [rows]


def _copy(placement: Placement, rows: Loads) -> tuple[Move, ...]:
    """Return the copy of the expert with most rows for each of its copies; none: copies are where they should be.

    It takes an empty slot of the rank with the fewest rows, else that of a copy whose rows are far fewer.
    """
    held = holders(placement, len(rows))
    number = held.sum(0)
    loads = rank_loads(placement, rows)
    spare = (placement == EMPTY) | (number[placement] > 1)
    for expert in np.argsort(-rows / number, kind="stable"):
        fitting = spare & ~held[:, expert][:, None]  # [ranks, slots]
        places = []
        for rank, slot in zip(*np.nonzero(fitting), strict=True):
            dropped = placement[rank, slot]
            lost = 0.0 if dropped == EMPTY else rows[dropped] / (number[dropped] - 1)
            if dropped == EMPTY or lost * _HOTTER < rows[expert] / number[expert]:
                places.append((dropped != EMPTY, lost, loads[rank], int(rank), int(slot)))
        if places:
            *_, rank, slot = min(places)
            return (Move(int(expert), int(held[:, expert].argmax()), rank, slot),)
        if fitting.any() and EMPTY not in placement:  # these copies have more rows, and other experts have fewer
            break
    return ()


def _exchange(placement: Placement, rows: Loads) -> tuple[Move, ...]:
    """Return the best exchange of an expert of the rank with the most rows for one of another rank; none: it has none.

    Copies count as if they divided rows evenly.
    """
    held = np.append(holders(placement, len(rows)), np.ones((len(placement), 1), bool), 1)  # EMPTY: none takes it
    each = np.append(rows / held[:, :-1].sum(0), 0.0)
    loads = rank_loads(placement, rows) / rows.sum()
    each = each / rows.sum()
    fullest = int(loads.argmax())
    own = placement[fullest]
    less = each[own][:, None, None] - each[placement]  # [own slots, ranks, slots]
    is_possible = (less > 0) & ~held[:, own].T[:, :, None] & ~held[fullest][placement]
    powers = loads**_SHARPNESS
    without = powers.sum() - powers[fullest] - powers
    after = without[:, None] + (loads[fullest] - less) ** _SHARPNESS + (loads[:, None] + less) ** _SHARPNESS
    after = np.where(is_possible, after, np.inf)
    mine, rank, slot = (int(index) for index in np.unravel_index(after.argmin(), after.shape))
    if after[mine, rank, slot] > powers.sum() * (1 - _LEAST_GAIN) ** _SHARPNESS:
        return ()
    return (
        Move(int(own[mine]), fullest, rank, slot),
        Move(int(placement[rank, slot]), rank, fullest, mine),
    )
