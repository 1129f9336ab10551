"""How a device is timed: a GPU by its events and replayed graphs, and for a dry run the CPU by its clock."""

import gc
import platform
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import psutil
import torch


class Device(Protocol):
    """Times and waits for the work of a device. `name` is torch's."""

    name: str

    def describe(self) -> str:
        """Return the device's name: rows of unlike devices do not belong into one file."""

    def timed(self, run: Callable[[], object], repeats: int = 20) -> float:
        """Return the median seconds of a call, launches included."""

    def replayed(self, *functions: Callable[[], object], repeats: int = 20) -> float:
        """Return the median seconds of one function without launches. All do the same on other data."""

    def wait(self) -> None:
        """Return when the device has finished all work."""

    def collect(self) -> None:
        """Free the memory of tensors that are no longer used."""

    def used(self) -> int:
        """Return the bytes of the device's memory that are in use, by all processes of a GPU."""

    def works(self) -> bool:
        """Return whether the device still computes: an illegal access makes every later call of the process fail."""


class Cuda:
    """One GPU."""

    name = "cuda"

    def describe(self) -> str:
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"

    def timed(self, run: Callable[[], object], repeats: int = 20) -> float:
        run()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def replayed(self, *functions: Callable[[], object], repeats: int = 20) -> float:
        graph = self._graph(functions)
        return self.timed(graph.replay, repeats) / len(functions)

    def _graph(self, functions: tuple[Callable[[], object], ...]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels, allocates the libraries' workspaces
            for function in functions:
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for function in functions:
                function()
        return graph

    def wait(self) -> None:
        torch.cuda.synchronize()

    def collect(self) -> None:
        gc.collect()
        if self.works():
            torch.cuda.empty_cache()

    def used(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def works(self) -> bool:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True


class Cpu:
    """The CPU of a dry run: calls are timed once, and nothing is recorded."""

    name = "cpu"

    def describe(self) -> str:
        return f"dry run on a CPU ({platform.machine()})"

    def timed(self, run: Callable[[], object], repeats: int = 20) -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    def replayed(self, *functions: Callable[[], object], repeats: int = 20) -> float:
        return sum(self.timed(function) for function in functions) / len(functions)

    def wait(self) -> None:
        """Return at once: a CPU has finished a call when it returns."""

    def collect(self) -> None:
        """Return at once: what a dry run drops is small, and to look for garbage takes half a second each time."""

    def used(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def works(self) -> bool:
        return True
