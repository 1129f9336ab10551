"""Copies pages between the pool and slots in the host's memory. On a GPU beside the steps, on a stream of its own.

An evicted page keeps its content until somebody is about to write to it: then it is copied, and the writer waits for
that copy alone. So a prompt that evicts many pages pays for them chunk by chunk.

A replica of several ranks has its slots on all of them: each rank holds its part of a page, in the slot of the same
number. The driver chooses the slots, and every copy is one message to the others, in order with the steps.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from crossdock.workers.replica.ranks.rank_messages import CopyPages

_Pairs: TypeAlias = Iterable[tuple[Tensor, Tensor]]
"""The target and the source of each copy."""


class Copied(Protocol):
    """Copies that have begun."""

    def seconds(self) -> float | None:
        """Return how long all of them took; None: they go on."""

    def hold_step(self) -> None:
        """Have what the device computes next wait for their end."""

    def wait(self) -> None:
        """Wait for their end."""


class Copier(Protocol):
    """Copies in the order in which it is asked: `_HostCopier`, and `_StreamCopier` of a GPU."""

    def copy(self, pairs: _Pairs) -> Copied:
        """Begin to copy."""


@dataclass(slots=True, eq=False)
class _Leaving:
    """The content of a page, or of all pages of a snapshot, that slots are to hold."""

    pages: Sequence[int]
    slots: Sequence[int]
    copied: Copied | None = None  # None: not begun


class PoolCopies:
    """The pages of a pool as bytes, and the slots. `claim` and `settle` come before any write to a page."""

    def __init__(self, pages: Tensor, num_slots: int, tell: Callable[[CopyPages], None] | None = None) -> None:
        """`pages`: [page, page_bytes] uint8. `tell` has every other rank copy the same; None: there is none."""
        self._pages = pages
        self._tell = tell
        self.slots = torch.empty((num_slots, pages.shape[1]), dtype=torch.uint8)
        self._copier: Copier = _HostCopier()
        if pages.is_cuda:
            self._copier = _StreamCopier(pages.device)
            _pin(self.slots)
        self._lock = threading.Lock()  # of all below: loads come from a thread of their own
        self._by_page: dict[int, _Leaving] = {}  # what has not ended yet, by each of its pages
        self._by_slot: dict[int, _Leaving] = {}
        self._begun: deque[list[_Leaving]] = deque()  # what has begun together, oldest first
        self._seconds: list[float] = []  # of copies that have ended

    def apply(self, copy: CopyPages) -> None:
        """Copy as the driver has done."""
        if copy.is_out:
            self.copy_out(copy.pages, copy.slots)
        else:
            self.copy_in(copy.slots, copy.pages)

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy pages to the host, before anything is written to them. `settle` slots before reading them."""
        if self._tell is not None:
            self._tell(CopyPages(tuple(pages), tuple(slots), is_out=True))
        self.settle(pages)  # rarely any: they were evicted before, and nothing was written to them since
        with self._lock:
            for slot in slots:
                self._give_way(slot)
            leaving = _Leaving(pages, slots)
            self._by_page |= dict.fromkeys(pages, leaving)
            self._by_slot |= dict.fromkeys(slots, leaving)

    def _give_way(self, slot: int) -> None:
        """Forget the copy to a slot, unless it has begun: another page is to be there."""
        leaving = self._by_slot.get(slot)
        if leaving is not None and leaving.copied is None:
            self._forget(leaving)

    def claim(self, pages: Iterable[int]) -> None:
        """Have the next step, which writes to `pages`, wait until their content is in the host's memory."""
        if self._by_page:
            for copied in self._begin((self._by_page, pages)):
                copied.hold_step()

    def settle(self, pages: Iterable[int] = (), slots: Iterable[int] = ()) -> None:
        """Wait until the content of `pages` is in the host's memory, and `slots` hold what they are to hold.

        May be called in any thread."""
        for copied in self._begin((self._by_page, pages), (self._by_slot, slots)):
            copied.wait()

    def settle_all(self) -> None:
        """Wait until every slot holds what it is to hold."""
        self.settle(slots=[*self._by_slot])

    def take_copied(self) -> Sequence[float]:
        """Return the seconds of each copy to the host that has ended since the last call."""
        with self._lock:
            self._end()
            seconds, self._seconds = self._seconds, []
        return seconds

    def copy_in(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy from the host to pages that no step uses, from any thread. Ends when the pages hold the bytes; on other
        ranks they do before the next step begins."""
        if self._tell is not None:
            self._tell(CopyPages(tuple(pages), tuple(slots), is_out=False))
        self.fill(slots, pages)

    def fill(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Do as `copy_in`, on this rank alone."""
        self.settle(pages, slots)
        self._copier.copy((self._pages[page], self.slots[slot]) for slot, page in zip(slots, pages, strict=True)).wait()

    def _begin(self, *wanted: tuple[Mapping[int, _Leaving], Iterable[int]]) -> Iterable[Copied]:
        """Begin the copies under these numbers. Returns all of them that have not ended."""
        with self._lock:
            self._end()
            found = dict.fromkeys(index[number] for index, numbers in wanted for number in numbers if number in index)
            if new := [leaving for leaving in found if leaving.copied is None]:
                pairs = [pair for leaving in new for pair in zip(leaving.slots, leaving.pages, strict=True)]
                copied = self._copier.copy((self.slots[slot], self._pages[page]) for slot, page in pairs)
                for leaving in new:
                    leaving.copied = copied
                self._begun.append(new)
            return dict.fromkeys(leaving.copied for leaving in found if leaving.copied is not None)

    def _end(self) -> None:
        """Forget the copies that have ended, and note their seconds."""
        while self._begun:
            ended = self._begun[0]
            copied = ended[0].copied
            if copied is None or (seconds := copied.seconds()) is None:
                return
            self._seconds += [seconds / len(ended)] * len(ended)
            for leaving in self._begun.popleft():
                self._forget(leaving)

    def _forget(self, leaving: _Leaving) -> None:
        for index, numbers in ((self._by_page, leaving.pages), (self._by_slot, leaving.slots)):
            for number in numbers:
                if index.get(number) is leaving:
                    del index[number]


class _HostCopier:
    """Copies at once: the pool is in the host's memory."""

    def copy(self, pairs: _Pairs) -> Copied:
        started = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        return _AtOnce(time.perf_counter() - started)


@dataclass(frozen=True, slots=True, eq=False)
class _AtOnce:
    _seconds: float

    def seconds(self) -> float:
        return self._seconds

    def hold_step(self) -> None:
        pass

    def wait(self) -> None:
        pass


class _StreamCopier:
    """Copies on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, pairs: _Pairs) -> Copied:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            begin.record()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            end.record()
        return _BetweenEvents(self._stream.device, begin, end)


@dataclass(frozen=True, slots=True, eq=False)
class _BetweenEvents:
    _device: torch.device
    _begin: torch.cuda.Event
    _end: torch.cuda.Event

    def seconds(self) -> float | None:
        has_ended = self._end.query()  # type: ignore[no-untyped-call]
        return self._begin.elapsed_time(self._end) / 1e3 if has_ended else None

    def hold_step(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._end)

    def wait(self) -> None:
        self._end.synchronize()


def _pin(memory: Tensor) -> None:
    """Pin the memory of a tensor, exactly. torch's own pinned memory is rounded up to a power of two: 96 to 128 GiB.

    The pages of a tier stay as long as the process. RuntimeError: the system does not let so much memory be pinned.
    """
    if memory.nbytes:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(status) != 0:
            raise RuntimeError(f"{memory.nbytes} bytes of the host's memory cannot be pinned: CUDA error {int(status)}")
