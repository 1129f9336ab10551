"""A clock of CPU seconds, for engines on machines that other processes use too."""

import ctypes
import multiprocessing
import time
from collections.abc import Callable

import numpy as np


def clock_of_ranks(num_ranks: int) -> Callable[[], float]:
    """Return a clock that shows the CPU seconds of the ranks of an engine, in the mean. OSError: a child has ended.

    The mean is less than the seconds of a step where a rank waits for others.
    """
    clocks = clocks_of_ranks()
    return lambda: float(clocks().sum()) / num_ranks


def clocks_of_ranks() -> Callable[[], np.ndarray]:
    """Return a clock that shows the CPU seconds of each rank of an engine, `[rank]`. OSError: a child has ended.

    The ranks are this process and its children, which must have begun.
    """
    clocks = [time.CLOCK_PROCESS_CPUTIME_ID, *(_clock_of(child.pid) for child in multiprocessing.active_children())]
    return lambda: np.array([time.clock_gettime(each) for each in clocks])


def _clock_of(pid: int | None) -> int:
    assert pid is not None, "a child that has begun has a number"
    found = ctypes.c_int()
    if error := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(found)):
        raise OSError(error, f"process {pid} has no clock of CPU time")
    return found.value
