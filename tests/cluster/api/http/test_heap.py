"""An ingress gives back the memory that large requests have used."""

import asyncio
import ctypes
import os
import subprocess
import sys
import threading

import psutil
import pytest

from crossdock.cluster.api import heap
from crossdock.cluster.api.heap import Heap, keep_one_heap, trim
from crossdock.cluster.serve.ray_environment import ENVIRONMENT

NEEDS_GLIBC = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc, whose heaps are trimmed"
)
BLOCK, NUM_THREADS = 100 << 10, 4


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
    await asyncio.wait_for(event.wait(), 240)
    event.clear()
    each.trim_later()
    await asyncio.wait_for(event.wait(), 240)
    assert len(trimmed) == 2


@NEEDS_GLIBC
def test_trim_gives_freed_memory_back() -> None:
    """A block that stays in use keeps the C library from shrinking the heap by itself."""
    libc, blocks = written(1000)
    *freed, kept = blocks
    for block in freed:
        libc.free(block)
    before = psutil.Process().memory_info().rss
    trim()
    after = psutil.Process().memory_info().rss
    libc.free(kept)
    assert before - after > 50 << 20, sys.platform


def written(count: int) -> tuple[ctypes.CDLL, list[int]]:
    """Return the C library, and blocks of its heap, all of whose pages are in use."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    return libc, blocks


@NEEDS_GLIBC
def test_memory_that_threads_have_freed_goes_back() -> None:
    """By default each of them keeps the end of a heap of its own: 12 MB here."""
    kept = subprocess.run(
        [sys.executable, __file__], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=True
    )
    assert int(kept.stdout) < 12 << 20


def print_kept_by_threads() -> None:
    """Print how many bytes this process has more after threads have used and freed 12 MB each."""
    keep_one_heap()
    before, together = psutil.Process().memory_info().rss, threading.Barrier(NUM_THREADS)

    def use() -> None:
        together.wait(240)
        libc, blocks = written(120)
        together.wait(240)
        for block in blocks:
            libc.free(block)
        together.wait(240)  # the heap of a thread that ends is another thread's

    threads = [threading.Thread(target=use) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    trim()
    sys.stdout.write(f"{psutil.Process().memory_info().rss - before}\n")


if __name__ == "__main__":
    print_kept_by_threads()
