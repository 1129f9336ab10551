"""Prefixes that a replica fetches from another one before it computes the rest of a prompt, and those that it lends.

The router names a replica that has more of a prompt. The docks of the two do the rest, and the source computes nothing:
it shares the pages with the transfer, and sends them as it sends those of a prompt that it has computed. No failure
here ends a request: what does not arrive is computed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from crossdock.kvtransfer.calls import (
    AskCall,
    CancelExpectCall,
    CancelShipCall,
    DockCall,
    ExpectCall,
    FinishCall,
    GrantCall,
    OfferCall,
    ShipCall,
)
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
from crossdock.kvtransfer.layout import IncompatiblePools
from crossdock.kvtransfer.records import GroupPages
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.transfer.replica_dock import TransferDock, rank_blobs
from crossdock.workers.schedule.prefixes.borrowed import BorrowedPrefixes
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import Submission

OnFigures: TypeAlias = Callable[[str, str, Figures, str], None]
"""Called at a transfer's end: request id, `sent`, `received`, `fetched` or `lent`, figures, outcome."""

logger = logging.getLogger(__name__)
_SUFFIX = "/prefix"  # of a fetch's name: the request's own pages may travel at the same time, in either direction


@dataclass(slots=True, eq=False)
class Fetches:
    """The fetches of one engine, as target and as source, through the dock of its handover."""

    engine: Engine
    dock: TransferDock
    config: TransferConfig
    on_figures: OnFigures

    @property
    def borrowed(self) -> BorrowedPrefixes:
        return self.engine.scheduler.borrowed

    @property
    def patience(self) -> float | None:
        """Seconds until a request stops waiting; None: no request waits."""
        return self.borrowed.patience(self.engine.clock())

    def ask(self, submission: Submission) -> None:
        """Ask for the prefix of a request that the engine has just queued, if its submission names a source."""
        request = self.engine.scheduler.table.get(submission.id)
        if request is None or not submission.source:
            return
        name = submission.id + _SUFFIX
        epoch = submission.epoch
        deadline_s = self.config.deadline_s
        try:
            peers = rank_blobs(submission.source)
            self.dock.call(ExpectCall(name, epoch, peers, deadline_s))
            hashes = self.borrowed.expect(_owner(name, epoch), request, self.engine.clock(), deadline_s)
            self.dock.call(AskCall(name, epoch, peers[0], rank_blobs(self.dock.blob), tuple(hashes)))
        except (IncompatiblePools, ValueError, RuntimeError) as error:
            logger.error("a prefix cannot be fetched, and is computed here: %s", error)
            self._fail(name, epoch, "incompatible")

    def plan(self) -> None:
        """End the fetches that no request waits for any more."""
        for owner in self.borrowed.overdue(self.engine.clock()):
            name, _, epoch = owner.rpartition("#")
            self._fail(name, int(epoch), "late")

    def handle(self, event: Event) -> bool:
        """Apply an event of the dock. Return whether the event is settled; else the handover does the rest."""
        if not event.request.endswith(_SUFFIX):
            return False
        owner = _owner(event.request, event.epoch)
        now = self.engine.clock()
        match event:
            case Asked():
                self._lend(event, owner)
            case Released():  # the handover gives the pages back
                self.on_figures(event.request, "lent", event.figures, "sent" if event.arrived else "failed")
                return False
            case Offered(num_tokens=num_tokens):
                self._grant(event, owner, num_tokens)
            case Committed(num_tokens=num_tokens):
                self.borrowed.land(owner, num_tokens, now)
            case Arrived(num_tokens=num_tokens):
                self.borrowed.land(owner, num_tokens, now)
                if self.borrowed.end(owner, may_be_written=False):
                    self.on_figures(event.request.removesuffix(_SUFFIX), "fetched", event.figures, "arrived")
                self.borrowed.stopped(owner)  # if the fetch was ended while this event was on its way
            case WriterStopped():
                self.borrowed.stopped(owner)
            case Failed(sending=False):
                self._fail(event.request, event.epoch, event.reason.value)
            case _:
                return False
        return True

    def _grant(self, event: Offered, owner: str, num_tokens: int) -> None:
        """Let the source write to pages here, if it has what is missing and there is room."""
        if self.borrowed.is_granted(owner):
            return  # an offer that was repeated
        prefix = self.borrowed.grant(owner, num_tokens, self.engine.clock())
        if prefix is None:
            self._fail(event.request, event.epoch, "declined")
            return
        groups = pages_of(self.engine, prefix.owner, prefix.num_landed)
        self.dock.call(GrantCall(event.request, event.epoch, prefix.num_landed, groups, tuple(prefix.state)))

    def _lend(self, event: Asked, owner: str) -> None:
        """Send the pages of a prefix that are here. Evicted pages are not sent, and none are computed."""
        pages = self.engine.pages
        key = (event.request, event.epoch)
        hit = pages.prefixes.match(event.hashes)
        if pages.pages_of(owner):
            return  # asked twice
        try:
            self.dock.call(ShipCall(*key, event.peers, self.config.deadline_s))
        except (IncompatiblePools, ValueError) as error:
            logger.error("a replica that asks for a prefix cannot take it: %s", error)
            return
        if not hit.num_pages:
            self.dock.call(CancelShipCall(*key))
            return
        pages.share(owner, hit)
        num_tokens = hit.num_pages * pages.page_size
        self.dock.call(OfferCall(*key, num_tokens))
        groups = pages_of(self.engine, owner)
        self.dock.call(FinishCall(event.request, groups, num_tokens, b"", tuple(hit.snapshot)))

    def _fail(self, name: str, epoch: int, outcome: str) -> None:
        """Let a request start without the rest of its prefix, and stop the source."""
        owner = _owner(name, epoch)
        if self.borrowed.end(owner, may_be_written=True):
            self.on_figures(name.removesuffix(_SUFFIX), "fetched", Figures(), outcome)
        self._cancel(CancelExpectCall(name, epoch))

    def _cancel(self, call: DockCall) -> None:
        try:
            self.dock.call(call)
        except RuntimeError:
            logger.exception("the dock has failed: this replica ends at its next health check")


def pages_of(engine: Engine, owner: str, first: int = 0) -> tuple[GroupPages, ...]:
    """Return an owner's pages in each group of layers, from page number `first` on."""
    groups = engine.pages.live_pages_of(owner)
    return tuple([GroupPages(max(start, first), tuple(pages[max(first - start, 0) :])) for start, pages in groups])


_owner: Callable[[str, int], str] = Request.owner_name
