"""Which slots in the host's memory hold which pages: the least recently used page gives way first."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress

from crossdock.workers.schedule.prefixes.tier_pages import PageKey


class HostTier:
    """The slots of pages. All calls belong to the engine's thread; slots in use may be read by another one."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._held: OrderedDict[PageKey, Sequence[int]] = OrderedDict()  # least recently used first
        self._uses: Counter[PageKey] = Counter()

    def __contains__(self, key: PageKey) -> bool:
        return key in self._held

    @property
    def num_used(self) -> int:
        """Return how many slots hold pages."""
        return self._num_slots - len(self._free)

    def take(self, key: PageKey, num_slots: int) -> tuple[Sequence[int], list[PageKey]]:
        """Return slots for a page that is not here, and the pages that give way. No slot: too many are in use."""
        gone, missing = list[PageKey](), num_slots - len(self._free)
        for old, slots in self._held.items():
            if missing <= 0:
                break
            if old not in self._uses:
                gone.append(old)
                missing -= len(slots)
        if missing > 0:
            return [], []
        for old in gone:
            self.drop(old)
        self._held[key] = taken = [self._free.pop() for _ in range(num_slots)]
        return taken, gone

    def use(self, key: PageKey) -> Sequence[int]:
        """Return the slots of a page, which stays until `end_use`."""
        self._held.move_to_end(key)
        self._uses[key] += 1
        return self._held[key]

    def end_use(self, key: PageKey) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]

    def drop(self, key: PageKey) -> None:
        """Free the slots of a page, if it is here."""
        with suppress(KeyError):
            self._free += self._held.pop(key)
