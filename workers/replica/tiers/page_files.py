"""The pages of a replica in files. Each of its ranks keeps its part of a page in a file of its own, under one name.

A page counts where every rank has its part. One part that is missing, short or damaged makes the page a miss, and so
does the end of a rank while it writes. The driver has the other ranks do what it does; see `PartKeeper`.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from crossdock.workers.replica.ranks.rank_messages import (
    ExpectParts,
    FileCall,
    FilesCalled,
    LoadPart,
    LookForParts,
    WritePart,
)
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.replica.tiers.file_tier import FileTier
from crossdock.workers.replica.tiers.object_tier import ObjectTier, is_store
from crossdock.workers.replica.tiers.page_copies import PoolCopies
from crossdock.workers.replica.tiers.page_format import name_of, page_of
from crossdock.workers.schedule.prefixes.tier_pages import PageKey


class PartStore(Protocol):
    """Keeps one rank's parts of pages: `FileTier` and `ObjectTier`, which say more. All calls belong to one thread."""

    num_bytes: int
    """The bytes of all that is kept, of other models and replicas too."""

    def changes(self) -> tuple[set[PageKey], set[PageKey]]:
        """Return the pages that have come since the last call, and those that have gone."""

    def write(self, key: PageKey, parts: Sequence[memoryview]) -> set[PageKey]:
        """Store a page, and return the pages that were deleted to make room. OSError: the page is not stored."""

    def expect(self, keys: Sequence[PageKey]) -> None:
        """Tell which pages will be read next, in this order."""

    def read(self, key: PageKey, into: memoryview) -> bool:
        """Fill `into` with a page; False: it is not there. OSError: it cannot be read now."""


def open_parts(place: str, most_bytes: int, fingerprint: bytes, rank: int, num_ranks: int) -> PartStore:
    """Return the parts of a rank in a folder, or in the object store of a URL.

    `fingerprint`: 16 bytes, of what the bytes of all parts depend on. Raises ValueError as of `FileTier`, `ObjectTier`.
    """
    if num_ranks > 1:
        fingerprint = hashlib.blake2b(fingerprint + b"rank %d" % rank, digest_size=16).digest()
    if is_store(place):
        return ObjectTier(place, most_bytes, fingerprint, num_ranks)
    return FileTier(Path(place).expanduser(), most_bytes, fingerprint, num_ranks)


class PageFiles:
    """Pages in files, filled from slots in the host's memory and loaded by way of them. All calls belong to one thread,
    but for `mark`. Where another rank has failed, they raise its reason as OSError, or `failure_of`: it is lost."""

    def __init__(self, own: PartStore, copies: PoolCopies, others: WorkerGroup | None = None) -> None:
        """`own`: the parts of this rank. `copies`: its pool and slots. `others`: the ranks that are called; None: this
        is the only rank, or not the driver."""
        self._own = own
        self._copies = copies
        self._others = others
        num_ranks = 1 if others is None else others.spec.num_ranks
        self._held = [set[PageKey]() for _ in range(num_ranks)]  # pages of which each rank has its part; this one first
        self._changed = set[PageKey]()  # pages of which a part came or went, until `changes` tells

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files in this rank's folder, those of other models and replicas too."""
        return self._own.num_bytes

    def mark(self) -> int:
        """Return a mark of this moment for `write` and `load`: by it, other ranks keep the order of steps."""
        return 0 if self._others is None else self._others.num_sent

    def changes(self) -> tuple[set[PageKey], set[PageKey]]:
        """Return the pages that have all their parts since the last call, and those of which a part has gone."""
        if self._others is None:
            return self._own.changes()
        answers = self._call(LookForParts())()
        for held, each in zip(self._held[1:], answers, strict=True):
            self._note(held, set(map(page_of, each.came)), set(map(page_of, each.gone)))
        self._note(self._held[0], *self._own.changes())
        _check(answers)
        changed, self._changed = self._changed, set()
        came = {key for key in changed if all(key in held for held in self._held)}
        return came, changed - came

    def _note(self, held: set[PageKey], came: set[PageKey], gone: set[PageKey]) -> None:
        held |= came
        held -= gone
        self._changed |= came | gone

    def write(self, key: PageKey, slots: Sequence[int], mark: int) -> set[PageKey]:
        """Store the content of slots, each rank its own, and return pages of which a part was deleted to make room.

        OSError: a rank has not stored its part, so the page is not stored. `mark`: of when the slots were copied to.
        """
        answers = self._call(WritePart(name_of(key), tuple(slots), mark))
        try:
            self._copies.settle(slots=slots)
            deleted = self._own.write(key, [self._copies.slots[slot].numpy().data for slot in slots])
        finally:
            others = answers()
        _check(others)
        return deleted.union(*(map(page_of, each.gone) for each in others))

    def expect(self, keys: Sequence[PageKey]) -> None:
        """Tell which pages will be loaded next, in this order: each rank reads its own parts ahead.

        OSError: a rank has not heard it.
        """
        answers = self._call(ExpectParts(tuple(map(name_of, keys))))
        self._own.expect(keys)
        _check(answers())

    def load(self, key: PageKey, slots: Sequence[int], pages: Sequence[int], mark: int) -> bool:
        """Fill pages of the pool on all ranks, by way of slots, which follow each other. False: one rank's part is not
        there, or is not what was stored; the pages may hold anything then. `mark`: of a time since which no step uses
        the pages. OSError: a rank cannot read its part."""
        answers = self._call(LoadPart(name_of(key), tuple(slots), tuple(pages), mark))
        try:
            into = self._copies.slots[slots[0] : slots[0] + len(slots)].view(-1)
            is_here = self._own.read(key, into.numpy().data)
            if is_here:
                self._copies.fill(slots, pages)
        finally:
            others = answers()
        _check(others)
        return is_here and all(each.is_done for each in others)

    def _call(self, call: FileCall) -> Callable[[], Sequence[FilesCalled]]:
        return _nobody if self._others is None else self._others.call_files(call)


def _nobody() -> Sequence[FilesCalled]:
    return ()


def _check(answers: Sequence[FilesCalled]) -> None:
    """Raise OSError where another rank has failed."""
    if failure := next((each.failure for each in answers if each.failure), ""):
        raise OSError(failure)
