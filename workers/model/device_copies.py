"""Copies to a device that the host does not wait for, and the seconds of work on a device."""

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return a tensor on `device`, of the array's dtype. On a CPU it is the array's own memory.

    To a GPU the copy goes through pinned memory: from pageable memory the host would wait for all earlier work.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def timed(device: torch.device, clock: Callable[[], float], work: Callable[[], None]) -> Callable[[], float]:
    """Do `work`, and return a function that returns the seconds it took on `device`; `clock` is a CPU's.

    On a GPU, this call only queues the work, and the seconds are those from begin to end on the GPU. The returned
    function waits for that end.
    """
    if device.type != "cuda":
        started = clock()
        work()
        seconds = clock() - started
        return lambda: seconds
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()

    def elapsed() -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return elapsed
