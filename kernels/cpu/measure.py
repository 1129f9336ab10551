"""Measure the seconds of CPU kernels, and notice when other work on the machine disturbs the measurement."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeAlias

from crossdock.kernels.options import Kernel

_FULL_S = 0.4  # of a measurement whose calls are short; longer calls have `_FEWEST_PASSES`
_FEWEST_PASSES, _MOST_PASSES = 3, 7
_LONGEST_S = 2.0  # after the first pass nothing begins later than this
_WAITED_SHARE = 0.1  # of the elapsed time, in which threads waited for a core
_SPREAD = 1.25  # median of equal calls by the least of them


@dataclass(frozen=True, slots=True)
class Timed:
    """Calls of equal work on different data. The least seconds of one, times `scale`, count towards a cell.

    A call should take less than a few milliseconds: then other processes interrupt few of them.
    """

    calls: Sequence[Callable[[], object]]
    scale: float = 1.0


Cells: TypeAlias = dict[tuple[Kernel, int], list[Timed]]
"""The calls of each kernel for each number of rows."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of each kernel, one number for each number of rows.

    `is_disturbed`: other work on the machine slowed their measurement.
    """

    seconds: dict[Kernel, list[float]]
    is_disturbed: bool


@dataclass(slots=True)
class _Repeats:
    """Equal calls, and what each took so far."""

    timed: Timed
    seconds: list[float] = field(default_factory=list)

    def add(self) -> None:
        for call in self.timed.calls:
            before = time.perf_counter()
            call()
            self.seconds.append(time.perf_counter() - before)


def measure(kernels: Sequence[Kernel], rows: Sequence[int], cells: Cells) -> Measured:
    """Return, for each cell, the sum of the least seconds of its calls times their scales.

    Kernels alternate, so that other load on the machine slows all of them alike. A measurement is disturbed if threads
    of this process waited for a core, or if equal calls differ much.
    """
    found = {key: [_Repeats(timed) for timed in calls] for key, calls in cells.items()}
    in_turn = [repeats for count in rows for kernel in kernels for repeats in found[kernel, count]]
    for repeats in in_turn:
        repeats.timed.calls[0]()  # prepares what is prepared once
    start, waited_before = time.perf_counter(), waited_seconds()
    for passes in range(1, _MOST_PASSES + 1):
        for repeats in in_turn:
            if passes == 1 or time.perf_counter() - start < _LONGEST_S:
                repeats.add()
        elapsed = time.perf_counter() - start
        if elapsed > _LONGEST_S or (passes >= _FEWEST_PASSES and elapsed > _FULL_S):
            break
    is_disturbed = waited_seconds() - waited_before > _WAITED_SHARE * elapsed
    is_disturbed |= spread(repeats.seconds for repeats in in_turn) > _SPREAD
    table = {
        kernel: [sum(min(each.seconds) * each.timed.scale for each in found[kernel, count]) for count in rows]
        for kernel in kernels
    }
    return Measured(table, is_disturbed)


def spread(cells: Iterable[Sequence[float]]) -> float:
    """Return the ratio of median to least seconds among the repeats of a cell: the median ratio of all cells.

    So one interrupted call changes nothing. One kind of call whose seconds vary changes nothing either.
    """
    return median(median(repeats) / min(repeats) for repeats in cells)


def waited_seconds() -> float:
    """Return for how long threads of this process have waited for a core although they could run.

    0 where Linux does not count this. Threads that have ended are not counted.
    """
    waited = 0
    with suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            with suppress(OSError, IndexError):  # a thread that ends meanwhile
                waited += int((thread / "schedstat").read_text().split()[1])
    return waited / 1e9
