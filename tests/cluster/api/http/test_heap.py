"""An ingress gives back the memory that large requests have used."""

import asyncio
import ctypes
import sys

import psutil
import pytest

from crossdock.cluster.api import heap
from crossdock.cluster.api.heap import Heap, trim


async def test_heap_is_trimmed_once_after_several_large_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[None] = []
    event = asyncio.Event()

    def trimming() -> None:
        trimmed.append(None)
        event.set()

    monkeypatch.setattr(heap, "_QUIET_S", 0.05)
    monkeypatch.setattr(heap, "trim", trimming)
    each = Heap()
    for _ in range(3):
        each.trim_later()
    assert not trimmed, "the requests' own objects are still there"
    await asyncio.wait_for(event.wait(), 30)
    event.clear()
    each.trim_later()
    await asyncio.wait_for(event.wait(), 30)
    assert len(trimmed) == 2


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_trim_gives_freed_memory_back() -> None:
    """A block that stays in use keeps the C library from shrinking the heap by itself."""
    libc, size = ctypes.CDLL(None), 100 << 10
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(size) for _ in range(1000)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    *freed, kept = blocks
    for block in freed:
        libc.free(block)
    before = psutil.Process().memory_info().rss
    trim()
    after = psutil.Process().memory_info().rss
    libc.free(kept)
    assert before - after > 50 << 20, sys.platform
