"""Copies pages between the pool and slots in the host's memory. On a GPU beside the steps, on a stream of its own.

A replica of several ranks has its slots on all of them: each rank holds its part of a page, in the slot of the same
number. The driver chooses the slots, and every copy is one message to the others, in order with the steps.
"""

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
        self.slots = torch.empty((num_slots, pages.shape[1]), dtype=torch.uint8, pin_memory=pages.is_cuda)

    def apply(self, copy: CopyPages) -> None:
        """Copy as the driver has done."""
        if copy.is_out:
            self.copy_out(copy.pages, copy.slots)
        else:
            self.copy_in(copy.slots, copy.pages)

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy pages to the host. A step that is launched later may overwrite them; `wait` before reading a slot."""
        if self._tell is not None:
            self._tell(CopyPages(tuple(pages), tuple(slots), is_out=True))
        if self._stream is None:
            for page, slot in zip(pages, slots, strict=True):
                self.slots[slot].copy_(self._pages[page])
            return
        with torch.cuda.stream(self._stream):
            for page, slot in zip(pages, slots, strict=True):
                self.slots[slot].copy_(self._pages[page], non_blocking=True)
        torch.cuda.current_stream(self._pages.device).wait_stream(self._stream)

    def copy_in(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy from the host to pages that no step uses, from any thread. Ends when the pages hold the bytes; on other
        ranks they do before the next step begins."""
        if self._tell is not None:
            self._tell(CopyPages(tuple(pages), tuple(slots), is_out=False))
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
