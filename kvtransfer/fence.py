"""Which epochs of a request have ended for good: nothing of them may begin again, however late it comes."""

from collections import OrderedDict

_MOST = 16_384
"""Requests remembered. Messages are late by seconds at most; this is minutes of traffic."""


class Fence:
    def __init__(self) -> None:
        self._epochs: OrderedDict[str, int] = OrderedDict()

    def pass_(self, request: str, epoch: int) -> None:
        """Epochs of `request` up to this one have ended."""
        self._epochs[request] = max(epoch, self._epochs.pop(request, -1))
        if len(self._epochs) > _MOST:
            self._epochs.popitem(last=False)

    def has_passed(self, request: str, epoch: int) -> bool:
        return epoch <= self._epochs.get(request, -1)
