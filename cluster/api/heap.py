"""Memory that a large request has used goes back to the machine: the C library keeps it otherwise."""

import asyncio
import ctypes
from math import inf

LARGE_BODY = 1 << 20  # bytes; a body of this size may have taken 25 times as much
_QUIET_S = 1.0  # after the large request, whose own objects must be gone by then

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


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
