"""Remembers which epochs of a request have ended, so that no late message can start one of them again."""

from collections import OrderedDict

_MAX_REQUESTS = 16_384
"""Requests remembered. Messages are late by seconds at most; this many requests are minutes of traffic."""


class Fence:
    """The last ended epoch of each request."""

    def __init__(self) -> None:
        self._epochs: OrderedDict[str, int] = OrderedDict()

    def end(self, request: str, epoch: int) -> None:
        """Note that this epoch of `request`, and every earlier one, has ended."""
        self._epochs[request] = max(epoch, self._epochs.pop(request, -1))
        if len(self._epochs) > _MAX_REQUESTS:
            self._epochs.popitem(last=False)

    def has_ended(self, request: str, epoch: int) -> bool:
        return epoch <= self._epochs.get(request, -1)
