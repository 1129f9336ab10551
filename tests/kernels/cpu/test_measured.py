"""Disturbed measurements lower seconds; undisturbed ones replace a choice only where another is clearly faster."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from crossdock.kernels.cpu.choice import CLEAR, choose, sampled_rows
from crossdock.kernels.cpu.measured import Measured, Table, fits, joined
from crossdock.kernels.options import Kernel

ROWS = (1, 4, 8, 16, 32, 64, 256)
KERNELS: tuple[Kernel, ...] = ("own", "onednn", "torch")
tables = st.fixed_dictionaries(
    {kernel: st.lists(st.floats(0.5, 50), min_size=len(ROWS), max_size=len(ROWS)) for kernel in KERNELS}
)
most_kernels = st.sampled_from([1, 2])


def scaled(table: Table, factors: list[float]) -> Table:
    """Return the table with every cell times a factor of its own."""
    each = iter(factors)
    return {kernel: [s * next(each) for s in seconds] for kernel, seconds in table.items()}


def cells_of(factor: Any) -> Any:
    return st.lists(factor, min_size=len(KERNELS) * len(ROWS), max_size=len(KERNELS) * len(ROWS))


@given(tables, cells_of(st.floats(1, 5)), cells_of(st.floats(1, 5)), most_kernels)
def test_least_of_disturbed_seconds_count(true: Table, before: list[float], now: list[float], most: int) -> None:
    earlier, later = scaled(true, before), scaled(true, now)
    found = joined(Measured(earlier, is_disturbed=True), Measured(later, is_disturbed=True), ROWS, most)
    assert found.is_disturbed
    for kernel in KERNELS:
        for i in range(len(ROWS)):
            assert found.seconds[kernel][i] == min(earlier[kernel][i], later[kernel][i]) >= true[kernel][i]


@given(tables, tables, most_kernels)
def test_disturbed_measurement_replaces_no_undisturbed_one_but_marks_it(before: Table, now: Table, most: int) -> None:
    found = joined(Measured(before, is_disturbed=False), Measured(now, is_disturbed=True), ROWS, most)
    assert found == Measured(before, is_disturbed=True)


@given(tables, cells_of(st.floats(1, 5)), most_kernels)
def test_undisturbed_measurement_ends_what_a_disturbed_one_began(true: Table, load: list[float], most: int) -> None:
    now = Measured(true, is_disturbed=False)
    assert joined(Measured(scaled(true, load), is_disturbed=True), now, ROWS, most) == now


@given(tables, tables, most_kernels)
def test_choice_that_stays_is_close_to_the_best_of_now(before: Table, now: Table, most: int) -> None:
    """However wrong the earlier seconds were."""
    found = joined(Measured(before, is_disturbed=False), Measured(now, is_disturbed=False), ROWS, most)
    assert not found.is_disturbed
    choice, best = choose(found.seconds, ROWS, most), choose(now, ROWS, most)
    fastest = [min(column) for column in zip(*now.values(), strict=True)]
    worst, least = (max(now[one.at(rows)][i] / fastest[i] for i, rows in enumerate(ROWS)) for one in (choice, best))
    assert worst <= CLEAR * least


def sample_of(table: Table, sampled: Sequence[int]) -> Table:
    return {kernel: [table[kernel][ROWS.index(rows)] for rows in sampled] for kernel in KERNELS}


@given(tables, cells_of(st.floats(1, 1.09)), st.floats(0.5, 2), most_kernels)
def test_noise_replaces_no_choice(table: Table, noise: list[float], speed: float, most: int) -> None:
    """Neither a tenth in each cell, nor a machine that is slower or faster altogether."""
    now = {kernel: [s * speed for s in seconds] for kernel, seconds in scaled(table, noise).items()}
    choice = choose(table, ROWS, most)
    sampled = sampled_rows(choice, ROWS)
    assert fits(sample_of(now, sampled), sampled, table, ROWS, choice)
    found = joined(Measured(table, is_disturbed=False), Measured(now, is_disturbed=False), ROWS, most)
    assert choose(found.seconds, ROWS, most) == choice


@given(tables, tables, most_kernels)
def test_sample_fits_where_no_sampled_row_became_much_slower_than_the_fastest(
    before: Table, now: Table, most: int
) -> None:
    choice = choose(before, ROWS, most)
    sampled = sampled_rows(choice, ROWS)

    def slowdown(table: Table, rows: int) -> float:
        i = ROWS.index(rows)
        return table[choice.at(rows)][i] / min(table[kernel][i] for kernel in KERNELS)

    expected = all(slowdown(now, rows) <= CLEAR * slowdown(before, rows) for rows in sampled)
    assert fits(sample_of(now, sampled), sampled, before, ROWS, choice) == expected


def test_sample_of_an_idle_machine_does_not_fit_what_was_chosen_under_load() -> None:
    """Two busy loops beside the first measurement (ms, all layers of SmolLM2-135M in bfloat16, AMD Zen 5)."""
    busy: Table = {
        "own": [24.05, 15.71, 24.85, 15.29, 29.94, 59.97, 291.18],
        "onednn": [41.05, 24.45, 42.97, 56.79, 75.68, 104.29, 437.88],
        "torch": [20.19, 21.13, 38.8, 50.97, 73.77, 116.42, 400.26],
    }
    idle: Table = {
        "own": [4.78, 5.55, 5.9, 6.76, 11.04, 16.33, 63.32],
        "onednn": [12.89, 12.65, 13.72, 16.51, 23.06, 32.49, 85.2],
        "torch": [14.24, 14.76, 16.29, 19.03, 25.81, 36.36, 89.36],
    }
    choice = choose(busy, ROWS)
    assert str(choice) == "torch below 4 rows, own from there"
    sampled = sampled_rows(choice, ROWS)
    assert sampled == (1, 4, 64)
    assert not fits(sample_of(idle, sampled), sampled, busy, ROWS, choice)
    earlier, now = (Measured(table, is_disturbed=False) for table in (busy, idle))
    assert joined(earlier, now, ROWS) == now


@given(tables, most_kernels)
def test_sampled_rows_have_every_kernel_of_the_choice(table: Table, most: int) -> None:
    choice = choose(table, ROWS, most)
    sampled = sampled_rows(choice, ROWS)
    assert {choice.at(rows) for rows in sampled} == set(choice.kernels)
    assert sampled == tuple(sorted(set(sampled)))
    assert {ROWS[0], ROWS[-2]} <= set(sampled) <= set(ROWS)
    assert len(sampled) <= 3
