"""Which pages lie in which slots of the host's memory, and which give way: the least recently used ones."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress

from crossdock.workers.schedule.prefixes.tier_pages import PageKey


class HostTier:
    """The slots of pages. All calls belong to the engine's thread; slots in use may be read by another one."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_begun = 0  # slots that were ever used, the first ones: a simulation has thousands of hosts
        self._free = list[int]()  # of these
        self._held: OrderedDict[PageKey, Sequence[int]] = OrderedDict()  # least recently used first
        self._uses: Counter[PageKey] = Counter()

    def __contains__(self, key: PageKey) -> bool:
        return key in self._held

    @property
    def num_used(self) -> int:
        """Return how many slots hold pages."""
        return self._num_begun - len(self._free)

    def take(self, key: PageKey, num_slots: int) -> tuple[Sequence[int], list[PageKey]]:
        """Return slots for a page that is not here, and the pages that give way. No slot: too many are in use."""
        gone = list[PageKey]()
        missing = num_slots - (self._num_slots - self.num_used)
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
        self._held[key] = taken = [self._next_slot() for _ in range(num_slots)]
        return taken, gone

    def _next_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._num_begun += 1
        return self._num_begun - 1

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
