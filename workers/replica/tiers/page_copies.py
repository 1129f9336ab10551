"""Copies pages between the pool and the host's memory. On a GPU beside the steps, on a stream of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor


class PoolCopies:
    """The pool's pages as bytes."""

    def __init__(self, pages: Tensor) -> None:
        """`pages`: [page, page_bytes] uint8."""
        self._pages = pages
        self._stream = torch.cuda.Stream(pages.device) if pages.is_cuda else None  # type: ignore[no-untyped-call]

    def copy_out(self, pages: Sequence[int], slots: Sequence[Tensor]) -> None:
        """Copy pages to the host. A step that is launched later may overwrite them; `wait` before reading a slot."""
        if self._stream is None:
            for page, slot in zip(pages, slots, strict=True):
                slot.copy_(self._pages[page])
            return
        with torch.cuda.stream(self._stream):
            for page, slot in zip(pages, slots, strict=True):
                slot.copy_(self._pages[page], non_blocking=True)
        torch.cuda.current_stream(self._pages.device).wait_stream(self._stream)

    def copy_in(self, slots: Sequence[Tensor], pages: Sequence[int]) -> None:
        """Copy from the host to pages that no step uses, from any thread. Ends when the pages hold the bytes."""
        if self._stream is None:
            for slot, page in zip(slots, pages, strict=True):
                self._pages[page].copy_(slot)
            return
        with torch.cuda.stream(self._stream):
            for slot, page in zip(slots, pages, strict=True):
                self._pages[page].copy_(slot, non_blocking=True)
        self._stream.synchronize()

    def wait(self) -> None:
        """Wait until the slots of all copies so far hold their pages."""
        if self._stream is not None:
            self._stream.synchronize()
