"""Measure the seconds of CPU kernels, and notice when other work on the machine disturbs the measurement."""

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TypeAlias

from crossdock.kernels.options import Kernel

_FULL_S = 0.4  # of an undisturbed measurement whose calls are short; longer calls have `_FEWEST_PASSES`
_FEWEST_PASSES = 3
_MOST_PASSES = 7
_LONGEST_S = 2.0  # after the first pass nothing begins later than this
_SPREAD = 1.25  # median of equal calls by the least of them, from which other work has disturbed them


Cells: TypeAlias = dict[tuple[Kernel, int], Sequence[Callable[[], object]]]
"""The calls of each kernel for each number of rows: calls of equal work on different data, whose least seconds count.

A call should take less than a few milliseconds: then other processes interrupt few of them.
"""

Seconds: TypeAlias = dict[Kernel, list[float]]
"""Of each kernel, one number for each number of rows."""


def measure(kernels: Sequence[Kernel], rows: Sequence[int], cells: Cells) -> tuple[Seconds, bool]:
    """Return the least seconds of a call of each cell, and whether other work disturbed the measurement.

    Kernels alternate, so that other load on the machine slows all of them alike. A measurement is disturbed if equal
    calls differ much.
    """
    in_turn = [(kernel, count) for count in rows for kernel in kernels]
    for cell in in_turn:
        cells[cell][0]()  # prepares what is prepared once
    repeats: dict[tuple[Kernel, int], list[float]] = {cell: [] for cell in in_turn}
    start = time.perf_counter()
    for passes in range(1, _MOST_PASSES + 1):
        for cell in in_turn:
            if passes == 1 or time.perf_counter() - start < _LONGEST_S:
                repeats[cell] += [_seconds(call) for call in cells[cell]]
        elapsed = time.perf_counter() - start
        is_full = passes >= _FEWEST_PASSES and elapsed > _FULL_S and spread(repeats.values()) <= _SPREAD
        if elapsed > _LONGEST_S or is_full:
            break
    table = {kernel: [min(repeats[kernel, count]) for count in rows] for kernel in kernels}
    return table, spread(repeats.values()) > _SPREAD


def _seconds(call: Callable[[], object]) -> float:
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


def spread(cells: Iterable[Sequence[float]]) -> float:
    """Return the ratio of median to least seconds among the repeats of a cell: the median ratio of all cells.

    So one interrupted call changes nothing. One kind of call whose seconds vary changes nothing either.
    """
    return median(median(repeats) / min(repeats) for repeats in cells)
