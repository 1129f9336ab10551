"""One rank's end of all its transfers: a thread that owns the transport and drives a sender and a receiver.

Calls come in from any thread and return at once. Events go out through one callback, on the dock's thread. A caller's
error is raised at the call; anything that fails later is an event.

    prefill                                          decode
    ship(r, epoch, decode blobs)                     expect(r, epoch, prefill blobs)
    chunk(r, groups, num_tokens)  after every step   wait(r, epoch, seconds)   until there are pages, then
    finish(r, groups, num_tokens, result)             grant(r, epoch, first_page, groups)
      -> Granted, Released                             -> Committed ..., Arrived
      -> or Failed, Released                           -> or Failed, WriterStopped
"""

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from crossdock.kvtransfer.events import Event
from crossdock.kvtransfer.layout import IncompatiblePools, PoolSpec
from crossdock.kvtransfer.messages import MAX_BYTES, Abort, Grant, GroupPages, MalformedMessage, Wait, decode, encode
from crossdock.kvtransfer.next_write import TargetRank
from crossdock.kvtransfer.peers import Peers
from crossdock.kvtransfer.plan import bytes_by_group, plan_writes, source_ranks
from crossdock.kvtransfer.protocol_outputs import ProtocolOutput, Send, Write
from crossdock.kvtransfer.receiver import Receiver
from crossdock.kvtransfer.sender import Sender
from crossdock.kvtransfer.transport import (
    Memory,
    Peer,
    PeerLost,
    Received,
    Transport,
    TransportEvent,
    WriteDone,
    WriteFailed,
)

logger = logging.getLogger(__name__)

MAX_RESULT_BYTES = MAX_BYTES - 4096
_MAX_FAILED_POLLS = 20  # in a row: then the transport is beyond repair, and the dock ends
_FAILED_POLL_SECONDS = 0.1  # pause after a failed poll
_PAUSE_SHARE = 0.125
"""Pause between two polls while a transfer is open, as a share of the time since the last event. So an event is noticed
late by at most this share of the time it took to come, and a transfer whose prompt is still being computed costs few
polls. `python benchmarks/kvtransfer.py` measures both."""
_MAX_PAUSE_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class DockCounts:
    """Messages dropped since the dock was opened, and transfers under way now."""

    num_malformed: int  # messages that are damaged, or of another protocol
    num_unknown: int  # messages about a transfer or an epoch that is over, or never was
    num_open: int  # transfers, both directions
    num_open_writes: int


class Dock:
    """One rank's end of all its transfers.

    Opens `transport` for the pool at `memory`, which `spec` describes and the caller keeps alive. `role` begins the
    dock's name in logs ("prefill"). `on_event` is called on the dock's thread, in order, and must return soon: put the
    event in a queue. `grace_seconds` is how long after a peer's death one of its writes may still land.
    `max_write_bytes` bounds how long one transfer keeps others waiting.
    """

    def __init__(
        self,
        transport: Transport,
        memory: Memory,
        spec: PoolSpec,
        role: str,
        on_event: Callable[[Event], None],
        *,
        grace_seconds: float = 1.0,
        max_write_bytes: int = 32 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if memory.nbytes < spec.nbytes:
            raise ValueError(f"memory has {memory.nbytes} bytes; {spec.num_pages} pages need {spec.nbytes}")
        self.name = f"{role}-{uuid.uuid4().hex}"
        self.spec = spec
        self._transport = transport
        self._on_event = on_event
        self._clock = clock
        self.blob = Peer(self.name, transport.kind, transport.open(self.name, memory), spec).pack()
        """The blob that the other side's `ship` or `expect` needs to reach this dock."""
        self._sender = Sender(spec.rank, spec.page_size, max_write_bytes)
        self._receiver = Receiver(spec.page_size, self.blob, grace_seconds)
        self._peers = Peers(transport, spec)
        self._writes: dict[int, tuple[str, int, str]] = {}  # request, epoch, peer
        self._calls: deque[Callable[[float], list[ProtocolOutput]]] = deque()
        self._num_malformed = 0
        self._num_failed_polls = 0
        self._counts = DockCounts(0, 0, 0, 0)
        self._is_closing = False
        self._error: BaseException | None = None
        self._last_event_at = clock()
        self._thread = threading.Thread(target=self._run, name=f"dock {role}", daemon=True)
        self._thread.start()

    # -- sending ---------------------------------------------------------------------------------------------------

    def ship(self, request: str, epoch: int, peers: Sequence[bytes], deadline_seconds: float) -> None:
        """Begin to send `request` to the replica whose ranks' blobs are `peers`. Ends with one `Released`.

        `deadline_seconds` is how long the target may be silent before it grants (its `wait` extends that), and how
        long one write may take. An older epoch still under way is stopped, and released when its writes end.

        Raises:
            IncompatiblePools: the pools cannot exchange pages; the message shows both.
            ValueError: a blob is of another transport, or of no dock.
        """
        targets = {}
        for peer in self._peers.unpack(peers):
            page_bytes = bytes_by_group(plan_writes(self.spec, peer.spec))
            if any(page_bytes):
                num_sources = len(source_ranks(self.spec, peer.spec))
                rank = TargetRank(peer.spec.num_pages, page_bytes, num_sources, has_state=bool(peer.spec.state))
                targets[peer.name] = peer, rank

        def call(now: float) -> list[ProtocolOutput]:
            self._peers.meet((peer for peer, _ in targets.values()), self._busy)
            wanted = {name: target for name, (_, target) in targets.items()}
            return self._sender.ship(request, epoch, wanted, deadline_seconds, now) + self._lose_dead(targets, now)

        self._call(call)

    def offer(self, request: str, epoch: int) -> None:
        """Notify the target that there are pages for the whole prompt here: it may grant pages now."""
        self._call(lambda _: self._sender.offer(request, epoch))

    def chunk(self, request: str, groups: Sequence[GroupPages], num_tokens: int) -> None:
        """Send what is new of the first `num_tokens` tokens of `request`, which lie in the pages of `groups`.

        Pages that tokens after the prompt can see must stay untouched until `Released`. Without a `ship` under way this
        does nothing."""
        groups = self._checked(groups, num_tokens)
        self._call(lambda now: self._sender.chunk(request, groups, num_tokens, now))

    def finish(
        self,
        request: str,
        groups: Sequence[GroupPages],
        num_tokens: int,
        result: bytes = b"",
        state_pages: Sequence[int] = (),
    ) -> None:
        """Send the rest, as `chunk` does, with the partial page, the recurrent state in `state_pages` and `result`. No
        more chunks will come.

        The target finds `result` (at most MAX_RESULT_BYTES) in `Arrived`; of several source ranks, that of the lowest.
        After another `ship` of the same request, for example to a second target, call this again."""
        if len(result) > MAX_RESULT_BYTES:
            raise ValueError(f"result has {len(result)} bytes; at most {MAX_RESULT_BYTES} can be sent")
        groups, state, now = self._checked(groups, num_tokens), self._checked_state(state_pages), self._clock()
        # The time of this call, not of its turn on the thread: with CMA the thread may be inside a write, which was
        # hidden behind computing until now.
        self._call(lambda _: self._sender.finish(request, groups, num_tokens, result, now, state))

    def cancel_ship(self, request: str, epoch: int) -> None:
        """Stop writing. `Released` follows in any case, as soon as no write is open; it may come twice."""
        self._call(lambda now: self._sender.cancel(request, epoch, now))

    # -- receiving -------------------------------------------------------------------------------------------------

    def expect(self, request: str, epoch: int, peers: Sequence[bytes], deadline_seconds: float) -> None:
        """Expect `request` from the replica whose ranks' blobs are `peers`. Call `grant` when there is room for it.

        Grant after `Offered` alone: a request that waits for pages at its source while it holds pages here can wait
        for ever, for requests that do the opposite.

        After the grant, each source may be silent for `deadline_seconds`: that must cover the computation of a chunk,
        unless the source sends a `wait`.

        Raises:
            IncompatiblePools: the pools cannot exchange pages, or a rank that must write here has no blob in `peers`.
            ValueError: a blob is of another transport, or of no dock.
        """
        sources: dict[str, tuple[Peer, tuple[int, ...]]] = {}
        unpacked = self._peers.unpack(peers)
        for peer in unpacked:
            page_bytes = bytes_by_group(plan_writes(peer.spec, self.spec))
            if any(page_bytes):
                sources[peer.name] = peer, page_bytes
        wanted = source_ranks(unpacked[0].spec, self.spec)
        if sorted(peer.spec.rank for peer, _ in sources.values()) != list(wanted):
            raise IncompatiblePools(f"ranks {wanted} write to this one; blobs of {len(unpacked)} were given")

        def call(now: float) -> list[ProtocolOutput]:
            self._peers.meet((peer for peer, _ in sources.values()), self._busy)
            ranks = {name: (peer.spec.rank, page_bytes) for name, (peer, page_bytes) in sources.items()}
            return self._receiver.expect(request, epoch, ranks, deadline_seconds, now) + self._lose_dead(sources, now)

        self._call(call)

    def grant(
        self,
        request: str,
        epoch: int,
        first_page: int,
        groups: Sequence[GroupPages],
        state_pages: Sequence[int] = (),
    ) -> None:
        """Grant pages for the prompt of `request`, except for the first `first_page` pages, which are here, and for its
        recurrent state.

        They belong to the writer until `Arrived`, or until `WriterStopped` after a failure."""
        pages = [page for group in groups for page in group.pages] + [*state_pages]
        if len(set(pages)) != len(pages) or not all(0 <= p < self.spec.num_pages for p in pages):
            raise ValueError(f"pages must be different ones within 0 and {self.spec.num_pages - 1}, not {pages}")
        if len(groups) != self.spec.num_groups or not all(group.first >= first_page >= 0 for group in groups):
            raise ValueError(f"pages of {self.spec.num_groups} groups from {first_page} on are needed, not {groups}")
        groups, state = tuple(groups), self._checked_state(state_pages)
        self._call(lambda now: self._receiver.grant(request, epoch, first_page, groups, now, state))

    def cancel_expect(self, request: str, epoch: int) -> None:
        """Stop expecting. `WriterStopped` follows in any case, when that is safe; it may come twice. Until then, give
        the granted pages to no other request."""
        self._call(lambda now: self._receiver.cancel(request, epoch, now))

    # -- either ----------------------------------------------------------------------------------------------------

    def wait(self, request: str, epoch: int, seconds: float) -> None:
        """Notify the other side that about `seconds` will pass before the grant, or before the next chunk."""
        seconds = min(max(0.0, float(seconds)), 86_400.0)
        self._call(
            lambda now: self._receiver.wait(request, epoch, seconds, now) + self._sender.wait(request, epoch, seconds)
        )

    def peer_dead(self, blob: bytes) -> None:
        """Note that the process behind `blob` is dead. Its transfers fail; the pages it was writing to are out of its
        reach after the grace period, and the pages that were being written to it are released."""
        name = Peer.unpack(blob).name

        def call(now: float) -> list[ProtocolOutput]:
            self._peers.note_death(name)
            return self._lose_dead([name], now)

        self._call(call)

    @property
    def is_alive(self) -> bool:
        """Whether the dock has not failed. May be called from any thread."""
        return self._error is None

    def counts(self) -> DockCounts:
        """Return the counts as of the thread's latest turn. May be called from any thread.

        Raises:
            RuntimeError: the dock has failed.
        """
        if self._error:
            raise RuntimeError("the dock is closed") from self._error
        return self._counts

    def drain(self, timeout: float) -> bool:
        """Wait until no transfer is under way, at most `timeout` seconds. Return whether that was reached."""
        end = time.monotonic() + timeout
        while self._calls or self._counts.num_open:
            if time.monotonic() > end or not self._thread.is_alive():
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        """End the thread and the transport. Transfers under way end without an event."""
        self._is_closing = True
        self._transport.wake()
        self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _call(self, call: Callable[[float], list[ProtocolOutput]]) -> None:
        if self._error or self._is_closing:
            raise RuntimeError("the dock is closed") from self._error
        self._calls.append(call)
        self._transport.wake()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except BaseException as error:  # the owner's next call raises it: no failure stays silent
            logger.exception("the dock %s has failed", self.name)
            self._error = error
        finally:
            self._transport.close()

    def _turn(self) -> None:
        events = self._poll()
        if events or self._calls:
            self._last_event_at = self._clock()
        while self._calls:
            self._perform(self._calls[0](self._clock()))
            self._calls.popleft()  # only now: `drain` sees the call or the transfer that it began
        for event in events:
            self._perform(self._handle(event, self._clock()))
        # Arrivals come before deadlines: a process that was stopped for a while must not blame others for its silence.
        now = self._clock()
        if now >= self._next_deadline():
            self._perform(self._sender.tick(now) + self._receiver.tick(now))

    def _poll(self) -> Sequence[TransportEvent]:
        """Poll the transport. A poll may fail for a passing reason; raises what many polls in a row raise."""
        try:
            events = self._transport.poll(self._poll_seconds())
        except Exception:
            self._num_failed_polls += 1
            if self._num_failed_polls == _MAX_FAILED_POLLS:
                raise
            if self._num_failed_polls == 1:
                logger.exception("%s could not be polled; it is tried again", self.name)
            time.sleep(_FAILED_POLL_SECONDS)
            return ()
        self._num_failed_polls = 0
        return events

    def _next_deadline(self) -> float:
        return min(self._sender.next_deadline, self._receiver.next_deadline)

    def _poll_seconds(self) -> float:
        """Return how long the next poll may block."""
        if self._calls:
            return 0.0
        if not self._counts.num_open:
            return self._transport.idle_seconds
        # A transfer is open for as long as its prompt is computed, and silent for most of that time.
        now = self._clock()
        pause = min((now - self._last_event_at) * _PAUSE_SHARE, _MAX_PAUSE_SECONDS)
        return min(max(self._transport.busy_seconds, pause), max(0.0, self._next_deadline() - now))

    def _count(self) -> None:
        num_unknown = self._sender.num_unknown + self._receiver.num_unknown
        num_open = len(self._sender) + len(self._receiver)
        self._counts = DockCounts(self._num_malformed, num_unknown, num_open, len(self._writes))

    def _handle(self, event: TransportEvent, now: float) -> list[ProtocolOutput]:
        match event:
            case Received(peer, data):
                return self._receive(peer, data, now)
            case WriteDone(number) if number in self._writes:
                return self._sender.write_done(*self._writes.pop(number), now)
            case WriteFailed(number, detail) if number in self._writes:
                return self._sender.write_failed(*self._writes.pop(number), detail, now)
            case PeerLost(peer, detail):
                return self._lose(peer, self._transport.lost_is_fence, detail, now)
            case _:
                return []  # the end of a write that was reported as failed when it began

    def _receive(self, peer: str, data: bytes, now: float) -> list[ProtocolOutput]:
        try:
            message = decode(data)
            if isinstance(message, Abort) and peer not in self._peers:
                self._peers.introduce(peer, message.blob, self._busy)
            if isinstance(message, Grant | Abort) or (isinstance(message, Wait) and not message.is_from_source):
                return self._sender.receive(peer, message, now)
            return self._receiver.receive(peer, message, now)
        except Exception as error:  # of any kind: no message of another process may end this dock
            self._num_malformed += 1
            is_bug = not isinstance(error, MalformedMessage | ValueError)
            logger.warning("dropped a message of %s: %s", peer, error, exc_info=is_bug)
            return []

    def _lose(self, peer: str, is_dead: bool, detail: str, now: float) -> list[ProtocolOutput]:
        self._peers.disconnect(peer, is_idle=peer not in self._busy())
        lost = self._sender.peer_lost(peer, is_dead, detail, now)
        return lost + self._receiver.peer_lost(peer, is_dead, detail, now)

    def _lose_dead(self, names: Iterable[str], now: float) -> list[ProtocolOutput]:
        """Lose those of the peers that are known to be dead. A transfer may begin after its peer's death is known."""
        lost = (self._lose(name, True, f"{name} is dead", now) for name in self._peers.bury(names))
        return [output for outputs in lost for output in outputs]

    def _busy(self) -> set[str]:
        """Return the names of the peers of all transfers under way."""
        return self._sender.peers() | self._receiver.peers()

    def _perform(self, outputs: Sequence[ProtocolOutput]) -> None:
        for output in outputs:
            match output:
                case Send(peer, message):
                    try:
                        self._peers.connect(peer)
                        self._transport.send(peer, encode(message))
                    except Exception:  # as if the message had been lost, which every transfer survives
                        logger.exception("a message to %s was not sent", peer)
                case Write():
                    self._write(output)
                case _:
                    self._on_event(output)
        self._count()

    def _write(self, write: Write) -> None:
        peer, message = write.peer, write.message
        try:
            self._peers.connect(peer)
            number = self._transport.write(peer, write.copies, encode(message))
        except Exception as error:
            logger.exception("a write to %s did not begin", peer)
            self._peers.disconnect(peer, is_idle=False)  # whatever has begun of it
            detail, now = f"{type(error).__name__}: {error}", self._clock()
            self._perform(self._sender.write_failed(message.request, message.epoch, peer, detail, now))
        else:
            self._writes[number] = message.request, message.epoch, peer

    # -- arguments -------------------------------------------------------------------------------------------------

    def _checked(self, groups: Sequence[GroupPages], num_tokens: int) -> tuple[GroupPages, ...]:
        end = min((group.end for group in groups), default=0)
        if not 0 <= num_tokens <= end * self.spec.page_size:
            raise ValueError(f"num_tokens must be within {end} pages of {self.spec.page_size}, not {num_tokens}")
        if len(groups) != self.spec.num_groups:
            raise ValueError(f"pages of {self.spec.num_groups} groups of layers are needed, not of {len(groups)}")
        if not all(0 <= page < self.spec.num_pages for group in groups for page in group.pages):
            raise ValueError(f"pages must be within 0 and {self.spec.num_pages - 1}, not {groups}")
        return tuple(groups)

    def _checked_state(self, pages: Sequence[int]) -> tuple[int, ...]:
        if bool(self.spec.state) != bool(len(pages)):
            raise ValueError(f"the recurrent state is {self.spec.state or 'none'}; its pages are {[*pages]}")
        if not all(0 <= page < self.spec.num_pages for page in pages):
            raise ValueError(f"pages must be within 0 and {self.spec.num_pages - 1}, not {[*pages]}")
        return tuple(pages)
