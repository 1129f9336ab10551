"""One rank's end of all its transfers: a thread that owns the transport and drives a sender and a receiver with it.

Calls come in from any thread and return at once; events go out through one callback, on the dock's thread. Errors of
the caller are raised where the call is made; whatever goes wrong later is an event.

    prefill                                          decode
    ship(r, epoch, decode blobs)                     expect(r, epoch, prefill blobs)
    chunk(r, pages, num_tokens)  after every step    wait(r, epoch, seconds)   until there are pages, then
    finish(r, pages, num_tokens, state)              grant(r, epoch, first_page, pages)
      -> Granted, Released                             -> Committed ..., Arrived
      -> or Failed, Released                           -> or Failed, WriterStopped
"""

import logging
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from crossdock.kvtransfer.events import Event
from crossdock.kvtransfer.layout import IncompatiblePools, PoolSpec, check_compatible
from crossdock.kvtransfer.messages import MAX_BYTES, Abort, Grant, MalformedMessage, Wait, decode, encode
from crossdock.kvtransfer.plan import plan_writes, source_ranks
from crossdock.kvtransfer.receiver import Receiver
from crossdock.kvtransfer.sender import Output, Send, Sender, Target, Write
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

MAX_STATE_BYTES = MAX_BYTES - 4096
_MOST_DEAD = 1024  # peers remembered
_CALM = 0.125  # of the time that nothing has happened, how long nobody looks: what then comes is late by so much of it
_MOST_CALM_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class DockCounts:
    """Dropped messages since the dock was opened, and what is under way now."""

    num_malformed: int  # not ours, or damaged
    num_unknown: int  # about a transfer or an epoch that is over, or never was
    num_open: int  # transfers, both directions
    num_open_writes: int


class Dock:
    """Opens `transport` for the pool at `memory`, which `spec` describes and the caller keeps alive.

    `role` begins the dock's name, for people ("prefill"). `on_event` is called on the dock's thread, in order, and must
    return soon: put the event in a queue. `grace_seconds` is how long after a peer's death one of its writes might
    still land. `max_write_bytes` bounds how long one transfer keeps others waiting.
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
        """What the other side's `ship` or `expect` needs to reach this dock."""
        self._sender = Sender(spec.rank, spec.page_size, max_write_bytes)
        self._receiver = Receiver(spec.page_size, self.blob, grace_seconds)
        self._peers: dict[str, Peer] = {}
        self._connected: set[str] = set()
        self._dead: OrderedDict[str, None] = OrderedDict()  # the names of processes that have ended
        self._writes: dict[int, tuple[str, int, str]] = {}  # request, epoch, peer
        self._calls: deque[Callable[[float], list[Output]]] = deque()
        self._num_malformed = 0
        self._counts = DockCounts(0, 0, 0, 0)
        self._is_closing = False
        self._error: BaseException | None = None
        self._stirred = clock()  # when something last happened
        self._thread = threading.Thread(target=self._run, name=f"dock {role}", daemon=True)
        self._thread.start()

    # -- sending ---------------------------------------------------------------------------------------------------

    def ship(self, request: str, epoch: int, peers: Sequence[bytes], deadline_seconds: float) -> None:
        """Begins to send `request` to the replica whose ranks' blobs are `peers`. Ends with one `Released`.

        `deadline_seconds` is how long the target may be silent before it grants (a `wait` of its extends that), and
        how long one write may take. An older epoch still under way is stopped, and released when its writes end.
        Raises IncompatiblePools, with both pools printed; ValueError for blobs of another transport.
        """
        targets = {}
        for peer in self._unpack(peers):
            ranges = plan_writes(self.spec, peer.spec)
            if ranges:
                page_bytes = sum(part.length for part in ranges)
                num_sources = len(source_ranks(self.spec, peer.spec))
                targets[peer.name] = peer, Target(peer.spec.num_pages, page_bytes, num_sources)

        def call(now: float) -> list[Output]:
            self._peers.update({name: peer for name, (peer, _) in targets.items()})
            wanted = {name: target for name, (_, target) in targets.items()}
            shipped = self._sender.ship(request, epoch, wanted, deadline_seconds, now)
            return shipped + self._lose_again(targets, now)

        self._call(call)

    def chunk(self, request: str, pages: Sequence[int], num_tokens: int) -> None:
        """The first `num_tokens` tokens of `request` now lie in `pages`, in order: from the first, not only the new.

        The pages must stay untouched until `Released`. Without a `ship` under way this does nothing."""
        pages = self._checked(pages, num_tokens)
        self._call(lambda now: self._sender.chunk(request, pages, num_tokens, now))

    def finish(self, request: str, pages: Sequence[int], num_tokens: int, state: bytes = b"") -> None:
        """As `chunk`, and no more will come: also the partial page goes out, and with it `state` (at most
        MAX_STATE_BYTES), which the target finds in `Arrived`; of several source ranks, that of the lowest.

        After another `ship` of the same request (to a second target, say) call it again."""
        if len(state) > MAX_STATE_BYTES:
            raise ValueError(f"state has {len(state)} bytes; at most {MAX_STATE_BYTES} can be sent")
        pages, now = self._checked(pages, num_tokens), self._clock()
        # The time of the call, not of its turn: with CMA the thread may be inside a write, which is hidden until now.
        self._call(lambda _: self._sender.finish(request, pages, num_tokens, state, now))

    def cancel_ship(self, request: str, epoch: int) -> None:
        """Writes no more of it. `Released` follows as soon as no write is open, in any case and perhaps once more."""
        self._call(lambda now: self._sender.cancel(request, epoch, now))

    # -- receiving -------------------------------------------------------------------------------------------------

    def expect(self, request: str, epoch: int, peers: Sequence[bytes], deadline_seconds: float) -> None:
        """`request` will come from the replica whose ranks' blobs are `peers`. Call `grant` when there is room for it.

        After the grant, each source may be silent for `deadline_seconds`: that must cover the computation of a chunk,
        unless it says `wait`. Raises as `ship` does, before anything was sent.
        """
        sources: dict[str, tuple[Peer, int]] = {}
        unpacked = self._unpack(peers)
        for peer in unpacked:
            ranges = plan_writes(peer.spec, self.spec)
            if ranges:
                sources[peer.name] = peer, sum(part.length for part in ranges)
        wanted = source_ranks(unpacked[0].spec, self.spec)
        if sorted(peer.spec.rank for peer, _ in sources.values()) != list(wanted):
            raise IncompatiblePools(f"ranks {wanted} write to this one; blobs of {len(unpacked)} were given")

        def call(now: float) -> list[Output]:
            self._peers.update({name: peer for name, (peer, _) in sources.items()})
            ranks = {name: (peer.spec.rank, page_bytes) for name, (peer, page_bytes) in sources.items()}
            expected = self._receiver.expect(request, epoch, ranks, deadline_seconds, now)
            return expected + self._lose_again(sources, now)

        self._call(call)

    def grant(self, request: str, epoch: int, first_page: int, pages: Sequence[int]) -> None:
        """The first `first_page` pages of `request` are here; the rest of its prompt is to be written to `pages`.

        They belong to the writer until `Arrived`, or until `WriterStopped` after anything else."""
        pages = tuple(pages)
        if first_page < 0 or len(set(pages)) != len(pages) or not all(0 <= p < self.spec.num_pages for p in pages):
            raise ValueError(f"pages must be different ones within 0 and {self.spec.num_pages - 1}, not {pages}")
        self._call(lambda now: self._receiver.grant(request, epoch, first_page, pages, now))

    def cancel_expect(self, request: str, epoch: int) -> None:
        """It is not wanted any more. `WriterStopped` follows when it is safe, in any case and perhaps once more;
        until then, keep the granted pages from everyone else."""
        self._call(lambda now: self._receiver.cancel(request, epoch, now))

    # -- either ----------------------------------------------------------------------------------------------------

    def wait(self, request: str, epoch: int, seconds: float) -> None:
        """Tells the other side that about `seconds` will pass before the grant, or before the next chunk."""
        seconds = min(max(0.0, float(seconds)), 86_400.0)
        self._call(
            lambda now: self._receiver.wait(request, epoch, seconds, now) + self._sender.wait(request, epoch, seconds)
        )

    def peer_dead(self, blob: bytes) -> None:
        """The process behind `blob` is known to be dead: its transfers fail, what it was writing to is out of its
        reach after the grace period, and what was being written to it is released."""
        name = Peer.unpack(blob).name

        def call(now: float) -> list[Output]:
            self._dead[name] = None
            while len(self._dead) > _MOST_DEAD:
                self._dead.popitem(last=False)
            return self._lose_again([name], now)

        self._call(call)

    def counts(self) -> DockCounts:
        """May be read from any thread; of the latest turn of the dock's. Raises if the dock has failed."""
        if self._error:
            raise RuntimeError("the dock is closed") from self._error
        return self._counts

    def drain(self, timeout: float) -> bool:
        """Waits until no transfer is under way, at most `timeout` seconds. Whether that was reached."""
        end = time.monotonic() + timeout
        while self._calls or self._counts.num_open:
            if time.monotonic() > end or not self._thread.is_alive():
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        """Ends the thread and the transport. What is under way is dropped without an event."""
        self._is_closing = True
        self._transport.wake()
        self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _call(self, call: Callable[[float], list[Output]]) -> None:
        if self._error or self._is_closing:
            raise RuntimeError("the dock is closed") from self._error
        self._calls.append(call)
        self._transport.wake()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except BaseException as error:  # the owner learns of it with its next call: nothing goes on silently
            logger.exception("the dock %s has failed", self.name)
            self._error = error
        finally:
            self._transport.close()

    def _turn(self) -> None:
        events = self._transport.poll(self._patience())
        if events or self._calls:
            self._stirred = self._clock()
        while self._calls:
            self._carry_out(self._calls[0](self._clock()))
            self._count()
            self._calls.popleft()  # only now: `drain` sees the call or what came of it
        for event in events:
            self._carry_out(self._handle(event, self._clock()))
            self._count()
        # Arrivals come before deadlines: who was stopped for a while must not blame others for its own silence.
        now = self._clock()
        if now >= self._next_deadline():
            self._carry_out(self._sender.tick(now) + self._receiver.tick(now))
            self._count()

    def _next_deadline(self) -> float:
        return min(self._sender.next_deadline, self._receiver.next_deadline)

    def _patience(self) -> float:
        if self._calls:
            return 0.0
        if not self._counts.num_open:
            return self._transport.idle_seconds
        # A transfer is open for as long as its prompt is computed, and silent for most of that.
        now, busy = self._clock(), self._transport.busy_seconds
        seconds = max(busy, min((now - self._stirred) * _CALM, _MOST_CALM_SECONDS))
        return min(seconds, max(0.0, self._next_deadline() - now))

    def _count(self) -> None:
        num_unknown = self._sender.num_unknown + self._receiver.num_unknown
        num_open = len(self._sender) + len(self._receiver)
        self._counts = DockCounts(self._num_malformed, num_unknown, num_open, len(self._writes))

    def _handle(self, event: TransportEvent, now: float) -> list[Output]:
        match event:
            case Received(peer, data):
                return self._receive(peer, data, now)
            case WriteDone(number):
                return self._sender.write_done(*self._writes.pop(number), now)
            case WriteFailed(number, detail):
                return self._sender.write_failed(*self._writes.pop(number), detail, now)
            case PeerLost(peer, detail):
                return self._lose(peer, self._transport.lost_is_fence, detail, now)

    def _receive(self, peer: str, data: bytes, now: float) -> list[Output]:
        try:
            message = decode(data)
            if isinstance(message, Abort) and peer not in self._peers:
                self._introduce(peer, message.blob)
        except (MalformedMessage, ValueError) as error:
            self._num_malformed += 1
            logger.warning("dropped a message of %s: %s", peer, error)
            return []
        if isinstance(message, Grant | Abort) or (isinstance(message, Wait) and not message.is_from_source):
            return self._sender.receive(peer, message, now)
        return self._receiver.receive(peer, message, now)

    def _introduce(self, name: str, blob: bytes) -> None:
        """Learns how to answer a peer that knows us, though we were never told of it."""
        peer = Peer.unpack(blob)
        if peer.name != name or peer.transport != self._transport.kind:
            raise ValueError(f"{name} says that it is {peer.name}, by {peer.transport}")
        check_compatible(self.spec, peer.spec)
        self._peers[name] = peer

    def _lose(self, peer: str, is_dead: bool, detail: str, now: float) -> list[Output]:
        self._transport.disconnect(peer)
        self._connected.discard(peer)
        lost = self._sender.peer_lost(peer, is_dead, detail, now)
        return lost + self._receiver.peer_lost(peer, is_dead, detail, now)

    def _lose_again(self, names: Iterable[str], now: float) -> list[Output]:
        """Those of them that are known to be dead: a transfer with one may be asked for after the word of its death."""
        outputs = []
        for name in names:
            if name in self._dead:
                self._peers.pop(name, None)
                outputs += self._lose(name, True, f"{name} is dead", now)
        return outputs

    def _carry_out(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            match output:
                case Send(peer, message):
                    self._reach(peer)
                    self._transport.send(peer, encode(message))
                case Write(peer, source_pages, target_pages, message):
                    self._reach(peer)
                    number = self._transport.write(peer, source_pages, target_pages, encode(message))
                    self._writes[number] = message.request, message.epoch, peer
                case _:
                    self._on_event(output)

    def _reach(self, name: str) -> None:
        """Connects where that has not happened yet. A peer known to be dead stays unconnected: the transport drops
        messages to it, and fails writes."""
        peer = self._peers.get(name)
        if peer and name not in self._connected:
            ranges = plan_writes(self.spec, peer.spec)
            self._transport.connect(peer, self.spec.layout.page_bytes, self.spec.num_pages, ranges)
            self._connected.add(name)

    # -- what callers give -----------------------------------------------------------------------------------------

    def _unpack(self, blobs: Sequence[bytes]) -> list[Peer]:
        if not blobs:
            raise ValueError("no blobs: at least one rank is needed")
        peers = [_unpack(blob) for blob in blobs]
        for peer in peers:
            if peer.transport != self._transport.kind:
                raise ValueError(f"{peer.name} speaks {peer.transport}, this dock {self._transport.kind}")
            check_compatible(self.spec, peer.spec)
        return peers

    def _checked(self, pages: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        pages = tuple(pages)
        if not 0 <= num_tokens <= len(pages) * self.spec.page_size:
            raise ValueError(f"num_tokens must be within {len(pages)} pages of {self.spec.page_size}, not {num_tokens}")
        if not all(0 <= page < self.spec.num_pages for page in pages):
            raise ValueError(f"pages must be within 0 and {self.spec.num_pages - 1}, not {pages}")
        return pages


_unpack = lru_cache(maxsize=256)(Peer.unpack)  # a replica meets the same few others again and again
