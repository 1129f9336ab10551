"""The events of all ranks' docks as the events of one dock. Pure.

A token has arrived when every rank has its own part of the token. A transfer has failed when one rank failed, and is
over when all ranks have ended the transfer.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from crossdock.kvtransfer.calls import CancelCall, CancelExpectCall, CancelShipCall
from crossdock.kvtransfer.events import (
    Arrived,
    Asked,
    Committed,
    Event,
    Failed,
    Figures,
    Offered,
    Released,
    WriterStopped,
)

_MOST_REMEMBERED = 1024  # transfers that are over
_Key: TypeAlias = tuple[bool, str, int]  # sending, request, epoch


@dataclass(slots=True)
class _Transfer:
    committed: dict[int, int] = field(default_factory=dict)  # tokens, by rank
    arrived: dict[int, Arrived] = field(default_factory=dict)
    released: dict[int, Released] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    frontier: int = 0  # tokens that every rank has
    has_failed: bool = False


class EventMerger:
    """Merges the events that `ranks` report of each transfer."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = frozenset(ranks)
        self._open: dict[_Key, _Transfer] = {}
        self._offered: OrderedDict[_Key, set[int]] = OrderedDict()  # the ranks; may begin before the transfer
        self._over: OrderedDict[_Key, None] = OrderedDict()  # some events may come once more after the end

    def begin(self, is_sending: bool, request: str, epoch: int) -> None:
        """Accept the events of a transfer, also where one of the same request and epoch is over."""
        self._over.pop((is_sending, request, epoch), None)

    def merge(self, rank: int, event: Event) -> tuple[Sequence[Event], CancelCall | None]:
        """Take in the event of one rank.

        Returns the events that are now true of all ranks; and, if the transfer must end, the call that ends it at every
        rank.
        """
        if isinstance(event, Asked):  # one rank is asked for all
            return (event,), None
        is_sending = event.sending if isinstance(event, Failed) else isinstance(event, Released)
        key = is_sending, event.request, event.epoch
        if key in self._over:
            return (), None
        if isinstance(event, Offered):
            return self._merge_offer(rank, event, key), None
        transfer = self._open.setdefault(key, _Transfer())
        match event:
            case Committed(num_tokens=num_tokens):
                transfer.committed[rank] = num_tokens
                return self._advance(event, transfer), None
            case Arrived():
                transfer.arrived[rank] = event
                if transfer.arrived.keys() == self._ranks:
                    self._end(key)
                    figures = _merged([arrived.figures for arrived in transfer.arrived.values()])
                    return (replace(transfer.arrived[min(transfer.arrived)], figures=figures),), None
            case Failed() if not transfer.has_failed:
                transfer.has_failed = True
                if len(self._ranks) == 1:
                    return (event,), None
                cancel = CancelShipCall if is_sending else CancelExpectCall
                return (event,), cancel(event.request, event.epoch)
            case WriterStopped():
                transfer.stopped.add(rank)
                if transfer.stopped == self._ranks:
                    self._end(key)
                    return (event,), None
            case Released():
                transfer.released[rank] = event
                if transfer.released.keys() == self._ranks:
                    self._end(key)
                    figures = _merged([released.figures for released in transfer.released.values()])
                    has_arrived = all(released.arrived for released in transfer.released.values())
                    return (Released(event.request, event.epoch, has_arrived, figures),), None
            case _:
                pass
        return (), None

    def _advance(self, event: Committed, transfer: _Transfer) -> Sequence[Event]:
        frontier = min(transfer.committed.get(rank, 0) for rank in self._ranks)
        if frontier <= transfer.frontier or transfer.has_failed:
            return ()
        transfer.frontier = frontier
        return (replace(event, num_tokens=frontier),)

    def _merge_offer(self, rank: int, event: Offered, key: _Key) -> Sequence[Event]:
        ranks = self._offered.setdefault(key, set())
        ranks.add(rank)
        if len(self._offered) > _MOST_REMEMBERED:
            self._offered.popitem(last=False)
        return (event,) if ranks == self._ranks else ()

    def _end(self, key: _Key) -> None:
        del self._open[key]
        self._offered.pop(key, None)
        self._over[key] = None
        if len(self._over) > _MOST_REMEMBERED:
            self._over.popitem(last=False)


def _merged(figures: Sequence[Figures]) -> Figures:
    """Return the bytes and writes of all ranks, and the times of the slowest: in all, and in writing."""
    writer = max(figures, key=lambda rank: rank.write_seconds)
    return replace(
        max(figures, key=lambda rank: rank.total_seconds),
        write_seconds=writer.write_seconds,
        hidden_seconds=writer.hidden_seconds,
        num_pages=max(rank.num_pages for rank in figures),
        num_bytes=sum(rank.num_bytes for rank in figures),
        hidden_bytes=sum(rank.hidden_bytes for rank in figures),
        num_writes=sum(rank.num_writes for rank in figures),
    )
