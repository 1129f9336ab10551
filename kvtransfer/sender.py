"""The source's side of all transfers: when to write which pages to which rank, and when no page is being read any more.

Sans-IO: calls, messages, completions and the time go in; messages to send, writes to begin and events come out.

A shipment goes to one target rank or to several. Each has its own delivery, with its own grant and its own sequence of
writes. A delivery has at most one write open. Pages that become ready meanwhile go out together in the next write, so
writes grow with the backlog; `max_write_bytes` bounds how long one shipment keeps others from the wire.

A write has the same tokens of every group of layers. A group with a window contributes only the pages that the target
has granted: the pages that tokens after the prompt can see.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from crossdock.kvtransfer.events import Failed, Figures, Reason, Released
from crossdock.kvtransfer.fence import Fence
from crossdock.kvtransfer.messages import (
    Abort,
    Grant,
    Hello,
    Offer,
    Pages,
    Stopped,
    TransferMessage,
    Wait,
)
from crossdock.kvtransfer.next_write import ReadyPages, TargetRank, WrongGrant, next_write
from crossdock.kvtransfer.protocol_outputs import ProtocolOutput, Send, Write
from crossdock.kvtransfer.records import GroupPages


@dataclass(slots=True, eq=False)
class _Delivery:
    """The part of a shipment that goes to one target rank."""

    target: TargetRank
    silent_until: float  # without a grant or a message by then, the peer is lost
    grant: Grant | None = None
    next_page: int = 0
    next_state: int = 0  # page of the recurrent state
    sequence: int = 0
    open_since: float | None = None  # when its open write began
    open_pages: int = 0  # in all groups
    open_bytes: int = 0
    num_pages: int = 0  # written
    is_heard: bool = False
    is_complete: bool = False  # the result has been delivered
    is_broken: bool = False  # one of its writes failed
    is_notified: bool = False  # the peer knows that the shipment has stopped, or is dead and need not know


@dataclass(slots=True, eq=False)
class _Shipment:
    """One epoch of one request on its way."""

    request: str
    epoch: int
    deadline_seconds: float
    began: float
    deliveries: dict[str, _Delivery]  # by peer
    groups: tuple[GroupPages, ...] = ()
    num_tokens: int = 0
    result: bytes | None = None  # set by finish
    state_pages: tuple[int, ...] = ()  # set by finish
    finished: float | None = None
    is_offered: bool = False
    num_offered: int = 0  # tokens of a prefix that the targets have asked for; 0: the prompt is computed here
    is_stopping: bool = False
    busy_since: float | None = None  # since when at least one write has been open, without a break
    figures: Figures = field(default_factory=Figures)


class Sender:
    """All shipments of one rank."""

    def __init__(self, rank: int, page_size: int, max_write_bytes: int) -> None:
        self.rank = rank
        self.page_size = page_size
        self.max_write_bytes = max_write_bytes
        self.num_unknown = 0  # messages about no shipment of this rank: late ones, mostly
        self._shipments: dict[tuple[str, int], _Shipment] = {}
        self._fence = Fence()
        self._out: list[ProtocolOutput] = []

    def __len__(self) -> int:
        return len(self._shipments)

    @property
    def next_deadline(self) -> float:
        """When `tick` may next have an output; infinity if never."""
        times = (at for shipment in self._shipments.values() for _, at, _ in _deadlines(shipment))
        return min(times, default=float("inf"))

    def peers(self) -> set[str]:
        """Return the targets of all shipments."""
        return {peer for shipment in self._shipments.values() for peer in shipment.deliveries}

    # -- the owner's calls -----------------------------------------------------------------------------------------

    def ship(
        self, request: str, epoch: int, targets: Mapping[str, TargetRank], deadline_seconds: float, now: float
    ) -> list[ProtocolOutput]:
        """Begin a shipment. An older epoch of the request that is still under way is stopped."""
        known = self._shipments.get((request, epoch))
        if known is not None and known.is_stopping:
            detail = "this epoch is still being stopped"
            self._out.append(Failed(request, epoch, True, Reason.SUPERSEDED, detail))  # `Released` will follow
            return self._flush()
        if known is not None:
            if known.deliveries.keys() != targets.keys():
                self._fail(known, Reason.SUPERSEDED, "this epoch is shipped to other targets already", now)
            return self._flush()
        if self._fence.has_ended(request, epoch):
            self._out.extend(Send(peer, self._ended(request, epoch)) for peer in targets)
            self._out.append(Failed(request, epoch, True, Reason.SUPERSEDED, "this epoch has ended"))
            self._out.append(Released(request, epoch, False, Figures()))
            return self._flush()
        for older in [shipment for shipment in self._shipments.values() if shipment.request == request]:
            self._stop(older, now)
        deliveries = {peer: _Delivery(target, now + deadline_seconds) for peer, target in targets.items()}
        self._shipments[request, epoch] = _Shipment(request, epoch, deadline_seconds, now, deliveries)
        self._out.extend(Send(peer, Hello(request, epoch)) for peer in deliveries)
        return self._flush()

    def offer(self, request: str, epoch: int, num_tokens: int = 0) -> list[ProtocolOutput]:
        """Notify the targets that this rank has pages for the request: they may grant pages now.

        `num_tokens`: of a prefix that the targets have asked for, those that are here."""
        shipment = self._shipments.get((request, epoch))
        if shipment and not shipment.is_stopping:
            shipment.is_offered = True
            shipment.num_offered = num_tokens
            for peer, delivery in shipment.deliveries.items():
                self._offer(shipment, peer, delivery)
        return self._flush()

    def chunk(self, request: str, groups: Sequence[GroupPages], num_tokens: int, now: float) -> list[ProtocolOutput]:
        """Note that `num_tokens` tokens of the request are computed and lie in the pages of `groups`. Write the full
        pages not sent yet."""
        for shipment in self._under_way(request):
            if shipment.finished is None:
                shipment.groups = tuple(groups)
                shipment.num_tokens = num_tokens
                self._advance(shipment, now)
        return self._flush()

    def finish(
        self,
        request: str,
        groups: Sequence[GroupPages],
        num_tokens: int,
        result: bytes,
        now: float,
        state_pages: tuple[int, ...] = (),
    ) -> list[ProtocolOutput]:
        """Note that the prompt is computed, and write the rest; the last tokens go with the end of `state_pages`, and
        with `result`."""
        for shipment in self._under_way(request):
            if shipment.finished is None:
                self._account(shipment, now)  # until now, writing was hidden behind computing
                shipment.groups = tuple(groups)
                shipment.num_tokens = num_tokens
                shipment.result = result
                shipment.state_pages = state_pages
                shipment.finished = now
                self._advance(shipment, now)
        return self._flush()

    def wait(self, request: str, epoch: int, seconds: float) -> list[ProtocolOutput]:
        """Notify the targets that the next chunk will take about `seconds`."""
        shipment = self._shipments.get((request, epoch))
        if shipment and not shipment.is_stopping:
            message = Wait(request, epoch, seconds, is_from_source=True)
            self._out.extend(Send(peer, message) for peer in shipment.deliveries)
        return self._flush()

    def cancel(self, request: str, epoch: int, now: float) -> list[ProtocolOutput]:
        """Stop writing. `Released` follows in any case: a cancel may cross the end of its transfer, and the caller
        waits for an answer."""
        shipment = self._shipments.get((request, epoch))
        if shipment is None:
            self._fence.end(request, epoch)
            self._out.append(Released(request, epoch, False, Figures()))
        else:
            self._stop(shipment, now)
        return self._flush()

    # -- what happens ----------------------------------------------------------------------------------------------

    def receive(self, peer: str, message: TransferMessage, now: float) -> list[ProtocolOutput]:
        """Take in a Grant, Wait or Abort from a target. A Wait is answered with the offer, which may have been lost."""
        shipment = self._shipments.get((message.request, message.epoch))
        delivery = shipment.deliveries.get(peer) if shipment else None
        if shipment is None or delivery is None:
            self.num_unknown += 1
            key = message.request, message.epoch
            if shipment is None and (isinstance(message, Abort) or self._fence.has_ended(*key)):
                # The target waits for this answer, or has not received it. The answer to an Abort is a promise, which
                # the fence keeps: ship() may still be called.
                self._out.append(Send(peer, self._ended(*key)))
                self._fence.end(*key)
            return self._flush()
        if not delivery.is_heard:
            delivery.is_heard = True
            if all(other.is_heard for other in shipment.deliveries.values()):
                shipment.figures.handshake_seconds = now - shipment.began
        match message:
            case Grant() if delivery.grant is None and not shipment.is_stopping:
                self._grant(shipment, peer, delivery, message, now)
            case Wait():
                delivery.silent_until = now + message.seconds + shipment.deadline_seconds
                self._offer(shipment, peer, delivery)
            case Abort():
                delivery.is_notified = False  # even after a notice, the target has not received that this rank stopped
                self._fail(shipment, Reason.PEER_STOPPED, f"{peer} aborted", now)
            case _:
                pass
        return self._flush()

    def write_done(self, request: str, epoch: int, peer: str, now: float) -> list[ProtocolOutput]:
        """Take in that the open write of a delivery is complete: its data and its message are at the target."""
        shipment, delivery = self._open_delivery(request, epoch, peer)
        shipment.figures.num_bytes += delivery.open_bytes
        delivery.num_pages += delivery.open_pages
        shipment.figures.num_pages = max(shipment.figures.num_pages, delivery.num_pages)
        if shipment.finished is None:
            shipment.figures.hidden_bytes += delivery.open_bytes
        self._close_write(shipment, delivery, now)
        self._advance(shipment, now)
        return self._flush()

    def write_failed(self, request: str, epoch: int, peer: str, detail: str, now: float) -> list[ProtocolOutput]:
        """Take in that the open write of a delivery has ended after an unknown part of its data: the peer is lost."""
        shipment, delivery = self._open_delivery(request, epoch, peer)
        delivery.is_broken = True
        self._close_write(shipment, delivery, now)
        self._fail(shipment, Reason.PEER_LOST, detail, now)
        return self._flush()

    def peer_lost(self, peer: str, is_dead: bool, detail: str, now: float) -> list[ProtocolOutput]:
        """Take in that the connection to `peer` broke. Its open writes stay open until the transport reports how each
        ended."""
        for shipment in [shipment for shipment in self._shipments.values() if peer in shipment.deliveries]:
            delivery = shipment.deliveries[peer]
            delivery.is_notified |= is_dead
            if not delivery.is_complete:
                self._fail(shipment, Reason.PEER_LOST, detail, now)
        return self._flush()

    def tick(self, now: float) -> list[ProtocolOutput]:
        """Fail shipments that are past a deadline. A write past its deadline stays open, and its pages in use."""
        for shipment in list(self._shipments.values()):
            for peer, at, overdue in _deadlines(shipment):
                if now >= at:
                    detail = f"{peer}: {overdue} for {shipment.deadline_seconds:.3g} s"
                    self._fail(shipment, Reason.DEADLINE, detail, now)
                    break
        return self._flush()

    # -- steps -----------------------------------------------------------------------------------------------------

    def _offer(self, shipment: _Shipment, peer: str, delivery: _Delivery) -> None:
        if shipment.is_offered and not shipment.is_stopping and delivery.grant is None:
            offer = Offer(shipment.request, shipment.epoch, delivery.target.num_sources, shipment.num_offered)
            self._out.append(Send(peer, offer))

    def _grant(self, shipment: _Shipment, peer: str, delivery: _Delivery, grant: Grant, now: float) -> None:
        if not delivery.target.may_grant(grant):
            detail = f"{peer} granted pages twice, beyond its pool, or of other groups of layers"
            self._fail(shipment, Reason.PROTOCOL, detail, now)
            return
        delivery.grant = grant
        delivery.next_page = grant.first_page
        if all(other.grant for other in shipment.deliveries.values()):
            shipment.figures.grant_wait_seconds = now - shipment.began
        self._advance(shipment, now)

    def _advance(self, shipment: _Shipment, now: float) -> None:
        """Begin the next write of every delivery that is ready, and end the shipment if every delivery is complete."""
        for peer, delivery in shipment.deliveries.items():
            is_idle = delivery.open_since is None and not delivery.is_complete
            if not shipment.is_stopping and delivery.grant and is_idle:
                self._write_next(shipment, peer, delivery, delivery.grant, now)
        self._end_if_done(shipment, now)

    def _write_next(self, shipment: _Shipment, peer: str, delivery: _Delivery, grant: Grant, now: float) -> None:
        is_finished = shipment.result is not None
        num_ready = (shipment.num_tokens + is_finished * (self.page_size - 1)) // self.page_size
        ready = ReadyPages(shipment.groups, num_ready, is_finished, shipment.state_pages)
        first = delivery.next_page
        target = delivery.target
        try:
            write = next_write(ready, grant, target, first, delivery.next_state, self.max_write_bytes)
        except WrongGrant as wrong:
            self._fail(shipment, Reason.PROTOCOL, f"{peer} granted {wrong}", now)
            return
        if write is None:
            return
        message = Pages(
            request=shipment.request,
            epoch=shipment.epoch,
            sequence=delivery.sequence,
            first_page=first,
            num_pages=write.end - first,
            num_tokens=shipment.num_tokens if write.is_last else write.end * self.page_size,
            source_rank=self.rank,
            num_sources=target.num_sources,
            result=shipment.result if write.is_last else None,
        )
        delivery.is_complete = write.is_last
        delivery.sequence += 1
        delivery.next_page = write.end
        delivery.next_state = write.state_end
        if not write.copies:
            self._out.append(Send(peer, message))
            return
        self._out.append(Write(peer, write.copies, message))
        self._account(shipment, now)
        delivery.open_since = now
        delivery.open_pages = write.num_pages
        delivery.open_bytes = write.num_bytes
        if shipment.busy_since is None:
            shipment.busy_since = now
        shipment.figures.num_writes += 1

    def _close_write(self, shipment: _Shipment, delivery: _Delivery, now: float) -> None:
        self._account(shipment, now)
        delivery.open_since = None
        if not any(other.open_since is not None for other in shipment.deliveries.values()):
            shipment.busy_since = None

    def _account(self, shipment: _Shipment, now: float) -> None:
        """Add the time since the last call to the figures. Call this before anything that changes how time counts."""
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
        deliveries = shipment.deliveries.items()
        if shipment.is_stopping:
            for peer, delivery in deliveries:
                if delivery.open_since is None and not delivery.is_notified:
                    delivery.is_notified = True
                    self._out.append(Send(peer, Stopped(*key, is_clean=not delivery.is_broken)))
        elif shipment.result is None or not all(delivery.is_complete for _, delivery in deliveries):
            return
        if key in self._shipments and all(delivery.open_since is None for _, delivery in deliveries):
            del self._shipments[key]
            self._fence.end(*key, is_broken=any(delivery.is_broken for _, delivery in deliveries))
            shipment.figures.total_seconds = now - shipment.began
            self._out.append(Released(*key, not shipment.is_stopping, shipment.figures))

    def _ended(self, request: str, epoch: int) -> Stopped:
        """Return the answer to a target that asks about a shipment that has ended or never began."""
        return Stopped(request, epoch, is_clean=not self._fence.may_be_broken(request, epoch))

    def _under_way(self, request: str) -> list[_Shipment]:
        return [found for found in self._shipments.values() if found.request == request and not found.is_stopping]

    def _open_delivery(self, request: str, epoch: int, peer: str) -> tuple[_Shipment, _Delivery]:
        shipment = self._shipments[request, epoch]
        delivery = shipment.deliveries[peer]
        assert delivery.open_since is not None, f"no write of {request} is open to {peer}"
        return shipment, delivery

    def _flush(self) -> list[ProtocolOutput]:
        out = self._out
        self._out = []
        return out


def _deadlines(shipment: _Shipment) -> Iterable[tuple[str, float, str]]:
    """Yield (peer, time, what is overdue then) for every delivery that waits for its peer."""
    if shipment.is_stopping:
        return
    for peer, delivery in shipment.deliveries.items():
        if delivery.grant is None:
            yield peer, delivery.silent_until, "neither a grant nor a wait"
        elif delivery.open_since is not None:
            yield peer, delivery.open_since + shipment.deadline_seconds, "a write has been open"
