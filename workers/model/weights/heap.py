"""Memory that a load has used goes back to the machine: the C library keeps it otherwise."""

import ctypes

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


def trim_heap() -> None:
    """Return the free memory of all heaps to the machine. Takes milliseconds, without the GIL."""
    if _trim is not None:
        _trim(0)
