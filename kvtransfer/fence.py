"""Remembers what has ended: epochs of requests, so that no late message can start one of them again, and processes."""

from collections import OrderedDict

_MAX_REQUESTS = 16_384
"""Requests remembered. Messages are late by seconds at most; this many requests are minutes of traffic."""
_MAX_NAMES = 1024


class Fence:
    """The last ended epoch of each request, and the last epoch in which a write broke."""

    def __init__(self) -> None:
        self._epochs: OrderedDict[str, tuple[int, int]] = OrderedDict()  # by request: (ended, broken)

    def end(self, request: str, epoch: int, is_broken: bool = False) -> None:
        """Note that this epoch of `request`, and every earlier one, has ended. `is_broken`: part of the data of a write
        may still be on the way."""
        ended, broken = self._epochs.pop(request, (-1, -1))
        self._epochs[request] = max(epoch, ended), max(epoch, broken) if is_broken else broken
        if len(self._epochs) > _MAX_REQUESTS:
            self._epochs.popitem(last=False)

    def has_ended(self, request: str, epoch: int) -> bool:
        return epoch <= self._epochs.get(request, (-1, -1))[0]

    def may_be_broken(self, request: str, epoch: int) -> bool:
        """Return whether a write of this epoch, or of a later one, broke."""
        return epoch <= self._epochs.get(request, (-1, -1))[1]


class RecentNames:
    """The names added last, at most 1,024 of them."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > _MAX_NAMES:
            self._names.popitem(last=False)

    def discard(self, name: str) -> None:
        self._names.pop(name, None)
