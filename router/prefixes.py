"""Which replicas have the pages of a prompt's beginning, because they reported them or were given such prompts.

The index is bounded. A page it does not know counts as absent, so that an error costs a computation, never a result.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import accumulate, repeat, takewhile
from operator import and_, or_, xor
from typing import TypeAlias

import numpy as np

from crossdock.workers.report.live_profile import PageChanges
from crossdock.workers.schedule.cost.formula import Floats
from crossdock.workers.schedule.request.page_hashes import PageHash

Bits: TypeAlias = int
"""A set of replicas: bit i is the replica in slot i. Python's integers have any length, and `&` is one call."""

_NONE = repeat(0)  # no replica has a page that the index does not know


@dataclass(slots=True)
class _SlotPages:
    """The pages that one replica is known to have, or will have."""

    incarnation: str = ""
    number: int = -1  # of the changes read last; -1: none were read
    reported: set[PageHash] = field(default_factory=set)
    expected: dict[PageHash, int] = field(default_factory=dict)  # requests placed there whose prompts have the page


@dataclass(slots=True)
class Prefixes:
    """The prefix index of one router. Tenants are separate already: their salt is in the hashes."""

    max_pages: int  # hashes at most; the least recently matched are forgotten first
    _holders: OrderedDict[PageHash, Bits] = field(default_factory=OrderedDict)
    _slots: dict[int, _SlotPages] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._holders)

    def hear(self, slot: int, changes: PageChanges) -> None:
        """Apply a replica's changes. If earlier changes are missing, forget all pages that the replica had reported."""
        pages = self._slots.setdefault(slot, _SlotPages())
        is_next = pages.incarnation == changes.incarnation and pages.number >= 0
        if is_next and not changes.is_all and changes.number <= pages.number:
            return  # applied before
        if not is_next or changes.is_all or changes.number > pages.number + 1:
            self._evict(slot, pages, list(pages.reported))
        pages.incarnation = changes.incarnation
        pages.number = changes.number
        self._evict(slot, pages, changes.evicted)
        pages.reported.update(changes.added)
        self._add(slot, changes.added)

    def expect(self, slot: int, hashes: Sequence[PageHash]) -> None:
        """Note that the replica in `slot` was given a prompt with these pages: the next prompt like it finds them."""
        expected = self._slots.setdefault(slot, _SlotPages()).expected
        for page_hash in hashes:
            expected[page_hash] = expected.get(page_hash, 0) + 1
        self._add(slot, hashes)

    def end_expected(self, slot: int, hashes: Sequence[PageHash]) -> None:
        """Undo `expect` when the request has ended: the replica has reported by now which of the pages it has."""
        pages = self._slots.get(slot)
        if pages is None:
            return
        for page_hash in hashes:
            count = pages.expected.pop(page_hash, 0)
            if count > 1:
                pages.expected[page_hash] = count - 1
            elif count and page_hash not in pages.reported:
                self._remove(slot, page_hash)

    def forget(self, slot: int) -> None:
        """Remove everything about the replica in `slot`, which has left."""
        pages = self._slots.pop(slot, None)
        if pages is not None:
            for page_hash in pages.reported | pages.expected.keys():
                self._remove(slot, page_hash)

    def num_reported(self, slot: int, hashes: Sequence[PageHash]) -> int:
        """Return how many of the first pages a replica has reported: these it can send. A prefix loses its end first,
        so that the search halves."""
        pages = self._slots.get(slot)
        return bisect_left(hashes, True, key=lambda each: each not in pages.reported) if pages is not None else 0

    def match(self, hashes: Sequence[PageHash], below: Sequence["Prefixes"] = ()) -> list[list[Bits]]:
        """Return the replicas that have the first page, those that have the first two, and so on while there are any.

        `below`: the pages in tiers. The second list is of pages here or in the first tier, and so on."""
        places = [self._holders, *(other._holders for other in below)]
        found: list[list[Bits]] = []
        for depth in range(1, len(places) + 1):
            by_place = [map(place.get, hashes, _NONE) for place in places[:depth]]
            holders: Iterator[Bits] = reduce(partial(map, or_), by_place)
            found.append([*takewhile(bool, accumulate(holders, and_))])
        used = hashes[: len(found[-1])][::-1]  # so that the end of a prefix is forgotten before its beginning
        for place in places:
            for _ in map(place.move_to_end, filter(place.__contains__, used) if below else used):
                pass
        return found

    def _add(self, slot: int, hashes: Sequence[PageHash]) -> None:
        bit = 1 << slot
        for page_hash in hashes:
            holders = self._holders.get(page_hash, 0)
            if not holders & bit:
                # Pages that only this replica has share one integer object: memory.
                self._holders[page_hash] = holders | bit if holders else bit
        while len(self._holders) > self.max_pages:
            page_hash, holders = self._holders.popitem(last=False)
            while holders:
                other = holders.bit_length() - 1
                self._slots[other].reported.discard(page_hash)
                self._slots[other].expected.pop(page_hash, None)
                holders &= ~(1 << other)

    def _evict(self, slot: int, pages: _SlotPages, hashes: Sequence[PageHash]) -> None:
        for page_hash in hashes:
            if page_hash in pages.reported:
                pages.reported.remove(page_hash)
                if page_hash not in pages.expected:
                    self._remove(slot, page_hash)

    def _remove(self, slot: int, page_hash: PageHash) -> None:
        holders = self._holders[page_hash] & ~(1 << slot)
        if holders:
            self._holders[page_hash] = holders
        else:
            del self._holders[page_hash]


def pages_by_slot(found: Sequence[Bits], num_slots: int) -> Floats:
    """Return the first pages `[slot]` that each replica has, from a list of `Prefixes.match`.

    The binary digit for 4 in a replica's number of pages changes at pages 4, 8, 12 and so on: it is 1 where an odd
    number of these sets has the replica."""
    if not found:
        return np.zeros(num_slots)
    digits = [reduce(xor, found[(1 << digit) - 1 :: 1 << digit]) for digit in range(len(found).bit_length())]
    num_bytes = -(-num_slots // 8)
    packed = np.frombuffer(b"".join([digit.to_bytes(num_bytes, "little") for digit in digits]), np.uint8)
    bits = np.unpackbits(packed.reshape(len(digits), num_bytes), axis=1, count=num_slots, bitorder="little")
    pages: Floats = 2.0 ** np.arange(len(digits)) @ bits
    return pages


def num_shared(hashes: Sequence[PageHash], others: Sequence[PageHash]) -> int:
    """Return how many first pages two prompts share. A hash covers all tokens before its page, so the search halves."""
    if not hashes or not others or hashes[0] != others[0]:
        return 0  # the usual case
    count = min(len(hashes), len(others))
    return bisect_left(range(count), True, key=lambda number: hashes[number] != others[number])
