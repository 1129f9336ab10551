"""Copies pages between the pool and slots in the host's memory. On a GPU beside the steps, on a stream of its own.

A replica of several ranks has its slots on all of them: each rank holds its part of a page, in the slot of the same
number. The driver chooses the slots, and every copy is one message to the others, in order with the steps.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from crossdock.workers.replica.ranks.rank_messages import CopyPages


class PoolCopies:
    """The pages of a pool as bytes, and the slots."""

    def __init__(self, pages: Tensor, num_slots: int, tell: Callable[[CopyPages], None] | None = None) -> None:
        """`pages`: [page, page_bytes] uint8. `tell` has every other rank copy the same; None: there is none."""
        self._pages = pages
        self._tell = tell
        self._stream = torch.cuda.Stream(pages.device) if pages.is_cuda else None  # type: ignore[no-untyped-call]
        self.slots = torch.empty((num_slots, pages.shape[1]), dtype=torch.uint8)
        if pages.is_cuda:
            _pin(self.slots)

    def apply(self, copy: CopyPages) -> None:
        """Copy as the driver has done."""
        if copy.is_out:
            self.copy_out(copy.pages, copy.slots)
        else:
            self.copy_in(copy.slots, copy.pages)

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> Callable[[], float | None]:
        """Copy pages to the host. A step that is launched later may overwrite them; `wait` before reading a slot.

        Returns a function that returns the seconds of the copy; None while it goes on.
        """
        if self._tell is not None:
            self._tell(CopyPages(tuple(pages), tuple(slots), is_out=True))
        if self._stream is None:
            started = time.perf_counter()
            for page, slot in zip(pages, slots, strict=True):
                self.slots[slot].copy_(self._pages[page])
            seconds = time.perf_counter() - started
            return lambda: seconds
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            begin.record()
            for page, slot in zip(pages, slots, strict=True):
                self.slots[slot].copy_(self._pages[page], non_blocking=True)
            end.record()
        torch.cuda.current_stream(self._pages.device).wait_stream(self._stream)

        def seconds_of_copy() -> float | None:
            has_ended = end.query()  # type: ignore[no-untyped-call]
            return begin.elapsed_time(end) / 1e3 if has_ended else None

        return seconds_of_copy

    def copy_in(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy from the host to pages that no step uses, from any thread. Ends when the pages hold the bytes; on other
        ranks they do before the next step begins."""
        if self._tell is not None:
            self._tell(CopyPages(tuple(pages), tuple(slots), is_out=False))
        self.fill(slots, pages)

    def fill(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Do as `copy_in`, on this rank alone."""
        if self._stream is None:
            for slot, page in zip(slots, pages, strict=True):
                self._pages[page].copy_(self.slots[slot])
            return
        with torch.cuda.stream(self._stream):
            for slot, page in zip(slots, pages, strict=True):
                self._pages[page].copy_(self.slots[slot], non_blocking=True)
        self._stream.synchronize()

    def wait(self) -> None:
        """Wait until the slots of all copies so far hold their pages."""
        if self._stream is not None:
            self._stream.synchronize()


def _pin(memory: Tensor) -> None:
    """Pin the memory of a tensor, exactly. torch's own pinned memory is rounded up to a power of two: 96 to 128 GiB.

    The pages of a tier stay as long as the process. RuntimeError: the system does not let so much memory be pinned.
    """
    if memory.nbytes:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(status) != 0:
            raise RuntimeError(f"{memory.nbytes} bytes of the host's memory cannot be pinned: CUDA error {int(status)}")
