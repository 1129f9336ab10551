"""The source's side of all transfers: when to write which pages to whom, and when none is being read any more.

Sans-IO: calls, messages, completions and the time go in; messages to send, writes to begin and events come out.

A shipment goes to one target, or to several ranks of it: a leg each, with its own grant and its own sequence. A leg
has at most one write open. What becomes ready meanwhile goes out together as the next one, so that writes grow with
the backlog, and a shipment never keeps others from the wire for longer than `max_write_bytes` takes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from crossdock.kvtransfer.events import Event, Failed, Figures, Granted, Reason, Released
from crossdock.kvtransfer.fence import Fence
from crossdock.kvtransfer.messages import Abort, Grant, Hello, Message, Pages, Stopped, Wait


@dataclass(frozen=True, slots=True)
class Target:
    """A rank that takes part of the pages: `page_bytes` of each, among `num_sources` ranks that write to it."""

    num_pages: int  # of its pool
    page_bytes: int
    num_sources: int


@dataclass(frozen=True, slots=True)
class Send:
    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class Write:
    """Write `source_pages` to `target_pages`, one to one, and then deliver `message`. (request, epoch, peer) names it:
    a leg has one write open at most."""

    peer: str
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    message: Pages


Output: TypeAlias = Send | Write | Event


@dataclass(slots=True, eq=False)
class _Leg:
    target: Target
    silent_until: float  # no grant and no word by then: the peer is lost
    grant: Grant | None = None
    next_page: int = 0
    sequence: int = 0
    open_since: float | None = None  # when its open write began
    open_pages: int = 0
    is_heard: bool = False
    is_complete: bool = False  # the state has been delivered
    is_broken: bool = False  # a write of it failed
    is_told: bool = False  # the peer, that we have stopped; or it is dead and need not be told


@dataclass(slots=True, eq=False)
class _Shipment:
    request: str
    epoch: int
    deadline_seconds: float
    began: float
    legs: dict[str, _Leg]
    pages: tuple[int, ...] = ()
    num_tokens: int = 0
    state: bytes | None = None  # set by finish
    finished: float | None = None
    is_stopping: bool = False
    busy_since: float | None = None  # a write has been open all the time since
    figures: Figures = field(default_factory=Figures)


class Sender:
    """All shipments of one rank."""

    def __init__(self, rank: int, page_size: int, max_write_bytes: int) -> None:
        self.rank = rank
        self.page_size = page_size
        self.max_write_bytes = max_write_bytes
        self.num_unknown = 0  # messages about no shipment of ours: late ones, mostly
        self._shipments: dict[tuple[str, int], _Shipment] = {}
        self._fence = Fence()
        self._out: list[Output] = []

    def __len__(self) -> int:
        return len(self._shipments)

    @property
    def next_deadline(self) -> float:
        """When `tick` may next have something to say; infinity if never."""
        times = (at for shipment in self._shipments.values() for _, at, _ in _deadlines(shipment))
        return min(times, default=float("inf"))

    # -- what the owner wants --------------------------------------------------------------------------------------

    def ship(
        self, request: str, epoch: int, targets: Mapping[str, Target], deadline_seconds: float, now: float
    ) -> list[Output]:
        """Begins a shipment; an older epoch of the request still under way is stopped."""
        if (request, epoch) in self._shipments:
            return []
        if self._fence.has_passed(request, epoch):
            self._out.extend(Send(peer, Stopped(request, epoch, is_clean=True)) for peer in targets)
            self._out.append(Failed(request, epoch, True, Reason.SUPERSEDED, "this epoch has ended"))
            self._out.append(Released(request, epoch, False, Figures()))
            return self._flush()
        for older in [s for s in self._shipments.values() if s.request == request]:
            self._stop(older, now)
        legs = {peer: _Leg(target, now + deadline_seconds) for peer, target in targets.items()}
        self._shipments[request, epoch] = _Shipment(request, epoch, deadline_seconds, now, legs)
        self._out.extend(Send(peer, Hello(request, epoch)) for peer in legs)
        return self._flush()

    def chunk(self, request: str, pages: Sequence[int], num_tokens: int, now: float) -> list[Output]:
        """So far `num_tokens` of the request lie in its `pages`. Writes what is full and not yet sent."""
        for shipment in self._live(request):
            if shipment.finished is None:
                shipment.pages, shipment.num_tokens = tuple(pages), num_tokens
                self._advance(shipment, now)
        return self._flush()

    def finish(self, request: str, pages: Sequence[int], num_tokens: int, state: bytes, now: float) -> list[Output]:
        """All is computed: the rest goes out, the partial page and `state` last."""
        for shipment in self._live(request):
            if shipment.finished is None:
                self._account(shipment, now)  # so far, writing was hidden behind computing
                shipment.pages, shipment.num_tokens = tuple(pages), num_tokens
                shipment.state, shipment.finished = state, now
                self._advance(shipment, now)
        return self._flush()

    def wait(self, request: str, epoch: int, seconds: float) -> list[Output]:
        """Tells the targets that the next chunk will take about `seconds`."""
        shipment = self._shipments.get((request, epoch))
        if shipment and not shipment.is_stopping:
            self._out.extend(Send(peer, Wait(request, epoch, seconds, is_from_source=True)) for peer in shipment.legs)
        return self._flush()

    def cancel(self, request: str, epoch: int, now: float) -> list[Output]:
        """Writes no more of it. `Released` answers, also where there is nothing (any more) to cancel: a cancel may
        cross the end of its transfer, and whoever calls waits for an answer."""
        shipment = self._shipments.get((request, epoch))
        if shipment is None:
            self._fence.pass_(request, epoch)
            self._out.append(Released(request, epoch, False, Figures()))
        else:
            self._stop(shipment, now)
        return self._flush()

    # -- what happens ----------------------------------------------------------------------------------------------

    def receive(self, peer: str, message: Message, now: float) -> list[Output]:
        """A Grant, Wait or Abort from a target."""
        shipment = self._shipments.get((message.request, message.epoch))
        leg = shipment.legs.get(peer) if shipment else None
        if shipment is None or leg is None:
            self.num_unknown += 1
            if isinstance(message, Abort) and shipment is None:
                # Whoever aborts waits for this word. It is a promise, which the fence keeps: ship() may still come.
                self._fence.pass_(message.request, message.epoch)
                self._out.append(Send(peer, Stopped(message.request, message.epoch, is_clean=True)))
            return self._flush()
        if not leg.is_heard:
            leg.is_heard = True
            if all(other.is_heard for other in shipment.legs.values()):
                shipment.figures.handshake_seconds = now - shipment.began
        match message:
            case Grant() if leg.grant is None and not shipment.is_stopping:
                self._grant(shipment, peer, leg, message, now)
            case Wait():
                leg.silent_until = now + message.seconds + shipment.deadline_seconds
            case Abort() if not shipment.is_stopping:
                self._fail(shipment, Reason.PEER_STOPPED, f"{peer} aborted", now)
            case _:
                pass
        return self._flush()

    def write_done(self, request: str, epoch: int, peer: str, now: float) -> list[Output]:
        """The open write of this leg is complete: its data and its message are with the target."""
        shipment, leg = self._open_leg(request, epoch, peer)
        num_bytes = leg.open_pages * leg.target.page_bytes
        shipment.figures.num_bytes += num_bytes
        shipment.figures.num_pages += leg.open_pages
        if shipment.finished is None:
            shipment.figures.hidden_bytes += num_bytes
        self._close_write(shipment, leg, now)
        self._advance(shipment, now)
        return self._flush()

    def write_failed(self, request: str, epoch: int, peer: str, detail: str, now: float) -> list[Output]:
        """The open write of this leg has ended, and nobody knows how far it came: the peer is lost."""
        shipment, leg = self._open_leg(request, epoch, peer)
        leg.is_broken = True
        self._close_write(shipment, leg, now)
        self._fail(shipment, Reason.PEER_LOST, detail, now)
        return self._flush()

    def peer_lost(self, peer: str, is_dead: bool, detail: str, now: float) -> list[Output]:
        """The connection to `peer` broke. Its open writes stay open until the transport says how each ended."""
        for shipment in [s for s in self._shipments.values() if peer in s.legs]:
            leg = shipment.legs[peer]
            leg.is_told |= is_dead
            if not leg.is_complete:
                self._fail(shipment, Reason.PEER_LOST, detail, now)
        return self._flush()

    def tick(self, now: float) -> list[Output]:
        """Fails what is past its deadline. A write past it stays open, and its pages in use, until it ends."""
        for shipment in list(self._shipments.values()):
            for peer, at, what in _deadlines(shipment):
                if now >= at:
                    detail = f"{peer}: {what} for {shipment.deadline_seconds:.3g} s"
                    self._fail(shipment, Reason.DEADLINE, detail, now)
                    break
        return self._flush()

    # -- steps -----------------------------------------------------------------------------------------------------

    def _grant(self, shipment: _Shipment, peer: str, leg: _Leg, grant: Grant, now: float) -> None:
        if len(set(grant.pages)) != len(grant.pages) or any(page >= leg.target.num_pages for page in grant.pages):
            self._fail(shipment, Reason.PROTOCOL, f"{peer} granted pages twice or beyond its pool", now)
            return
        leg.grant, leg.next_page = grant, grant.first_page
        if all(other.grant for other in shipment.legs.values()):
            shipment.figures.grant_wait_seconds = now - shipment.began
            first_page = min(other.grant.first_page for other in shipment.legs.values() if other.grant)
            self._out.append(Granted(shipment.request, shipment.epoch, first_page))
        self._advance(shipment, now)

    def _advance(self, shipment: _Shipment, now: float) -> None:
        """Begins on each leg the write that it is ready for, and ends the shipment if all is done."""
        for peer, leg in shipment.legs.items():
            if not shipment.is_stopping and leg.grant and leg.open_since is None and not leg.is_complete:
                self._write_next(shipment, peer, leg, leg.grant, now)
        self._end_if_done(shipment, now)

    def _write_next(self, shipment: _Shipment, peer: str, leg: _Leg, grant: Grant, now: float) -> None:
        is_finished = shipment.state is not None
        num_ready = (shipment.num_tokens + is_finished * (self.page_size - 1)) // self.page_size
        most = max(1, self.max_write_bytes // leg.target.page_bytes)
        end = max(leg.next_page, min(num_ready, leg.next_page + most))
        is_last = is_finished and end >= num_ready
        if end == leg.next_page and not is_last:
            return
        if end - grant.first_page > len(grant.pages):
            detail = f"{peer} granted pages up to {grant.first_page + len(grant.pages)}, {end} are needed"
            self._fail(shipment, Reason.PROTOCOL, detail, now)
            return
        message = Pages(
            shipment.request,
            shipment.epoch,
            leg.sequence,
            leg.next_page,
            end - leg.next_page,
            shipment.num_tokens if is_last else end * self.page_size,
            self.rank,
            leg.target.num_sources,
            shipment.state if is_last else None,
        )
        leg.is_complete = is_last
        leg.sequence += 1
        if end == leg.next_page:
            self._out.append(Send(peer, message))
            return
        target_pages = grant.pages[leg.next_page - grant.first_page : end - grant.first_page]
        self._out.append(Write(peer, shipment.pages[leg.next_page : end], target_pages, message))
        self._account(shipment, now)
        leg.open_since, leg.open_pages, leg.next_page = now, end - leg.next_page, end
        if shipment.busy_since is None:
            shipment.busy_since = now
        shipment.figures.num_writes += 1

    def _close_write(self, shipment: _Shipment, leg: _Leg, now: float) -> None:
        self._account(shipment, now)
        leg.open_since = None
        if not any(other.open_since is not None for other in shipment.legs.values()):
            shipment.busy_since = None

    def _account(self, shipment: _Shipment, now: float) -> None:
        """Books the time since a write has been open; called before anything that changes how it counts."""
        if shipment.busy_since is not None and now > shipment.busy_since:
            shipment.figures.write_seconds += now - shipment.busy_since
            if shipment.finished is None:
                shipment.figures.hidden_seconds += now - shipment.busy_since
            shipment.busy_since = now

    def _fail(self, shipment: _Shipment, reason: Reason, detail: str, now: float) -> None:
        if not shipment.is_stopping:
            self._out.append(Failed(shipment.request, shipment.epoch, True, reason, detail))
            self._stop(shipment, now)
        else:
            self._end_if_done(shipment, now)

    def _stop(self, shipment: _Shipment, now: float) -> None:
        shipment.is_stopping = True
        self._end_if_done(shipment, now)

    def _end_if_done(self, shipment: _Shipment, now: float) -> None:
        key = shipment.request, shipment.epoch
        legs = shipment.legs.items()
        if shipment.is_stopping:
            for peer, leg in legs:
                if leg.open_since is None and not leg.is_told:
                    leg.is_told = True
                    self._out.append(Send(peer, Stopped(*key, is_clean=not leg.is_broken)))
        elif shipment.state is None or not all(leg.is_complete for _, leg in legs):
            return
        if key in self._shipments and all(leg.open_since is None for _, leg in legs):
            del self._shipments[key]
            self._fence.pass_(*key)
            shipment.figures.total_seconds = now - shipment.began
            self._out.append(Released(*key, not shipment.is_stopping, shipment.figures))

    def _live(self, request: str) -> list[_Shipment]:
        return [s for s in self._shipments.values() if s.request == request and not s.is_stopping]

    def _open_leg(self, request: str, epoch: int, peer: str) -> tuple[_Shipment, _Leg]:
        shipment = self._shipments[request, epoch]
        leg = shipment.legs[peer]
        assert leg.open_since is not None, f"no write of {request} is open to {peer}"
        return shipment, leg

    def _flush(self) -> list[Output]:
        out, self._out = self._out, []
        return out


def _deadlines(shipment: _Shipment) -> Iterable[tuple[str, float, str]]:
    """(peer, when, what it did too long) of each leg that is waiting for its peer."""
    if shipment.is_stopping:
        return
    for peer, leg in shipment.legs.items():
        if leg.grant is None:
            yield peer, leg.silent_until, "neither a grant nor a wait"
        elif leg.open_since is not None:
            yield peer, leg.open_since + shipment.deadline_seconds, "a write has been open"
