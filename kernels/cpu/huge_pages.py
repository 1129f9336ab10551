"""Memory of a CPU on pages of 2 MiB, for what a step reads all of: weights, and the pages of the KV pool."""

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_MAPPED_BYTES = 32 << 20  # at least so much address space at a time; memory is taken as it is written
_ALIGNMENT = 4096  # bytes
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python 3.11 has no name for
_TAKEN_AT_ONCE = 64 << 20  # bytes that are taken before anything reads them
_LIBC = ctypes.CDLL(None)  # its madvise releases the GIL; mmap's own does not


class HugePages:
    """Memory on pages of 2 MiB, if Linux grants them, for tensors that are in use as long as each other.

    With pages of 4 KiB a step also waits for the translation of addresses. Keys and values of a layer lie hundreds of
    KiB apart, so each KV page would need one more. (8 decodes at 200 tokens, 30 layers of 3 KV heads, AMD Zen 5:
    7.0 ms a step against 8.8.)
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._taken = 0  # bytes

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return memory [num_elements], all zeros. Memory that several tensors share is freed with the last of them."""
        size = num_elements * dtype.itemsize
        if self._memory is None or self._taken + size > len(self._memory):
            self._memory = mmap.mmap(
                -1, max(-(-size // _HUGE_PAGE) * _HUGE_PAGE, _MAPPED_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            self._taken = 0
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=num_elements, offset=self._taken)
        self._taken += -(-size // _ALIGNMENT) * _ALIGNMENT
        return tensor


def give_back(tensor: Tensor) -> None:
    """Give the memory of a tensor on a CPU back to Linux, but the ends that share a page with others.

    The address stays, so views and registrations of it do. Linux gives zeros when the memory is used again.
    """
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start and _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED):
        raise OSError(f"Linux does not take back {end - start} bytes")


class MemoryTaker:
    """Takes the memory of a large tensor from Linux before steps need the memory. The contents do not change.

    The first part is taken at once, the rest in order, in a thread. This costs 0.1 s a GiB on hardware, and over 2 s
    on virtual machines whose host gives memory only as they write.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Begin to take the memory of `tensor` on a CPU, which is all zeros and which nothing has written to."""
        self._tensor = tensor  # the memory lives as long as the thread
        self._is_ended, self._may_go = threading.Event(), threading.Event()
        self._may_go.set()
        self._thread: threading.Thread | None = None
        if not self._take(0, _TAKEN_AT_ONCE):
            tensor.zero_()
        elif tensor.nbytes > _TAKEN_AT_ONCE:
            self._thread = threading.Thread(target=self._take_rest, name="take-memory", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until all of the memory is taken."""
        self._may_go.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no memory during a measurement, which that would slow, unless `wait` needs the memory."""
        self._may_go.clear()
        try:
            yield
        finally:
            self._may_go.set()

    def end(self) -> None:
        """Take no more, and let go of the tensor."""
        self._is_ended.set()
        self.wait()
        del self._tensor

    def _take_rest(self) -> None:
        for start in range(_TAKEN_AT_ONCE, self._tensor.nbytes, _HUGE_PAGE):
            self._may_go.wait()
            if self._is_ended.is_set() or not self._take(start, _HUGE_PAGE):
                return

    def _take(self, start: int, size: int) -> bool:
        """Take `size` bytes from `start` on, as far as the tensor goes. Return whether Linux could."""
        address = self._tensor.data_ptr() + start
        size = min(size, self._tensor.nbytes - start)
        page = address - address % mmap.PAGESIZE
        result: int = _LIBC.madvise(ctypes.c_void_p(page), ctypes.c_size_t(address + size - page), _POPULATE_WRITE)
        return result == 0
