"""Least seconds of alternating calls, and signs that other work disturbed them."""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.kernels.cpu import measure as measuring
from crossdock.kernels.cpu.measure import Cells, measure, spread
from crossdock.kernels.options import Kernel

KERNELS: tuple[Kernel, ...] = ("native", "torch")
ROWS = (1, 8)


class Machine:
    """Clocks that only calls advance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[Kernel, int]] = []

    def cells(self, seconds: Callable[[Kernel, int], float]) -> Cells:
        """Return one call for each cell, which takes `seconds`."""

        def call(kernel: Kernel, rows: int) -> None:
            self.calls.append((kernel, rows))
            self.now += seconds(kernel, rows)

        return {(k, r): [partial(call, k, r)] for k in KERNELS for r in ROWS}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: made.now)
    return made


def test_kernels_alternate_and_least_seconds_count(machine: Machine) -> None:
    slow = iter([5.0, 0.2, *[0.22] * 100])

    def seconds(kernel: Kernel, rows: int) -> float:
        return next(slow) if (kernel, rows) == ("native", 8) else 0.01 * rows

    measured, _ = measure(KERNELS, ROWS, machine.cells(seconds))
    assert measured == {
        "native": pytest.approx([0.01, 0.2]),
        "torch": pytest.approx([0.01, 0.08]),
    }
    one_pass = [("native", 1), ("torch", 1), ("native", 8), ("torch", 8)]
    prepared, passes = machine.calls[:4], machine.calls[4:]
    assert sorted(prepared) == sorted(one_pass)
    assert passes == one_pass * 3


def test_short_calls_are_repeated_more_than_long_ones(machine: Machine) -> None:
    measure(KERNELS, ROWS, machine.cells(lambda kernel, rows: 0.001))
    assert machine.calls.count(("native", 1)) == 1 + 7
    machine.calls.clear()
    measure(KERNELS, ROWS, machine.cells(lambda kernel, rows: 0.1))
    assert machine.calls.count(("native", 1)) == 1 + 3


def test_measurement_ends_after_the_first_pass_that_takes_too_long(machine: Machine) -> None:
    measured, _ = measure(KERNELS, ROWS, machine.cells(lambda kernel, rows: 5.0))
    assert len(machine.calls) == 4 * 2  # one to prepare, and one pass
    assert measured == {"native": [5.0, 5.0], "torch": [5.0, 5.0]}
    machine.calls.clear()
    measure(KERNELS, ROWS, machine.cells(lambda kernel, rows: 0.375))
    assert len(machine.calls) == 4 * 2 + 2  # the second pass begins after 1.5 s


@pytest.mark.parametrize(("slower", "is_disturbed"), [(1.1, False), (2.0, True)])
def test_measurement_whose_equal_calls_differ_much_is_disturbed(
    machine: Machine, slower: float, is_disturbed: bool
) -> None:
    series = {(k, r): cycle((0.1, 0.1 * slower, 0.1 * slower)) for k in KERNELS for r in ROWS}
    measured, found = measure(KERNELS, ROWS, machine.cells(lambda kernel, rows: next(series[kernel, rows])))
    assert found is is_disturbed
    assert measured["native"] == pytest.approx([0.1, 0.1])


@given(st.lists(st.lists(st.floats(0.01, 10), min_size=1, max_size=7), min_size=1, max_size=9))
def test_spread_is_at_least_one_and_the_same_in_other_units(cells: list[list[float]]) -> None:
    assert spread(cells) >= 1
    assert spread([[1e3 * repeat for repeat in repeats] for repeats in cells]) == pytest.approx(spread(cells))


@given(st.floats(1, 100))
def test_one_interrupted_call_in_each_cell_is_no_spread(interrupted: float) -> None:
    assert spread([[1.0, interrupted, 1.0]] * 5) == 1
