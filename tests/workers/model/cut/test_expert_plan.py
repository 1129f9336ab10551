"""Placements of experts: whatever rows are counted, no expert is lost, and ranks come closer together."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from crossdock.workers.model.cut.expert_plan import (
    EMPTY,
    CopiedExperts,
    Loads,
    Placement,
    after_moves,
    first_placement,
    holders,
    next_moves,
    primary_ranks,
    rank_loads,
)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Placement, Loads]:
    """Return a placement after the load, and the counted rows of each expert."""
    num_ranks = draw(st.integers(2, 5))
    num_slots = draw(st.integers(1, 5))
    num_experts = draw(st.integers(max(num_ranks, num_slots), num_ranks * num_slots))
    rows = draw(arrays(np.int64, num_experts, elements=st.integers(0, 1000))).astype(float)
    return first_placement(num_experts, num_ranks, num_slots), rows


def settled(placement: Placement, rows: Loads) -> tuple[Placement, int]:
    """Return the placement after all changes, and the number of these. Check each of them."""
    number = 0
    while moves := next_moves(placement, rows):
        held = holders(placement, len(rows))
        for move in moves:
            assert held[move.source, move.expert], "a rank sends what it has"
            assert not held[move.rank, move.expert], "a rank gets what it lacks"
        after = after_moves(placement, moves)
        changed = [(int(rank), int(slot)) for rank, slot in np.argwhere(after != placement)]
        assert sorted(changed) == sorted((move.rank, move.slot) for move in moves)
        placement = after
        for slots in placement:
            own = slots[slots != EMPTY]
            assert len(set(own)) == len(own), "no rank has an expert twice"
        assert holders(placement, len(rows)).any(0).all(), "every expert is on some rank"
        number += 1
        assert number < 500, "changes come to an end"
    return placement, number


@given(layers())
def test_changes_lose_no_expert_and_come_to_an_end(layer: tuple[Placement, Loads]) -> None:
    placement, rows = layer
    after, _ = settled(placement, rows)
    assert next_moves(after, rows) == ()
    assert not rows.any() or EMPTY not in after


@given(layers(), st.data())
def test_changes_after_other_rows_are_counted_begin_where_the_placement_is(layer: Any, data: st.DataObject) -> None:
    placement, rows = layer
    after, _ = settled(placement, rows)
    settled(after, np.array(data.draw(st.permutations(list(rows)))))


@pytest.mark.parametrize(("num_ranks", "copies"), [(2, 0), (2, 2), (4, 4), (8, 0), (8, 8), (8, 32)])
def test_ranks_are_nearly_even_after_few_changes(num_ranks: int, copies: int) -> None:
    """By hand: rows that fall with the number of an expert, so that the first rank has most of them."""
    rows = 1000.0 / np.arange(1, 129) ** 0.7
    placement = first_placement(128, num_ranks, (128 + copies) // num_ranks)
    before = rank_loads(placement, rows)
    after, number = settled(placement, rows)
    loads = rank_loads(after, rows)
    assert before.max() > 1.4 * before.mean()
    assert loads.max() < 1.06 * loads.mean()
    assert number <= copies + 20


def test_hottest_experts_get_the_copies_and_lose_them_when_others_are_hotter() -> None:
    rows = np.array([5.0, 100, 5, 5, 60, 5, 5, 5])
    after, _ = settled(first_placement(8, 2, 5), rows)
    assert set(np.flatnonzero(holders(after, 8).sum(0) > 1)) == {1, 4}
    rows = np.array([5.0, 4, 90, 5, 70, 5, 5, 5])
    later, _ = settled(after, rows)
    assert set(np.flatnonzero(holders(later, 8).sum(0) > 1)) == {2, 4}


@given(layers(), st.integers(1, 40), st.data())
def test_rows_of_a_step_are_divided_whole_among_ranks_that_have_the_expert(
    layer: tuple[Placement, Loads], least: int, data: st.DataObject
) -> None:
    placement, counted = layer
    after, _ = settled(placement, counted)
    held = holders(after, len(counted))
    rows = data.draw(arrays(np.int64, len(counted), elements=st.integers(0, 300)))
    divided = CopiedExperts(held).divided(rows, least)
    assert set(divided) == {expert for expert in range(len(rows)) if rows[expert] and held[:, expert].sum() > 1}
    for expert, parts in divided.items():
        assert sum(number for _, number in parts) == rows[expert]
        assert len({rank for rank, _ in parts}) == len(parts)
        assert all(held[rank, expert] for rank, _ in parts)
        assert len(parts) == 1 or min(number for _, number in parts) >= least


def test_rows_go_where_the_step_has_fewest() -> None:
    """Two ranks, experts 0 and 1 alone on them, 2 on both: the copies end the difference."""
    held = np.array([[True, False, True], [False, True, True]])
    assert CopiedExperts(held).divided(np.array([100, 40, 100]), 10) == {2: [(1, 80), (0, 20)]}
    assert CopiedExperts(held).divided(np.array([40, 100, 101]), 10) == {2: [(0, 81), (1, 20)]}
    assert CopiedExperts(held).divided(np.array([100, 0, 60]), 10) == {2: [(1, 60)]}


def test_expert_with_few_rows_is_read_by_one_rank_which_reads_fewest_others() -> None:
    held = np.array([[True, True, False, True], [False, False, True, True]])
    assert CopiedExperts(held).divided(np.array([1, 1, 1, 3]), 32) == {3: [(1, 3)]}
    assert CopiedExperts(held).divided(np.array([0, 0, 1, 63]), 32) == {3: [(0, 63)]}


def test_expert_with_copies_is_computed_alone_where_the_rank_has_fewest_experts() -> None:
    placement = np.array([[0, 1, 4], [2, 4, EMPTY], [3, 4, EMPTY]])
    assert primary_ranks(placement, np.array([9.0, 9, 9, 1, 50])).tolist() == [0, 0, 1, 2, 2]
