"""Measure the seconds of CPU kernels, and notice when other work on the machine disturbs the measurement."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeAlias

from crossdock.kernels.cpu.measured import Measured
from crossdock.kernels.options import Kernel

FULL_S = 0.4
"""Seconds of a full measurement, where its calls are short. So long calls that they take more have `_FEWEST_PASSES`."""
SAMPLE_S = 0.1  # of a sample, likewise

_FEWEST_PASSES, _MOST_PASSES = 3, 7
_DISTURBED_S = 2.0  # disturbed calls are repeated for so long, since the least seconds of more calls are closer
_LONGEST_S = 6.0  # no pass begins later: a machine with no free core takes this long for one
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


def measure(kernels: Sequence[Kernel], rows: Sequence[int], cells: Cells, seconds: float = FULL_S) -> Measured:
    """Return, for each cell, the sum of the least seconds of its calls times their scales.

    Kernels alternate, so that other load on the machine slows all of them alike. Seconds count as disturbed if threads
    of this process waited for a core, or if equal calls differ much.
    """
    found: dict[tuple[Kernel, int], list[list[float]]] = {key: [[] for _ in calls] for key, calls in cells.items()}
    for calls in cells.values():
        for timed in calls:
            timed.calls[0]()  # prepares what is prepared once
    start, waited_before, is_disturbed = time.perf_counter(), waited_seconds(), True
    for passes in range(1, _MOST_PASSES + 1):
        for count in rows:
            for kernel in kernels:
                for timed, repeats in zip(cells[kernel, count], found[kernel, count], strict=True):
                    for call in timed.calls:
                        before = time.perf_counter()
                        call()
                        repeats.append(time.perf_counter() - before)
        elapsed = time.perf_counter() - start
        waited = waited_seconds() - waited_before
        is_disturbed = waited > _WAITED_SHARE * elapsed or spread(r for each in found.values() for r in each) > _SPREAD
        if elapsed > _LONGEST_S:
            break
        if passes >= _FEWEST_PASSES and elapsed > (_DISTURBED_S if is_disturbed else seconds):
            break
    table = {
        kernel: [
            sum(min(repeats) * t.scale for repeats, t in zip(found[kernel, count], cells[kernel, count], strict=True))
            for count in rows
        ]
        for kernel in kernels
    }
    return Measured(table, is_disturbed)


def spread(cells: Iterable[Sequence[float]]) -> float:
    """Return how many times the least repeat of a cell its median repeat takes, in the median cell.

    One interrupted call moves no median, nor does one kind of call whose seconds vary by themselves.
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
