"""The target's side of all transfers: what has arrived without gaps, and when no writer can reach granted pages.

Sans-IO, like the sender. The commit frontier is the number of tokens that every source rank has delivered in an
unbroken sequence, in all groups of layers; it only grows. A transfer that ends early keeps its pages until each source
has reported that it stopped, or is dead and a grace period is over: a write on its way cannot be called back. A message
may be lost with its connection, so a source is asked to stop again and again until it has answered.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from crossdock.kvtransfer.events import Arrived, Committed, Failed, Figures, Offered, Reason, WriterStopped
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
from crossdock.kvtransfer.protocol_outputs import ProtocolOutput, Send
from crossdock.kvtransfer.records import GroupPages

_MAX_EARLY = 64
"""Messages that may wait for an earlier one. A source has one write open at a time: if more wait, a message is lost."""
_FIRST_REPEAT_S = 0.5
"""Seconds until an unanswered Abort is repeated. The pause doubles with every repetition."""
_MAX_REPEAT_S = 30.0

_MAX_OFFERED = 4096
"""Transfers whose offers are remembered, also before they are expected. A forgotten offer is repeated after a Wait."""


@dataclass(slots=True, eq=False)
class _SourceRank:
    """One rank that writes to this one."""

    rank: int
    page_bytes: tuple[int, ...]  # bytes that the rank writes of each page, see `TargetRank`
    silent_until: float = float("inf")
    next_page: int = 0
    next_sequence: int = 0
    num_pages: int = 0  # pages of which it has written a part
    early: dict[int, Pages] = field(default_factory=dict)  # messages that came before one of a lower sequence number
    num_tokens: int = 0
    is_heard: bool = False
    is_complete: bool = False
    stops_at: float | None = None  # from then on it writes no more
    repeat_at: float = float("inf")  # when to repeat an Abort that it has not answered
    repeat_pause: float = _FIRST_REPEAT_S

    @property
    def may_write(self) -> bool:
        """Whether the rank may still write: its last pages, its stop and the news of its death have not come."""
        return self.stops_at is None and not self.is_complete


@dataclass(slots=True, eq=False)
class _Expectation:
    """One epoch of one request that is expected."""

    request: str
    epoch: int
    deadline_seconds: float
    began: float
    sources: dict[str, _SourceRank]  # by peer
    grant: Grant | None = None
    wait_until: float | None = None
    num_tokens: int = 0  # the commit frontier
    result: bytes | None = None
    is_stopping: bool = False
    figures: Figures = field(default_factory=Figures)


class Receiver:
    """All transfers to one rank. `blob` is what a source needs to answer this rank."""

    def __init__(self, page_size: int, blob: bytes, grace_seconds: float) -> None:
        self.page_size = page_size
        self.blob = blob
        self.grace_seconds = grace_seconds
        self.num_unknown = 0  # messages about nothing that is expected: of ended epochs, mostly
        self._expected: dict[tuple[str, int], _Expectation] = {}
        self._offers: OrderedDict[tuple[str, int], set[str]] = OrderedDict()  # the sources that have offered, by key
        self._fence = Fence()
        self._out: list[ProtocolOutput] = []

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def next_deadline(self) -> float:
        """When `tick` may next have an output; infinity if never."""
        return min((at for expected in self._expected.values() for at in _deadlines(expected)), default=float("inf"))

    def peers(self) -> set[str]:
        """Return the sources of everything that is expected."""
        return {peer for expected in self._expected.values() for peer in expected.sources}

    # -- the owner's calls -----------------------------------------------------------------------------------------

    def expect(
        self,
        request: str,
        epoch: int,
        sources: Mapping[str, tuple[int, tuple[int, ...]]],
        deadline_seconds: float,
        now: float,
    ) -> list[ProtocolOutput]:
        """Expect this request from `sources`: their names, each with (rank, bytes it writes of each page by group).
        An older epoch of the request that is still expected is cancelled."""
        known = self._expected.get((request, epoch))
        if known is not None and known.is_stopping:
            detail = "this epoch is still being stopped"
            self._out.append(Failed(request, epoch, False, Reason.SUPERSEDED, detail))  # `WriterStopped` will follow
            return self._flush()
        if known is not None:
            if known.sources.keys() != sources.keys():
                self._fail(known, Reason.SUPERSEDED, "this epoch is expected from other sources already", now)
            return self._flush()
        if self._fence.has_ended(request, epoch):
            self._out.append(Failed(request, epoch, False, Reason.SUPERSEDED, "this epoch has ended"))
            self._out.append(WriterStopped(request, epoch))
            return self._flush()
        for older in [expected for expected in self._expected.values() if expected.request == request]:
            self._stop(older, now)
        self._expected[request, epoch] = _Expectation(
            request, epoch, deadline_seconds, now, {name: _SourceRank(*source) for name, source in sources.items()}
        )
        if (request, epoch) not in self._offers:  # else they have begun, and their offers have come
            self._wait(self._expected[request, epoch], deadline_seconds, now)
        return self._flush()

    def wait(self, request: str, epoch: int, seconds: float, now: float) -> list[ProtocolOutput]:
        """Notify the sources that the grant will take about `seconds`."""
        expected = self._expected.get((request, epoch))
        if expected and expected.grant is None and not expected.is_stopping:
            self._wait(expected, seconds, now)
        return self._flush()

    def grant(
        self,
        request: str,
        epoch: int,
        first_page: int,
        groups: Sequence[GroupPages],
        now: float,
        state_pages: tuple[int, ...] = (),
    ) -> list[ProtocolOutput]:
        """Grant the pages of `groups` for all but the first `first_page` pages, which are here, and `state_pages` for
        the recurrent state. From now on sources have a deadline."""
        expected = self._expected.get((request, epoch))
        if expected and expected.grant is None and not expected.is_stopping:
            expected.grant = Grant(request, epoch, first_page, tuple(groups), state_pages)
            expected.num_tokens = first_page * self.page_size
            expected.figures.grant_wait_seconds = now - expected.began
            for source in expected.sources.values():
                source.next_page = first_page
                source.num_tokens = expected.num_tokens
                source.silent_until = now + expected.deadline_seconds
            self._send_all(expected, expected.grant)
        return self._flush()

    def cancel(self, request: str, epoch: int, now: float) -> list[ProtocolOutput]:
        """Stop expecting. `WriterStopped` follows in any case, even if nothing is expected (any more)."""
        expected = self._expected.get((request, epoch))
        if expected is None:
            self._fence.end(request, epoch)
            self._out.append(WriterStopped(request, epoch))
        else:
            self._stop(expected, now)
        return self._flush()

    # -- what happens ----------------------------------------------------------------------------------------------

    def grant_of(self, peer: str, message: Pages) -> Grant | None:
        """Return the grant of the transfer that a message of `peer` belongs to; None: no pages are awaited."""
        expected = self._expected.get((message.request, message.epoch))
        if expected is None or expected.is_stopping or peer not in expected.sources:
            return None
        return expected.grant

    def receive(
        self, peer: str, message: TransferMessage, now: float, *, is_intact: bool = True
    ) -> list[ProtocolOutput]:
        """Take in a Hello, Offer, Wait, Stopped or Pages from a source. `is_intact`: False: the pages of a Pages did
        not arrive as they were sent. Then the transfer fails, and what came before stays valid."""
        key = message.request, message.epoch
        expected = self._expected.get(key)
        source = expected.sources.get(peer) if expected else None
        if isinstance(message, Offer) and (source is not None or expected is None) and not self._fence.has_ended(*key):
            self._take_offer(peer, message)
        if expected is None or source is None:
            if isinstance(message, Hello | Offer) and self._fence.has_ended(*key):
                self._out.append(Send(peer, Abort(*key, self.blob)))
            elif not isinstance(message, Hello | Offer):  # these may come early: the source may start first
                self.num_unknown += 1
            return self._flush()
        if not source.is_heard:
            source.is_heard = True
            if all(other.is_heard for other in expected.sources.values()):
                expected.figures.handshake_seconds = now - expected.began
        if expected.grant:
            source.silent_until = now + expected.deadline_seconds
        match message:
            case Hello():
                self._answer(expected, peer, now)
            case Wait():
                source.silent_until += message.seconds
            case Stopped() if not source.is_complete:  # else this crossed its last pages, and answers an older message
                stops_at = now + (0.0 if message.is_clean else self.grace_seconds)
                source.stops_at = max(stops_at, source.stops_at or 0.0)  # a repeated answer cuts no grace period short
                self._fail(expected, Reason.PEER_STOPPED, f"{peer} stopped", now)
            case Pages() if not (is_intact or expected.is_stopping):
                pages = f"{message.num_pages} pages from {message.first_page} on"
                self._fail(expected, Reason.CHECKSUM, f"{pages} did not arrive as {peer} sent them", now)
            case Pages() if not expected.is_stopping:
                self._arrive(expected, peer, source, message, now)
            case _:
                pass
        return self._flush()

    def peer_lost(self, peer: str, is_dead: bool, detail: str, now: float) -> list[ProtocolOutput]:
        """Take in that no message reaches `peer`. The peer may still write, unless `is_dead`."""
        for expected in [expected for expected in self._expected.values() if peer in expected.sources]:
            source = expected.sources[peer]
            if is_dead and source.stops_at is None:
                source.stops_at = now + self.grace_seconds
            if not source.is_complete:
                self._fail(expected, Reason.PEER_LOST, detail, now)
        return self._flush()

    def tick(self, now: float) -> list[ProtocolOutput]:
        """Fail transfers that are past a deadline, and end those whose dead writers can no longer reach the pages."""
        for expected in list(self._expected.values()):
            late = [peer for peer, each in expected.sources.items() if each.may_write and now >= each.silent_until]
            if late and not expected.is_stopping:
                detail = f"{', '.join(late)}: no pages for {expected.deadline_seconds:.3g} s"
                self._fail(expected, Reason.DEADLINE, detail, now)
            for peer, source in expected.sources.items():
                if expected.is_stopping and source.may_write and now >= source.repeat_at:
                    self._abort(expected, peer, source, now)
            self._end_if_stopped(expected, now)
        return self._flush()

    def _take_offer(self, peer: str, offer: Offer) -> None:
        key = offer.request, offer.epoch
        offers = self._offers.setdefault(key, set())
        offers.add(peer)
        if len(offers) == offer.num_sources:
            self._out.append(Offered(*key, offer.num_tokens))
        while len(self._offers) > _MAX_OFFERED:
            self._offers.popitem(last=False)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _answer(self, expected: _Expectation, peer: str, now: float) -> None:
        """Answer a source that began after this target: it may have missed earlier messages."""
        key = expected.request, expected.epoch
        if expected.is_stopping:
            self._out.append(Send(peer, Abort(*key, self.blob)))
        elif expected.grant:
            self._out.append(Send(peer, expected.grant))
        elif expected.wait_until is not None:
            self._out.append(Send(peer, Wait(*key, max(0.0, expected.wait_until - now), is_from_source=False)))

    def _arrive(self, expected: _Expectation, peer: str, source: _SourceRank, message: Pages, now: float) -> None:
        """Take in pages, in the order of their sequence numbers."""
        is_known = message.source_rank == source.rank and message.num_sources == len(expected.sources)
        if not is_known or not expected.grant or len(source.early) >= _MAX_EARLY:
            self._fail(expected, Reason.PROTOCOL, f"{peer} wrote what it may not: {message}", now)
            return
        source.early.setdefault(message.sequence, message)
        while (following := source.early.pop(source.next_sequence, None)) is not None:
            source.next_sequence += 1
            end = following.first_page + following.num_pages
            if (
                source.is_complete
                or following.first_page != source.next_page
                or end > expected.grant.end
                or following.num_tokens > max(end * self.page_size, source.num_tokens)
            ):
                self._fail(expected, Reason.PROTOCOL, f"{peer} wrote pages out of order: {following}", now)
                return
            source.next_page = end
            source.num_tokens = max(source.num_tokens, following.num_tokens)
            _count(expected, source, expected.grant, following)
            expected.figures.num_pages = max(expected.figures.num_pages, source.num_pages)
            expected.figures.num_writes += 1
            if following.result is not None:
                source.is_complete, source.silent_until = True, float("inf")
                if source.rank == min(other.rank for other in expected.sources.values()):
                    expected.result = following.result
        self._commit(expected, now)

    def _commit(self, expected: _Expectation, now: float) -> None:
        """Move the commit frontier, and end the transfer if every source has delivered everything."""
        key = expected.request, expected.epoch
        num_tokens = min(source.num_tokens for source in expected.sources.values())
        if num_tokens > expected.num_tokens:
            expected.num_tokens = num_tokens
            self._out.append(Committed(*key, num_tokens))
        if all(source.is_complete for source in expected.sources.values()):
            assert expected.result is not None
            self._forget(key)
            expected.figures.total_seconds = now - expected.began
            self._out.append(Arrived(*key, num_tokens, expected.result, expected.figures))

    def _fail(self, expected: _Expectation, reason: Reason, detail: str, now: float) -> None:
        if not expected.is_stopping:
            self._out.append(Failed(expected.request, expected.epoch, False, reason, detail))
            self._stop(expected, now)
        else:
            self._end_if_stopped(expected, now)

    def _stop(self, expected: _Expectation, now: float) -> None:
        if not expected.is_stopping:
            expected.is_stopping = True
            for peer, source in expected.sources.items():
                if source.may_write:
                    self._abort(expected, peer, source, now)
        self._end_if_stopped(expected, now)

    def _abort(self, expected: _Expectation, peer: str, source: _SourceRank, now: float) -> None:
        """Ask a source to stop, and repeat that later: this message or its answer may be lost."""
        self._out.append(Send(peer, Abort(expected.request, expected.epoch, self.blob)))
        source.repeat_at = now + source.repeat_pause
        source.repeat_pause = min(2 * source.repeat_pause, _MAX_REPEAT_S)

    def _end_if_stopped(self, expected: _Expectation, now: float) -> None:
        """End a stopping transfer once no source can write: each has delivered everything or has stopped, or no pages
        were granted."""
        key = expected.request, expected.epoch
        is_over = expected.grant is None or all(
            source.is_complete or (source.stops_at is not None and source.stops_at <= now)
            for source in expected.sources.values()
        )
        if expected.is_stopping and is_over and key in self._expected:
            self._forget(key)
            self._out.append(WriterStopped(*key))

    def _wait(self, expected: _Expectation, seconds: float, now: float) -> None:
        expected.wait_until = now + seconds
        self._send_all(expected, Wait(expected.request, expected.epoch, seconds, is_from_source=False))

    def _forget(self, key: tuple[str, int]) -> None:
        del self._expected[key]
        self._offers.pop(key, None)
        self._fence.end(*key)

    def _send_all(self, expected: _Expectation, message: TransferMessage) -> None:
        self._out.extend(Send(peer, message) for peer in expected.sources)

    def _flush(self) -> list[ProtocolOutput]:
        out = self._out
        self._out = []
        return out


def _count(expected: _Expectation, source: _SourceRank, grant: Grant, message: Pages) -> None:
    """Add what a message says was written to the figures."""
    end = message.first_page + message.num_pages
    counts = [max(end - max(message.first_page, group.first), 0) for group in grant.groups]
    counts.append(len(grant.state_pages) if message.result is not None else 0)
    for size, num_pages in zip(source.page_bytes, counts, strict=False):  # without a state there is no size for it
        expected.figures.num_bytes += num_pages * size
        source.num_pages += num_pages if size else 0


def _deadlines(expected: _Expectation) -> Iterable[float]:
    """Yield the times at which `tick` may have something to do."""
    writers = [source for source in expected.sources.values() if source.may_write]
    if not expected.is_stopping:
        yield from (source.silent_until for source in expected.sources.values() if not source.is_complete)
    elif writers:
        yield from (source.repeat_at for source in writers)
    else:
        yield max(source.stops_at for source in expected.sources.values() if source.stops_at is not None)
