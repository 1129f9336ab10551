"""One rank's end of all its transfers, without a thread: a sender and a receiver on a transport.

Calls, what the transport reports, and the time come in; what is sent goes to the transport, and events to one callback.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from crossdock.kvtransfer.calls import (
    AskCall,
    CancelExpectCall,
    CancelShipCall,
    ChunkCall,
    DockCall,
    ExpectCall,
    FinishCall,
    GrantCall,
    OfferCall,
    PeerDeadCall,
    ShipCall,
    WaitCall,
)
from crossdock.kvtransfer.checksums import Checksums
from crossdock.kvtransfer.events import Asked, Event
from crossdock.kvtransfer.fence import RecentNames
from crossdock.kvtransfer.layout import IncompatiblePools, PoolSpec
from crossdock.kvtransfer.messages import (
    MAX_PAUSE_S,
    Abort,
    AskPrefix,
    Grant,
    MalformedMessage,
    Pages,
    Wait,
    decode,
    encode,
)
from crossdock.kvtransfer.next_write import TargetRank
from crossdock.kvtransfer.peers import Peers
from crossdock.kvtransfer.plan import bytes_by_group, plan_writes, source_ranks
from crossdock.kvtransfer.protocol_outputs import ProtocolOutput, Send, Write
from crossdock.kvtransfer.receiver import Receiver
from crossdock.kvtransfer.sender import Sender
from crossdock.kvtransfer.transport import (
    Peer,
    PeerLost,
    Received,
    Transport,
    TransportEvent,
    WriteDone,
    WriteFailed,
)

logger = logging.getLogger(__name__)

MAX_WRITE_BYTES = 32 << 20  # so many bytes of one transfer keep others waiting
Partner: TypeAlias = tuple[Peer, tuple[int, ...]]
"""A rank of the other replica, and the bytes of a page of each group of layers that one of the two writes."""


@dataclass(frozen=True, slots=True)
class DockCounts:
    """Messages dropped since the dock was opened, and transfers under way now."""

    num_malformed: int  # messages that are damaged, or of another protocol
    num_unknown: int  # messages about a transfer or an epoch that is over, or never was
    num_open: int  # transfers, both directions
    num_open_writes: int


class DockCore:
    """The transfers of one rank. `transport` is open already; `blob` reaches it. Other arguments as of `Dock`.

    `checksums` sums the writes of this rank, and checks those of others; None: nothing is summed or checked."""

    def __init__(
        self,
        transport: Transport,
        spec: PoolSpec,
        blob: bytes,
        on_event: Callable[[Event], None],
        grace_seconds: float,
        max_write_bytes: int,
        clock: Callable[[], float],
        checksums: Checksums | None = None,
    ) -> None:
        self.spec = spec
        self.blob = blob
        self.counts = DockCounts(0, 0, 0, 0)
        self._transport = transport
        self._on_event = on_event
        self._clock = clock
        self._sender = Sender(spec.rank, spec.page_size, max_write_bytes)
        self._receiver = Receiver(spec.page_size, blob, grace_seconds)
        self._peers = Peers(transport, spec)
        self._writes: dict[int, tuple[str, int, str]] = {}  # request, epoch, peer
        self._num_malformed = 0
        self._checksums = checksums
        self._damaged = RecentNames()  # peers whose pages did not arrive as they were sent: the log names each once

    @property
    def next_deadline(self) -> float:
        """When `tick` may next have something to do; infinity if never."""
        return min(self._sender.next_deadline, self._receiver.next_deadline)

    def make(self, call: DockCall, partners: Mapping[str, Partner], called_at: float) -> None:
        """Make a call of `called_at`, in seconds. `partners`: from `partners_of`."""
        self._perform(self._make(call, partners, called_at))

    def handle(self, event: TransportEvent) -> None:
        """Take in what the transport reports."""
        self._perform(self._handle(event, self._clock()))

    def tick(self) -> None:
        """Fail what is past a deadline. Take in what has arrived first: a process that was stopped for a while must not
        blame others for its silence."""
        now = self._clock()
        if now >= self.next_deadline:
            self._perform(self._sender.tick(now) + self._receiver.tick(now))

    def partners_of(self, call: DockCall) -> dict[str, Partner]:
        """Return the ranks that a new transfer goes to or comes from, by name. May be called from any thread.

        Raises what the record of the call says."""
        match call:
            case ShipCall():
                peers = self._peers.unpack(call.peers)
                return {
                    peer.name: (peer, page_bytes)
                    for peer in peers
                    if any(page_bytes := bytes_by_group(plan_writes(self.spec, peer.spec)))
                }
            case ExpectCall():
                peers = self._peers.unpack(call.peers)
                sources = {
                    peer.name: (peer, page_bytes)
                    for peer in peers
                    if any(page_bytes := bytes_by_group(plan_writes(peer.spec, self.spec)))
                }
                wanted = source_ranks(peers[0].spec, self.spec)
                if sorted(peer.spec.rank for peer, _ in sources.values()) != list(wanted):
                    raise IncompatiblePools(f"ranks {wanted} write to this one; blobs of {len(peers)} were given")
                return sources
            case AskCall(peer=blob):
                (peer,) = self._peers.unpack([blob])
                return {peer.name: (peer, ())}
            case PeerDeadCall(blob):
                peer = Peer.unpack(blob)
                return {peer.name: (peer, ())}
            case _:
                return {}

    def _make(self, call: DockCall, partners: Mapping[str, Partner], called_at: float) -> list[ProtocolOutput]:
        """Make a call on the sender or the receiver. `partners`: of a transfer that begins, or that have died."""
        now = self._clock()
        match call:
            case ShipCall(request, epoch, _, deadline_s):
                self._peers.meet((peer for peer, _ in partners.values()), self._busy)
                targets = {
                    name: TargetRank(
                        peer.spec.num_pages,
                        page_bytes,
                        len(source_ranks(self.spec, peer.spec)),
                        has_state=bool(peer.spec.state),
                    )
                    for name, (peer, page_bytes) in partners.items()
                }
                outputs = self._sender.ship(request, epoch, targets, deadline_s, now)
            case ExpectCall(request, epoch, _, deadline_s):
                self._peers.meet((peer for peer, _ in partners.values()), self._busy)
                sources = {name: (peer.spec.rank, page_bytes) for name, (peer, page_bytes) in partners.items()}
                outputs = self._receiver.expect(request, epoch, sources, deadline_s, now)
            case AskCall(request, epoch, _, peers, hashes):
                self._peers.meet((peer for peer, _ in partners.values()), self._busy)
                outputs = [Send(name, AskPrefix(request, epoch, peers, hashes)) for name in partners]
            case OfferCall(request, epoch, num_tokens):
                outputs = self._sender.offer(request, epoch, num_tokens)
            case ChunkCall(request, groups, num_tokens):
                outputs = self._sender.chunk(request, groups, num_tokens, now)
            case FinishCall(request, groups, num_tokens, result, state_pages):
                # With CMA this thread may have been inside a write, which was hidden behind computing until the call.
                outputs = self._sender.finish(request, groups, num_tokens, result, called_at, state_pages)
            case GrantCall(request, epoch, first_page, groups, state_pages):
                outputs = self._receiver.grant(request, epoch, first_page, groups, now, state_pages)
            case CancelShipCall(request, epoch):
                outputs = self._sender.cancel(request, epoch, now)
            case CancelExpectCall(request, epoch):
                outputs = self._receiver.cancel(request, epoch, now)
            case WaitCall(request, epoch, seconds):
                pause = min(seconds, MAX_PAUSE_S)
                outputs = self._receiver.wait(request, epoch, pause, now) + self._sender.wait(request, epoch, pause)
            case PeerDeadCall():
                for name in partners:
                    self._peers.note_death(name)
                outputs = []
        return outputs + self._lose_dead(partners, now)

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
            if isinstance(message, AskPrefix):
                return [Asked(message.request, message.epoch, message.peers, message.hashes)]
            if isinstance(message, Abort) and peer not in self._peers:
                self._peers.introduce(peer, message.blob, self._busy)
            if isinstance(message, Grant | Abort) or (isinstance(message, Wait) and not message.is_from_source):
                return self._sender.receive(peer, message, now)
            is_intact = not isinstance(message, Pages) or self._is_intact(peer, message)
            return self._receiver.receive(peer, message, now, is_intact=is_intact)
        except Exception as error:  # of any kind: no message of another process may end this dock
            self._num_malformed += 1
            is_bug = not isinstance(error, MalformedMessage | ValueError)
            logger.warning("dropped a message of %s: %s", peer, error, exc_info=is_bug)
            return []

    def _is_intact(self, peer: str, pages: Pages) -> bool:
        """Return whether pages lie here as they were sent, as far as that is checked. The first time that those of a
        peer do not, the log names the peer."""
        if self._checksums is None:
            return True
        grant = self._receiver.grant_of(peer, pages)
        source = self._peers.spec_of(peer)
        if grant is None or source is None:
            return True
        is_intact = self._checksums.agrees(pages, grant, source)
        if not is_intact and peer not in self._damaged:
            self._damaged.add(peer)
            logger.error(
                "KV pages of %s did not arrive as %s sent them. They are computed here. Of this sender no other such "
                'line follows: crossdock_transfers with outcome="checksum" counts them',
                pages.request,
                peer,
            )
        return is_intact

    def _with_checksum(self, write: Write) -> Pages:
        """Return the message of a write, with the checksum of its pages where one is wanted."""
        if self._checksums is None or (target := self._peers.spec_of(write.peer)) is None:
            return write.message
        return msgspec.structs.replace(write.message, checksum=self._checksums.of_write(write.copies, target))

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
        peer = write.peer
        message = write.message
        try:
            self._peers.connect(peer)
            number = self._transport.write(peer, write.copies, encode(self._with_checksum(write)))
        except Exception as error:
            logger.exception("a write to %s did not begin", peer)
            # Even if a write to the peer has begun.
            self._peers.disconnect(peer, is_idle=False)
            detail = f"{type(error).__name__}: {error}"
            now = self._clock()
            self._perform(self._sender.write_failed(message.request, message.epoch, peer, detail, now))
        else:
            self._writes[number] = message.request, message.epoch, peer

    def _count(self) -> None:
        num_unknown = self._sender.num_unknown + self._receiver.num_unknown
        num_open = len(self._sender) + len(self._receiver)
        self.counts = DockCounts(self._num_malformed, num_unknown, num_open, len(self._writes))
