"""Connects an engine with the dock at which embeddings arrive that `encode` replicas send.

Runs in the engine's thread, between steps, as the handover of KV pages does. The protocol is kvtransfer's, and
`ArrivingRows` decides what waits and what lands where. A landing maps the events and calls between both.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from crossdock.kvtransfer.calls import CancelExpectCall, ExpectCall, GrantCall, WaitCall
from crossdock.kvtransfer.events import Arrived, Committed, Event, Failed, Figures, Offered, WriterStopped
from crossdock.kvtransfer.layout import IncompatiblePools, PoolLayout, PoolSpec
from crossdock.kvtransfer.records import GroupPages
from crossdock.workers.model.encoder_model import VARIANT, row_layer
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.engine.engine import Engine, Step
from crossdock.workers.replica.ranks.pool_layout import memory_of
from crossdock.workers.replica.transfer.replica_dock import ReplicaDock, rank_blobs
from crossdock.workers.replica.transfer.side import OnFigures
from crossdock.workers.schedule.pictures.arriving_rows import LEAST_PATIENCE_S, ArrivingRows
from crossdock.workers.schedule.request import Request, TokenDelta
from crossdock.workers.schedule.submission import Leg, Submission

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Landing:
    """The transfers of embeddings to one engine. No failure here ends a request: the engine encodes what is missing."""

    ends_requests: ClassVar[bool] = False
    address: ClassVar[str] = "rows_peer"
    engine: Engine
    dock: ReplicaDock
    config: TransferConfig
    on_figures: OnFigures = lambda *_: None
    _notified: float = 0.0  # when the other replicas were last told to wait

    @property
    def rows(self) -> ArrivingRows:
        return self.engine.scheduler.encoding.arriving

    def add(self, submission: Submission) -> None:
        """Expect the rows of a request that the engine has just queued, if another replica encodes its items."""
        request = self.engine.scheduler.table.get(submission.id)
        if request is None or not submission.encoder or not submission.items or submission.leg is Leg.RECEIVE:
            return
        try:
            peers = rank_blobs(submission.encoder)
            self.dock.call(ExpectCall(request.id, request.epoch, peers, self.config.deadline_s))
        except (IncompatiblePools, ValueError, RuntimeError) as error:
            logger.error("a replica that encodes cannot send its embeddings here, which encodes itself: %s", error)
            request.is_encoded_elsewhere = False
            return
        self.rows.expect(request, self.engine.clock(), min(self.config.deadline_s, LEAST_PATIENCE_S))
        self._wait(request)  # answered with the offer, if that came before this request

    def plan(self) -> None:
        """Grant landing pages and stop transfers, before a step.

        A call that fails costs its own request the rows. Its landing pages are free once the dock reports that no
        process writes to them. A failed dock reports nothing: then the replica ends at its next health check.
        """
        now = self.engine.clock()
        calls = self.rows.plan(now, self.engine.scheduler.encoding.has)
        for request in calls.cancels:
            self._call(CancelExpectCall(request.id, request.epoch))
        for request, first_page, pages in calls.grants:
            groups = (GroupPages(first_page, tuple(pages)),)
            if not self._call(GrantCall(request.id, request.epoch, first_page, groups)):
                self.rows.fail(request.owner)
                self._call(CancelExpectCall(request.id, request.epoch))
        if now - self._notified > self.config.deadline_s / 3:
            self._notified = now
            for transfer in self.rows.ungranted():
                self._wait(transfer.request)

    @property
    def patience(self) -> float | None:
        return self.config.deadline_s / 6 if self.rows.ungranted() else None

    def step(self, step: Step | None) -> Sequence[TokenDelta]:
        return ()

    def aborted(self, request: Request) -> None:
        """Leave the transfer to the next `plan`, which sees that its request has ended."""

    def handle(self, event: Event) -> Sequence[TokenDelta]:
        owner = Request.owner_name(event.request, event.epoch)
        match event:
            case Offered():
                self.rows.offer(owner)
            case Committed(num_tokens=num_rows):
                self.rows.commit(owner, num_rows)
            case Arrived(num_tokens=num_rows):
                self.on_figures(event.request, "embeddings", event.figures, "arrived")
                self.rows.arrive(owner, num_rows)
            case Failed():
                self.on_figures(event.request, "embeddings", Figures(), event.reason.value)
                self.rows.fail(owner)
            case WriterStopped():
                self.rows.stop(owner)
            case _:  # of a transfer that is sent: none is
                pass
        return ()

    def _wait(self, request: Request) -> None:
        self._call(WaitCall(request.id, request.epoch, self.config.deadline_s))

    def _call(self, call: CancelExpectCall | GrantCall | WaitCall) -> bool:
        """Call the dock for one request. Return False where that fails: calls for other requests must follow."""
        try:
            self.dock.call(call)
        except Exception:
            logger.exception("the dock for embeddings failed at a call for %s; others go on", call.request)
            return False
        return True


def open_landing(
    engine: Engine,
    model: str,
    role: str,
    config: TransferConfig,
    on_event: Callable[[Event], None],
    on_figures: OnFigures,
) -> Landing:
    """Return the landing of an engine that takes rows, on one rank, with a dock of its own. `model`: of the weights.

    Raises:
        TransportUnavailable: NIXL is asked for, or the model is on a GPU, and NIXL cannot be used here.
    """
    encoder, page_size = engine.model.encoder, engine.config.page_size
    num_pages = engine.scheduler.encoding.arriving.num_pages
    assert encoder is not None, "a model of text alone takes no embeddings"
    assert num_pages, "the model was loaded to take no embeddings"
    pool = encoder.open_landing(num_pages, page_size)
    layout = PoolLayout([row_layer(engine.model.config)], page_size, pool.itemsize)
    spec = PoolSpec.whole(layout, f"{model} {VARIANT}", str(pool.dtype).removeprefix("torch."), num_pages)
    dock = ReplicaDock(memory_of(pool), spec, f"{role} landing", config, None, on_event, engine.clock)
    return Landing(engine, dock, config, on_figures)
