"""Memory that a large request has used goes back to the machine: the C library keeps it otherwise."""

import asyncio
import ctypes
from math import inf

LARGE = 1 << 20  # bytes that a request has held; for a moment it may have taken 25 times as much
_QUIET_S = 1.0  # after the large request, whose own objects must be gone by then
_KEPT_BYTES = 1 << 20  # free bytes at the end of a heap that the C library keeps
# Of malloc.h.
_M_TRIM_THRESHOLD = -1
_M_ARENA_MAX = -8

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


def keep_one_heap() -> None:
    """Have the C library use one heap for all threads that start from now on, and keep little of its end.

    By default each thread has a heap of its own, up to eight for each core, and `malloc_trim` does not shrink their
    ends: each would keep up to 16 MiB (cluster/serve/ray_environment.py) of the largest texts it has encoded.
    """
    if _trim is not None:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class Heap:
    """Trims the heap of this process a while after large requests."""

    def __init__(self) -> None:
        self._due = -inf  # when the last trim that was asked for happens, on the event loop's clock

    def trim_later(self) -> None:
        """Return free memory to the operating system in a second, once for all calls until then."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._due:
            return
        self._due = loop.time() + _QUIET_S
        loop.call_at(self._due, lambda: loop.run_in_executor(None, trim))


def trim() -> None:
    """Return the free memory of all arenas to the operating system. Takes milliseconds, without the GIL."""
    if _trim is not None:
        _trim(0)
