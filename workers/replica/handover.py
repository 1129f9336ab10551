"""Between an engine and its docks: a prompt's pages leave as chunks are done, or arrive and are decoded from.

Runs in the engine's thread, between steps. The protocol is kvtransfer's, the state of requests the scheduler's; this
says which event of the one is which call of the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgpack

from crossdock.kvtransfer.events import Arrived, Committed, Event, Failed, Figures, Granted, Released, WriterStopped
from crossdock.kvtransfer.layout import IncompatiblePools
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.docks import Docks
from crossdock.workers.replica.engine import Engine, Step
from crossdock.workers.schedule.request import FinishReason, Leg, Request, Status, Submission, TokenDelta


class CannotPair(RuntimeError):
    """The two replicas of a placement cannot exchange pages; the message shows both pools."""


@dataclass(slots=True, eq=False)
class Handover:
    """The transfers of one engine. `add`, `step` and `handle` must not overlap with the engine's own calls."""

    engine: Engine
    dock: Docks
    config: TransferConfig
    on_figures: Callable[[str, bool, Figures, str], None] = lambda *_: None
    """Told of every transfer's end: request id, whether it was sent from here, its figures, and how it ended."""
    _epochs: dict[str, int] = field(default_factory=dict)  # of the requests with a transfer under way, by id
    _told: dict[str, float] = field(default_factory=dict)  # when the other side last heard of a request

    # -- calls -------------------------------------------------------------------------------------------------------

    def add(self, submission: Submission) -> None:
        """Begins the transfer of a request that the engine has just taken. CannotPair: it must be placed elsewhere."""
        if submission.leg is Leg.LOCAL:
            return
        begin = self.dock.ship if submission.leg is Leg.SEND else self.dock.expect
        try:
            begin(submission.id, submission.epoch, submission.peer, self.config.deadline_s)
        except (IncompatiblePools, ValueError) as error:
            self.engine.abort(submission.id)
            self._release(submission.id, submission.epoch)
            raise CannotPair(str(error)) from error
        self._epochs[submission.id] = submission.epoch
        self._told[submission.id] = self.engine.clock()

    def aborted(self, request: Request) -> None:
        """Ends the transfer of a request that was aborted here."""
        self._cancel(request.id, request.leg)

    @property
    def patience(self) -> float | None:
        """Seconds until `step` should be called again though nothing happens; None: for ever."""
        return self.config.deadline_s / 6 if self._told else None

    def step(self, step: Step | None) -> None:
        """After a step, or when something else happened: what was computed goes out, who waited for pages gets them,
        and whoever still waits is told that we live."""
        for part in step.batch.scheduled if step else ():
            request = part.request
            if request.leg is not Leg.SEND or request.id not in self._epochs:
                continue
            pages = self.engine.pages.pages_of(request.owner)
            if request.finish_reason is not None:  # its first token was its last: nobody needs the pages
                self._cancel(request.id, Leg.SEND)
            elif request.num_output_tokens > len(request.output_token_ids):
                state = msgpack.packb(request.token_ids[-1])
                self.dock.finish(request.id, pages, request.num_computed_tokens, state)
            else:
                self.dock.chunk(request.id, pages, request.num_computed_tokens)
            self._told[request.id] = self.engine.clock()
        self.grant()
        self._keep_patient(self.engine.clock())

    def grant(self) -> None:
        """Who waits for pages gets them, as far as there are any: the other replica may write to them from now on."""
        now = self.engine.clock()
        for request in self.engine.scheduler.grant(now):
            first = request.num_computed_tokens // self.engine.config.page_size
            self.dock.grant(request.id, request.epoch, first, self.engine.pages.pages_of(request.owner)[first:])
            self._told[request.id] = now

    def _keep_patient(self, now: float) -> None:
        for request_id, told in self._told.items():
            if now - told > self.config.deadline_s / 3:
                self._told[request_id] = now
                self.dock.wait(request_id, self._epochs[request_id], self.config.deadline_s)

    # -- events ------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> Sequence[TokenDelta]:
        """What follows from an event of the dock's."""
        request = self.engine.scheduler.get(event.request)
        if request is not None and request.epoch != event.epoch:
            request = None  # of a placement that is over
        match event:
            case Committed(num_tokens=num_tokens) if request is not None and request.status is Status.HELD:
                self.engine.scheduler.commit(request.id, num_tokens)
            case Arrived(state=state, figures=figures):
                self._end(event.request, event.epoch)
                self.engine.pages.end_quarantine(_owner(event))  # if it was aborted with these words on their way
                self.on_figures(event.request, False, figures, "arrived")
                if request is not None and request.status is Status.HELD:
                    token_id = _token(state, self.engine.model.vocab_size)
                    self.engine.arrive(request.id, token_id or 0)
                    if token_id is None:  # its pages are all here and nobody writes to them: it ends as a running one
                        self.engine.abort(request.id)
                        why = "the replica that computed the prompt sent no token with it"
                        return [TokenDelta(request.id, [], epoch=request.epoch, finish_reason=_ERROR, error=why)]
            case Failed(sending=False) if request is not None and request.leg is Leg.RECEIVE:
                self._end(event.request, event.epoch)
                self.on_figures(event.request, False, Figures(), event.reason.value)
                self.engine.scheduler.take_over(request.id, self.engine.clock())
            case Failed(sending=True) if request is not None:
                self.on_figures(event.request, True, Figures(), event.reason.value)
                self.engine.abort(request.id)
                self._end(event.request, event.epoch)
                return [TokenDelta(request.id, [], epoch=request.epoch, finish_reason=FinishReason.SHIPPED)]
            case Released(arrived=arrived, figures=figures):
                deltas = []
                if request is not None and arrived:
                    self.engine.ship(request.id)
                    deltas = [TokenDelta(request.id, [], epoch=request.epoch, finish_reason=FinishReason.SHIPPED)]
                    self.on_figures(event.request, True, figures, "shipped")
                self._end(event.request, event.epoch)
                self._release(event.request, event.epoch)
                return deltas
            case WriterStopped():
                self.engine.pages.end_quarantine(_owner(event))
            case Granted() | Committed() | Failed():
                pass
        return ()

    def _cancel(self, request_id: str, leg: Leg) -> None:
        epoch = self._epochs.get(request_id)
        if epoch is not None:
            (self.dock.cancel_ship if leg is Leg.SEND else self.dock.cancel_expect)(request_id, epoch)
            self._end(request_id, epoch)

    def _end(self, request_id: str, epoch: int) -> None:
        if self._epochs.get(request_id) == epoch:  # else a later placement has begun: late words end nothing of it
            del self._epochs[request_id], self._told[request_id]

    def _release(self, request_id: str, epoch: int) -> None:
        self.engine.pages.release(Request.owner_name(request_id, epoch))


_ERROR = FinishReason.ERROR


def _token(state: bytes, vocab_size: int) -> int | None:
    """The token that came with the pages. It is another process's word: what is none must not reach the engine."""
    try:
        token_id = msgpack.unpackb(state)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        return None
    return token_id if type(token_id) is int and 0 <= token_id < vocab_size else None


def _owner(event: Event) -> str:
    return Request.owner_name(event.request, event.epoch)


def connect(
    engine: Engine, model: str, role: str, config: TransferConfig, on_event: Callable[[Event], None]
) -> Handover:
    """A handover with docks of its own over the engine's KV pool. `model` names the weights: pages of different models
    never mix. `on_event` hands the docks' events, from their threads, to `Handover.handle`, in the engine's.

    Raises:
        TransportUnavailable: NIXL is asked for, or the pool is a GPU's, and NIXL cannot be used here.
    """
    docks = Docks(engine.model, engine.pool_spec(model), role, config, engine.gang, on_event, engine.clock)
    return Handover(engine, docks, config)
