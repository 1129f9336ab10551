"""Which replicas have the pages of a prompt's beginning, as far as they have said so. Bounded; what it does not know
it takes for absent, so that it errs towards computing something again."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from crossdock.workers.live import PageChanges
from crossdock.workers.pages import PageHash

Bits: TypeAlias = int
"""A set of replicas: bit i is the one in slot i. Python's integers are as long as need be, and `&` is one call."""


@dataclass(slots=True)
class _Reading:
    """How far a replica's changes were read."""

    incarnation: str
    number: int
    hashes: dict[PageHash, None] = field(default_factory=dict)


@dataclass(slots=True)
class Prefixes:
    """The index of one router. Tenants are apart already: their salt is in the hashes."""

    max_pages: int = 500_000  # hashes at most, about 300 bytes each; those longest unused are forgotten first
    _holders: OrderedDict[PageHash, Bits] = field(default_factory=OrderedDict)
    _readings: dict[int, _Reading] = field(default_factory=dict)  # by slot

    def __len__(self) -> int:
        return len(self._holders)

    def hear(self, slot: int, changes: PageChanges) -> None:
        """Takes in a replica's changes. Where some before them are missing, all that it had said is forgotten."""
        reading = self._readings.get(slot)
        is_known = reading is not None and reading.incarnation == changes.incarnation
        if reading is None or not is_known or changes.is_all or reading.number + 1 < changes.number:
            self.forget(slot)
            reading = self._readings[slot] = _Reading(changes.incarnation, changes.number)
        elif reading.number >= changes.number:
            return  # heard before
        reading.number = changes.number
        bit = 1 << slot
        for page_hash in changes.evicted:
            if reading.hashes.pop(page_hash, 0) is None:
                self._drop(page_hash, bit)
        for page_hash in changes.added:
            reading.hashes[page_hash] = None
            self._holders[page_hash] = self._holders.get(page_hash, 0) | bit
        while len(self._holders) > self.max_pages:
            self._forget_oldest()

    def forget(self, slot: int) -> None:
        """The replica in `slot` is gone, or what it had said holds no more."""
        reading = self._readings.pop(slot, None)
        for page_hash in reading.hashes if reading is not None else ():
            self._drop(page_hash, 1 << slot)

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

    def _drop(self, page_hash: PageHash, bit: Bits) -> None:
        holders = self._holders[page_hash] & ~bit
        if holders:
            self._holders[page_hash] = holders
        else:
            del self._holders[page_hash]

    def _forget_oldest(self) -> None:
        page_hash, holders = self._holders.popitem(last=False)
        while holders:
            slot = holders.bit_length() - 1
            del self._readings[slot].hashes[page_hash]
            holders &= ~(1 << slot)
