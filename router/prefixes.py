"""Which replicas have the pages of a prompt's beginning, as far as they have said so, or will have them, as far as they
were given such prompts. Bounded; what it does not know it takes for absent, so that it errs towards computing again."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from crossdock.workers.report.advertise import PageChanges
from crossdock.workers.schedule.pages import PageHash

Bits: TypeAlias = int
"""A set of replicas: bit i is the one in slot i. Python's integers are as long as need be, and `&` is one call."""


@dataclass(slots=True)
class _Shelf:
    """What is known of one replica."""

    incarnation: str = ""
    number: int = -1  # of the changes read last; -1: none were
    known: set[PageHash] = field(default_factory=set)  # it said so
    expected: dict[PageHash, int] = field(default_factory=dict)  # by how many requests that it has


@dataclass(slots=True)
class Prefixes:
    """The index of one router. Tenants are apart already: their salt is in the hashes."""

    max_pages: int  # hashes at most; those longest unused are forgotten first
    _holders: OrderedDict[PageHash, Bits] = field(default_factory=OrderedDict)
    _shelves: dict[int, _Shelf] = field(default_factory=dict)  # by slot

    def __len__(self) -> int:
        return len(self._holders)

    def hear(self, slot: int, changes: PageChanges) -> None:
        """Takes in a replica's changes. Where some before them are missing, all that it had said is forgotten."""
        shelf = self._shelves.setdefault(slot, _Shelf())
        is_next = shelf.incarnation == changes.incarnation and shelf.number >= 0
        if is_next and not changes.is_all and changes.number <= shelf.number:
            return  # heard before
        if not is_next or changes.is_all or changes.number > shelf.number + 1:
            self._evict(slot, shelf, list(shelf.known))
        shelf.incarnation, shelf.number = changes.incarnation, changes.number
        self._evict(slot, shelf, changes.evicted)
        shelf.known.update(changes.added)
        self._hold(slot, changes.added)

    def expect(self, slot: int, hashes: Sequence[PageHash]) -> None:
        """The replica in `slot` was given a prompt with these pages: the next one like it finds them there."""
        expected = self._shelves.setdefault(slot, _Shelf()).expected
        for page_hash in hashes:
            expected[page_hash] = expected.get(page_hash, 0) + 1
        self._hold(slot, hashes)

    def end_expected(self, slot: int, hashes: Sequence[PageHash]) -> None:
        """That prompt is done with: what the replica has of it, it has said by now."""
        shelf = self._shelves.get(slot)
        if shelf is None:
            return
        for page_hash in hashes:
            count = shelf.expected.pop(page_hash, 0)
            if count > 1:
                shelf.expected[page_hash] = count - 1
            elif count and page_hash not in shelf.known:
                self._drop(slot, page_hash)

    def forget(self, slot: int) -> None:
        """The replica in `slot` is gone."""
        shelf = self._shelves.pop(slot, None)
        if shelf is not None:
            for page_hash in shelf.known | shelf.expected.keys():
                self._drop(slot, page_hash)

    def match(self, hashes: Sequence[PageHash]) -> list[tuple[Bits, int]]:
        """(replicas, how many of the first pages all of them have), for prefixes of one page and more: the longest
        first, each replica once."""
        found: list[tuple[Bits, int]] = []
        left = -1  # all of them
        length = 0
        for page_hash in hashes:
            still = self._holders.get(page_hash, 0) & left
            if still != left:
                if length:
                    found.append((left & ~still, length))
                left = still
                if not left:
                    break
            length += 1
        if left > 0:
            found.append((left, length))
        for page_hash in reversed(hashes[:length]):  # a prefix's beginning is used most, its end forgotten first
            self._holders.move_to_end(page_hash)
        found.reverse()
        return found

    def _hold(self, slot: int, hashes: Sequence[PageHash]) -> None:
        bit = 1 << slot
        for page_hash in hashes:
            holders = self._holders.get(page_hash, 0)
            if not holders & bit:
                self._holders[page_hash] = holders | bit if holders else bit  # one integer for all that it alone has
        while len(self._holders) > self.max_pages:
            page_hash, holders = self._holders.popitem(last=False)
            while holders:
                other = holders.bit_length() - 1
                self._shelves[other].known.discard(page_hash)
                self._shelves[other].expected.pop(page_hash, None)
                holders &= ~(1 << other)

    def _evict(self, slot: int, shelf: _Shelf, hashes: Sequence[PageHash]) -> None:
        for page_hash in hashes:
            if page_hash in shelf.known:
                shelf.known.remove(page_hash)
                if page_hash not in shelf.expected:
                    self._drop(slot, page_hash)

    def _drop(self, slot: int, page_hash: PageHash) -> None:
        holders = self._holders[page_hash] & ~(1 << slot)
        if holders:
            self._holders[page_hash] = holders
        else:
            del self._holders[page_hash]
