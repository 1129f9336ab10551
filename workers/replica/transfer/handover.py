"""Connects an engine with its docks: pages of a prompt leave as its chunks are done, or arrive and are decoded from.

Runs in the engine's thread, between steps. The protocol is kvtransfer's, the state of requests is the scheduler's. A
handover maps the dock's events to calls of the engine, and the engine's steps to calls of the dock.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from crossdock.kvtransfer.calls import (
    CancelExpectCall,
    CancelShipCall,
    ChunkCall,
    ExpectCall,
    FinishCall,
    GrantCall,
    OfferCall,
    ShipCall,
    WaitCall,
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
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.engine.engine import Engine, Step
from crossdock.workers.replica.transfer.fetches import Fetches, OnFigures, pages_of
from crossdock.workers.replica.transfer.replica_dock import ReplicaDock, TransferDock, rank_blobs
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.request import FinishReason, Request, Status, TokenDelta
from crossdock.workers.schedule.request.submission import Leg, Submission

_MOST_EARLY_OFFERS = 4096  # of requests that have not come here yet; a forgotten offer is repeated


@dataclass(slots=True)
class _Transfer:
    """A transfer under way, of the request of that id."""

    epoch: int
    notified: float  # when the other side was last sent something
    is_offered: bool = False  # of a prompt that is sent: it has pages here, and the other side knows


@dataclass(slots=True, eq=False)
class Handover:
    """The transfers of KV pages of one engine. Its calls must not overlap with the engine's own."""

    engine: Engine
    dock: TransferDock
    config: TransferConfig
    on_figures: OnFigures = lambda *_: None
    fetches: Fetches = field(init=False)
    _transfers: dict[str, _Transfer] = field(default_factory=dict)  # by request id
    _early_offers: OrderedDict[tuple[str, int], None] = field(default_factory=OrderedDict)  # by request id and epoch
    _deltas: list[TokenDelta] = field(default_factory=list)  # of grants, and of requests that made way: not read yet

    def __post_init__(self) -> None:
        self.fetches = Fetches(self.engine, self.dock, self.config, self.on_figures)

    def add(self, submission: Submission) -> None:
        """Begin the transfer of a request that the engine has just queued. RuntimeError: place it elsewhere."""
        self.fetches.ask(submission)
        if submission.leg is Leg.LOCAL:
            return
        begin = ShipCall if submission.leg is Leg.SEND else ExpectCall
        try:
            peers = rank_blobs(submission.peer)
            self.dock.call(begin(submission.id, submission.epoch, peers, self.config.deadline_s))
        except (IncompatiblePools, ValueError) as error:
            self.engine.abort(submission.id)
            self.engine.pages.release(Request.owner_name(submission.id, submission.epoch))
            raise RuntimeError(str(error)) from error
        self._transfers[submission.id] = _Transfer(submission.epoch, self.engine.clock())
        if self._early_offers.pop((submission.id, submission.epoch), 0) is None:
            self.engine.scheduler.handoff.offer(submission.id)

    def aborted(self, request: Request) -> None:
        """End the transfer of a request that was aborted here."""
        self._cancel(request.id, request.leg)

    @property
    def patience(self) -> float | None:
        """Seconds until `plan` and `step` should be called again although nothing happens; None: no limit."""
        limits = (self.config.deadline_s / 6 if self._transfers else None, self.fetches.patience)
        return min((limit for limit in limits if limit is not None), default=None)

    def scheduled(self, batch: Batch) -> None:
        """Offer the prompts that begin with `batch`, before it is computed: the other side grants pages meanwhile."""
        for part in batch.scheduled:
            request = part.request
            transfer = self._transfers.get(request.id) if request.leg is Leg.SEND else None
            if transfer is not None and not transfer.is_offered:
                transfer.is_offered, transfer.notified = True, self.engine.clock()
                self.dock.call(OfferCall(request.id, request.epoch))
        self._take_returned()

    def step(self, step: Step | None) -> Sequence[TokenDelta]:
        """Ship the pages that `step` computed, grant pages to waiting requests, and extend the other sides' deadlines.

        Returns what `plan` returns.
        """
        for part in step.batch.scheduled if step else ():
            request = part.request
            if request.leg is not Leg.SEND or request.id not in self._transfers:
                continue
            if request.finish_reason is not None:  # its first token was its last: the pages are not needed
                self._cancel(request.id, Leg.SEND)
            elif request.num_output_tokens > len(request.submission.output_token_ids):
                head = self.engine.head
                states = b"" if head is None else head.hand_over(request.id)
                token_id = request.token_ids[-1]
                result = msgspec.msgpack.encode((token_id, states) if states else token_id)
                groups = pages_of(self.engine, request.owner)
                state = tuple(self.engine.pages.states.newest(request.owner))
                self.dock.call(FinishCall(request.id, groups, request.num_computed_tokens, result, state))
            else:
                self.dock.call(ChunkCall(request.id, pages_of(self.engine, request.owner), request.num_computed_tokens))
            if request.id in self._transfers:
                self._transfers[request.id].notified = self.engine.clock()
        deltas = self.plan()
        self._extend_deadlines(self.engine.clock())
        return deltas

    def plan(self) -> Sequence[TokenDelta]:
        """Grant pages to waiting requests, as far as there are any: the other replica may write to them from now on.

        Returns an empty delta for each grant, so that the ingress shows the first token, which the other replica makes.
        Returns the ends of requests that made way for more urgent ones, too.
        """
        self.fetches.plan()
        now = self.engine.clock()
        for request in self.engine.scheduler.handoff.grant(now):
            first = request.num_computed_tokens // self.engine.config.page_size
            groups = pages_of(self.engine, request.owner, first)
            state = tuple(self.engine.pages.states.newest(request.owner))
            self.dock.call(GrantCall(request.id, request.epoch, first, groups, state))
            self._transfers[request.id].notified = now
            self._deltas.append(TokenDelta(request.id, [], epoch=request.epoch))
        self._take_returned()
        deltas = self._deltas
        self._deltas = []
        return deltas

    def _take_returned(self) -> None:
        """Cancel the transfers of requests that made way for more urgent ones, so that their pages come back."""
        for request in self.engine.take_returned():
            self._cancel(request.id, request.leg)
            self._deltas.append(_ended(request))

    def _extend_deadlines(self, now: float) -> None:
        """Notify the other sides that this replica still works on their requests."""
        for request_id, transfer in self._transfers.items():
            if now - transfer.notified > self.config.deadline_s / 3:
                transfer.notified = now
                self.dock.call(WaitCall(request_id, transfer.epoch, self.config.deadline_s))

    def handle(self, event: Event) -> Sequence[TokenDelta]:
        """Apply an event of the dock to the engine. Returns the deltas of requests that ended by it."""
        if self.fetches.handle(event):
            return ()
        request = self.engine.scheduler.table.get(event.request)
        if request is not None and request.epoch != event.epoch:
            request = None  # the event is of a placement that is over
        match event:
            case Offered():
                self._offered(event, request)
            case Committed(num_tokens=num_tokens) if request is not None and request.status is Status.HELD:
                self.engine.scheduler.handoff.commit(request.id, num_tokens)
            case Arrived():
                return self._arrived(event, request)
            case Failed(sending=False) if request is not None and request.leg is Leg.RECEIVE:
                self._end(event.request, event.epoch)
                self.on_figures(event.request, "received", Figures(), event.reason.value)
                self.engine.scheduler.handoff.take_over(request.id, self.engine.clock())
            case Failed(sending=True) if request is not None:
                self.on_figures(event.request, "sent", Figures(), event.reason.value)
                self.engine.abort(request.id)
                self._end(event.request, event.epoch)
                end = TokenDelta(request.id, [], epoch=request.epoch, finish_reason=FinishReason.SHIPPED)
                end.charged_s = request.charged_s
                return [end]
            case Released():
                return self._released(event, request)
            case WriterStopped():
                self.engine.pages.end_quarantine(_owner(event))
            case Asked() | Committed() | Failed():
                pass
        return ()

    def _offered(self, event: Offered, request: Request | None) -> None:
        """Let pages be granted for a prompt that the other replica will compute, now or once the request comes here."""
        if request is not None:
            self.engine.scheduler.handoff.offer(request.id)
            return
        self._early_offers[event.request, event.epoch] = None
        if len(self._early_offers) > _MOST_EARLY_OFFERS:
            self._early_offers.popitem(last=False)

    def _arrived(self, event: Arrived, request: Request | None) -> Sequence[TokenDelta]:
        """Let a request decode whose pages have all arrived. `request`: None: the request has ended meanwhile."""
        self._end(event.request, event.epoch)
        self.engine.pages.end_quarantine(_owner(event))  # if it was aborted while this event was on its way
        self.on_figures(event.request, "received", event.figures, "arrived")
        if request is None or request.status is not Status.HELD:
            return ()
        if event.num_tokens != request.num_tokens:  # another prompt, or another output before it: computed here
            self.engine.scheduler.handoff.take_over(request.id, self.engine.clock())
            self.engine.pages.end_quarantine(request.owner)
            return ()
        token_id, states = _first_token(event.result, self.engine.executor.vocab_size)
        self.engine.arrive(request.id, token_id or 0)
        if states and self.engine.head is not None:
            self.engine.head.take_over(request.id, states)
        if token_id is not None:
            return ()
        self.engine.abort(request.id)  # its pages are all here and no process writes to them: it ends as a running one
        error = "the replica that computed the prompt sent no token with it"
        return [TokenDelta(request.id, [], epoch=request.epoch, finish_reason=FinishReason.ERROR, error=error)]

    def _released(self, event: Released, request: Request | None) -> Sequence[TokenDelta]:
        """Free the pages of a prompt that was sent, and end its request if all arrived."""
        deltas = []
        if request is not None and event.arrived:
            self.engine.ship(request.id)
            deltas = [_ended(request)]
            self.on_figures(event.request, "sent", event.figures, "shipped")
        self._end(event.request, event.epoch)
        self.engine.pages.release(_owner(event))
        return deltas

    def _cancel(self, request_id: str, leg: Leg) -> None:
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None:
            cancel = CancelShipCall if leg is Leg.SEND else CancelExpectCall
            self.dock.call(cancel(request_id, transfer.epoch))

    def _end(self, request_id: str, epoch: int) -> None:
        transfer = self._transfers.get(request_id)
        if transfer is not None and transfer.epoch == epoch:  # else a later attempt has begun, which goes on
            del self._transfers[request_id]


def _ended(request: Request) -> TokenDelta:
    return TokenDelta(request.id, [], epoch=request.epoch, finish_reason=request.finish_reason)


def _first_token(result: bytes, vocab_size: int) -> tuple[int | None, bytes]:
    """Return the token that came with the pages, and states of a head: empty where there are none.

    None: another process sent a number that is no token of the model.
    """
    try:
        found = msgspec.msgpack.decode(result, type=int | tuple[int, bytes])
    except (ValueError, RecursionError):
        return None, b""
    token_id, states = (found, b"") if isinstance(found, int) else found
    return (token_id if 0 <= token_id < vocab_size else None), states


def _owner(event: Event) -> str:
    return Request.owner_name(event.request, event.epoch)


HandoverOpener: TypeAlias = Callable[[Callable[[Event], None], OnFigures], Handover]
"""Opens a handover, given what to call with the dock's events, on the dock's threads, and `OnFigures`."""


def connect(
    engine: Engine,
    model: str,
    role: str,
    config: TransferConfig,
    on_event: Callable[[Event], None],
    on_figures: OnFigures,
) -> Handover:
    """Return a handover with docks of its own over the engine's KV pool.

    `model` names the weights: pages of different models never mix.

    Raises:
        TransportUnavailable: NIXL is asked for, or the pool is a GPU's, and NIXL cannot be used here.
    """
    before_grant = None if engine.executor.model is None else engine.executor.model.pool.before_others
    spec = engine.pool_spec(model)
    dock = ReplicaDock(
        engine.executor.memory, spec, role, config, engine.worker_group, on_event, engine.clock, before_grant
    )
    return Handover(engine, dock, config, on_figures)
