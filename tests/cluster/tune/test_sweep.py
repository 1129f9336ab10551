"""Which steps a sweep measures, on step costs that are known: few where the curve is straight, all where it is not."""

import random
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.cluster.tune import sweep as module
from crossdock.cluster.tune.curves import Cell
from crossdock.cluster.tune.sweep import Sweep, grid
from crossdock.workers.schedule.cost.cost import StepCost, StepWork

COST = StepCost(base=9e-3, per_prefill_token=1e-3, per_attended=1e-7, per_decode=1e-3, per_context=1e-6)
CHUNKS = (16, 64, 128, 256, 512, 1024, 2048)
GRID = grid(CHUNKS, (1, 4), (256, 2048))
ENGINE: Any = None  # `measure` stands in its place


def swept(
    seconds: Callable[[Cell], float],
    repeats: int = 1,
    cells: list[Cell] = GRID,
    stop_after: int | None = None,
    budget_s: float = inf,
) -> tuple[list[Cell], list[Cell], list[tuple[float, float]]]:
    """Return the cells of a sweep on an engine whose steps take `seconds`, the measured ones in order, the progress.

    `stop_after`: the user interrupts the step after so many.
    """
    asked: list[Cell] = []
    progress: list[tuple[float, float]] = []

    def measure(
        _engine: object, chunk: tuple[int, int] | None, decodes: int, context: int, repeats: int
    ) -> tuple[StepWork, list[float]]:
        assert repeats == 1
        if len(asked) == stop_after:
            raise KeyboardInterrupt
        cell = Cell(chunk[1] if chunk is not None else 0, decodes, context)
        asked.append(cell)
        return cell.work, [seconds(cell)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "measure_step", measure)
        found = Sweep(ENGINE, cells, repeats, COST, lambda done, total: progress.append((done, total)), budget_s)
        try:
            found.run()
        except KeyboardInterrupt:
            assert stop_after is not None
    return found.cells(), asked, progress


def true_seconds(cell: Cell) -> float:
    return COST.seconds(cell.work)


def test_straight_curve_is_measured_at_four_of_seven_chunks() -> None:
    cells, asked, _ = swept(true_seconds)
    assert {cell.chunk for cell in asked} == {0, 16, 64, 256, 2048}
    assert [(cell.chunk, cell.decodes, cell.context) for cell in cells] == [
        (cell.chunk, cell.decodes, cell.context) for cell in GRID
    ]
    for cell in cells:
        assert cell.seconds == pytest.approx(true_seconds(cell))
        assert cell.is_measured == (cell.chunk in (0, 16, 64, 256, 2048))


def test_curve_that_is_a_constant_factor_off_the_prediction_is_straight_too() -> None:
    cells, asked, _ = swept(lambda cell: 3 * true_seconds(cell))
    assert {cell.chunk for cell in asked} == {0, 16, 64, 256, 2048}
    assert all(cell.seconds == pytest.approx(3 * true_seconds(cell)) for cell in cells)


@pytest.mark.parametrize("budget_s", [1.5, 4.0, 12.0])
def test_slow_machine_measures_in_its_budget_and_tells_the_rest_from_what_it_measured(budget_s: float) -> None:
    """A round of all cells takes 29 s, of the fewest that a straight curve needs 18 s."""
    cells, asked, _ = swept(lambda cell: 1.2 * true_seconds(cell), repeats=3, budget_s=budget_s)
    assert sum(1.2 * true_seconds(cell) for cell in asked) <= 1.2 * budget_s
    assert {cell.decodes for cell in asked} == {cell.decodes for cell in cells} == {0, 1, 4}
    for cell in cells:
        assert cell.seconds == pytest.approx(1.2 * true_seconds(cell))


def test_machine_that_is_ten_times_slower_than_predicted_measures_in_its_budget_too() -> None:
    """A round of the fewest cells that a straight curve needs would take 150 s."""
    cells, asked, _ = swept(lambda cell: 10 * true_seconds(cell), repeats=3, budget_s=40.0)
    assert sum(10 * true_seconds(cell) for cell in asked) <= 40.0
    assert len(cells) == len(GRID)
    for cell in cells:
        assert cell.seconds == pytest.approx(10 * true_seconds(cell))


def test_chunks_around_a_jump_are_all_measured() -> None:
    """From 512 tokens on a step takes twice as long, as where a kernel changes."""
    cells, _, _ = swept(lambda cell: true_seconds(cell) * (2 if cell.chunk >= 512 else 1))
    measured = {cell.chunk for cell in cells if cell.is_measured}
    assert {256, 512, 1024, 2048} <= measured


def test_line_without_a_middle_is_measured_as_a_whole() -> None:
    cells, asked, _ = swept(true_seconds, cells=grid((16, 32), (1,), (32,)))
    assert len(asked) == len(cells) == 5
    assert all(cell.is_measured for cell in cells)


@given(
    st.lists(st.sampled_from([1, 16, 20, 100, 300, 1000, 4000]), min_size=1, unique=True),
    st.floats(0.5, 2),
    st.integers(1, 4),
)
def test_every_cell_has_its_measured_or_an_interpolated_time(chunks: list[int], power: float, repeats: int) -> None:
    def seconds(cell: Cell) -> float:
        return 1e-3 + 1e-4 * cell.chunk**power + 1e-3 * cell.decodes

    cells, asked, progress = swept(seconds, repeats, grid(chunks, (1, 4), (256,)))
    assert len(cells) == 3 * len(chunks) + 2
    assert {cell.chunk for cell in cells if not cell.is_measured} <= {*sorted(chunks)[1:-1]}
    for cell in cells:
        if cell.is_measured:
            assert cell.seconds == pytest.approx(seconds(cell))
        else:
            around = [seconds(Cell(chunk, cell.decodes, 256)) for chunk in chunks]
            assert min(around) <= cell.seconds <= max(around)
    assert len(asked) == len(progress)


def test_alike_measurements_need_two_rounds_and_unlike_ones_all() -> None:
    _, asked, _ = swept(true_seconds, repeats=5)
    assert {asked.count(cell) for cell in asked} == {2}
    times: dict[Cell, int] = {}

    def noisy(cell: Cell) -> float:
        times[cell] = times.get(cell, 0) + 1
        return true_seconds(cell) * (1.5 if cell.chunk == 16 and times[cell] == 1 else 1)

    cells, asked, _ = swept(noisy, repeats=5)
    assert {asked.count(cell) for cell in asked if cell.chunk == 16} == {5}
    assert {asked.count(cell) for cell in asked if cell.chunk == 2048} == {2}
    assert all(cell.seconds == pytest.approx(true_seconds(cell)) for cell in cells if cell.chunk == 16)


def test_rounds_do_not_follow_each_other_in_one_cell() -> None:
    """A load from elsewhere must not fall on all measurements of a cell."""
    _, asked, _ = swept(true_seconds, repeats=2)
    first, second = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    assert set(first) == set(second)
    assert len(set(first)) == len(first)


def test_interrupted_sweep_keeps_the_numbers_of_streams_it_has_finished() -> None:
    _, asked, _ = swept(true_seconds)
    alone = sum(not cell.decodes for cell in asked)
    one = sum(cell.decodes == 1 for cell in asked)
    assert swept(true_seconds, stop_after=alone - 1)[0] == []
    assert {cell.decodes for cell in swept(true_seconds, stop_after=alone + one - 1)[0]} == {0}
    cells = swept(true_seconds, stop_after=alone + one)[0]
    assert {(cell.decodes, cell.context) for cell in cells} == {(0, 256), (0, 2048), (1, 256), (1, 2048)}
    assert all(cell.seconds == pytest.approx(true_seconds(cell)) for cell in cells)


def test_progress_grows_to_all() -> None:
    _, _, progress = swept(true_seconds, repeats=2)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert len({round(total, 9) for _, total in progress}) == 1  # a straight curve needs what was planned
    assert progress[-1][0] == pytest.approx(progress[-1][1])
    _, _, unforeseen = swept(lambda cell: true_seconds(cell) * (2 if cell.chunk >= 512 else 1), repeats=2)
    assert unforeseen[-1][0] == pytest.approx(unforeseen[-1][1])


def test_progress_of_further_rounds_is_short_of_all_until_they_end() -> None:
    noise = random.Random(0)
    _, asked, progress = swept(lambda cell: true_seconds(cell) * noise.uniform(1, 2), repeats=4)
    assert max(asked.count(cell) for cell in asked) == 4
    assert [share for share in (done / total for done, total in progress) if share > 1 + 1e-9] == []
    assert progress[-1][0] == pytest.approx(progress[-1][1])
