"""Shares of what all owners of one process use together: memory, places to wait, fetches."""

from collections import Counter


class Shares:
    """Counts what each owner uses of a whole.

    An owner that uses some may have no more than it leaves free: alone half of the whole, beside one other a third. So
    a later owner finds some, and nothing is taken away from running work. An owner that uses none may have all that
    is free. Switches divide their memory between ports in the same way: Choudhury and Hahne, Dynamic Queue
    Length Thresholds for Shared-Memory Packet Switches, 1998. The owner without a name, which all clients are where no
    keys are in use, may have the whole.
    """

    def __init__(self, most: int, within: "Shares | None" = None) -> None:
        """`within`: a whole of which this is a part. What an owner uses here counts there, too."""
        self.most = most
        self._within = within
        self.num_used = 0
        self._used: Counter[str] = Counter()

    @property
    def is_unused(self) -> bool:
        """Whether nothing is used, here and in the whole of which this is a part."""
        return self.num_used == 0 and (self._within is None or self._within.is_unused)

    def room(self, owner: str, *, freed: int = 0, freed_of_owner: int = 0) -> int:
        """Return how much more an owner may have once `freed` is released, a part of which is the owner's."""
        free = self.most - self.num_used + freed
        used = self._used[owner] - freed_of_owner
        room = max(0, free if not owner or used <= 0 else (free - used) // 2)
        if self._within is not None:
            room = min(room, self._within.room(owner, freed=freed, freed_of_owner=freed_of_owner))
        return room

    def take(self, owner: str, amount: int) -> None:
        """Count an amount that an owner has from now on."""
        self.num_used += amount
        self._used[owner] += amount
        if self._within is not None:
            self._within.take(owner, amount)

    def release(self, owner: str, amount: int) -> None:
        """Count an amount that an owner no longer has."""
        self.num_used -= amount
        self._used[owner] -= amount
        if not self._used[owner]:
            del self._used[owner]
        if self._within is not None:
            self._within.release(owner, amount)
