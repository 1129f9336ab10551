"""The docks of all ranks of a replica as one: calls go to every rank, and events are merged."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
from torch import Tensor

from crossdock.kvtransfer.dock import Dock, DockCounts
from crossdock.kvtransfer.events import Event
from crossdock.kvtransfer.layout import PoolSpec
from crossdock.kvtransfer.messages import GroupPages
from crossdock.kvtransfer.nixl import NixlTransport
from crossdock.kvtransfer.tcp import TcpTransport
from crossdock.kvtransfer.transport import Memory, Transport, TransportUnavailable
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.ranks.gang import Gang
from crossdock.workers.replica.ranks.rank_messages import (
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
from crossdock.workers.replica.transfer.event_merger import EventMerger

_LOOPBACK = "127.0.0.1"  # where no address of the node is given


class ReplicaDock:
    """One dock here and one at each follower of `gang`. The calls are those of `Dock`, with a replica for a peer.

    `blob` is what the other side's replica needs to reach this one.
    """

    def __init__(
        self,
        pool: Tensor,
        spec: PoolSpec,
        role: str,
        config: TransferConfig,
        gang: Gang | None,
        on_event: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        """Open `pool` to transfers. TransportUnavailable: as `open_dock`."""
        self._gang = gang
        self._on_event = on_event
        self._merger = EventMerger(range(len(spec.shards)))
        self._turn = threading.Lock()  # events come on as many threads as there are ranks
        self._own = open_dock(pool, spec, role, config, lambda event: self._take(spec.rank, event), clock)
        blobs = {spec.rank: self._own.blob}
        if gang is not None:
            gang.on_event = self._take
            blobs |= gang.open_docks(spec.model, role, config)
        self.blob: bytes = msgpack.packb([blobs[rank] for rank in sorted(blobs)])

    def ship(self, request: str, epoch: int, peer: bytes, deadline_s: float) -> None:
        self._begin(True, request, epoch)
        self._call(ShipCall(request, epoch, _blobs(peer), deadline_s))

    def expect(self, request: str, epoch: int, peer: bytes, deadline_s: float) -> None:
        self._begin(False, request, epoch)
        self._call(ExpectCall(request, epoch, _blobs(peer), deadline_s))

    def offer(self, request: str, epoch: int) -> None:
        self._call(OfferCall(request, epoch))

    def chunk(self, request: str, groups: Sequence[GroupPages], num_tokens: int) -> None:
        self._call(ChunkCall(request, tuple(groups), num_tokens))

    def finish(
        self, request: str, groups: Sequence[GroupPages], num_tokens: int, result: bytes, state_pages: Sequence[int]
    ) -> None:
        self._call(FinishCall(request, tuple(groups), num_tokens, result, tuple(state_pages)))

    def grant(
        self, request: str, epoch: int, first_page: int, groups: Sequence[GroupPages], state_pages: Sequence[int]
    ) -> None:
        self._call(GrantCall(request, epoch, first_page, tuple(groups), tuple(state_pages)))

    def cancel_ship(self, request: str, epoch: int) -> None:
        self._call(CancelShipCall(request, epoch))

    def cancel_expect(self, request: str, epoch: int) -> None:
        self._call(CancelExpectCall(request, epoch))

    def wait(self, request: str, epoch: int, seconds: float) -> None:
        self._call(WaitCall(request, epoch, seconds))

    def peer_dead(self, peer: bytes) -> None:
        for blob in _blobs(peer):
            self._call(PeerDeadCall(blob))

    def counts(self) -> DockCounts:
        """Return the counts of this rank's dock; those of the other ranks are much the same."""
        return self._own.counts()

    @property
    def is_alive(self) -> bool:
        """Whether this rank's dock has not failed. Another rank whose dock has failed ends at its next call."""
        return self._own.is_alive

    def close(self) -> None:
        self._own.close()

    def _call(self, call: DockCall) -> None:
        apply_call(self._own, call)  # first: what this dock refuses the others would refuse
        if self._gang is not None:
            self._gang.broadcast(call)

    def _begin(self, is_sending: bool, request: str, epoch: int) -> None:
        with self._turn:
            self._merger.begin(is_sending, request, epoch)

    def _take(self, rank: int, event: Event) -> None:
        with self._turn:
            events, cancel = self._merger.merge(rank, event)
            for merged in events:
                self._on_event(merged)
        if cancel is not None:
            self._call(cancel)


def apply_call(dock: Dock, call: DockCall) -> None:
    """Make the call on the dock of one rank."""
    match call:
        case ShipCall(request, epoch, peers, deadline_s):
            dock.ship(request, epoch, peers, deadline_s)
        case ExpectCall(request, epoch, peers, deadline_s):
            dock.expect(request, epoch, peers, deadline_s)
        case OfferCall(request, epoch):
            dock.offer(request, epoch)
        case ChunkCall(request, groups, num_tokens):
            dock.chunk(request, groups, num_tokens)
        case FinishCall(request, groups, num_tokens, result, state_pages):
            dock.finish(request, groups, num_tokens, result, state_pages)
        case GrantCall(request, epoch, first_page, groups, state_pages):
            dock.grant(request, epoch, first_page, groups, state_pages)
        case CancelShipCall(request, epoch):
            dock.cancel_ship(request, epoch)
        case CancelExpectCall(request, epoch):
            dock.cancel_expect(request, epoch)
        case WaitCall(request, epoch, seconds):
            dock.wait(request, epoch, seconds)
        case PeerDeadCall(blob):
            dock.peer_dead(blob)


def open_dock(
    pool: Tensor,
    spec: PoolSpec,
    role: str,
    config: TransferConfig,
    on_event: Callable[[Event], None],
    clock: Callable[[], float] | None = None,
) -> Dock:
    """Open the pool of one rank, which `spec` describes, to transfers.

    Raises:
        TransportUnavailable: NIXL is asked for, or the pool is a GPU's, and NIXL cannot be used here.
    """
    memory = Memory(pool.data_ptr(), pool.nbytes, pool.device.index if pool.is_cuda else None)
    options: dict[str, Any] = {"clock": clock} if clock is not None else {}
    transport = choose_transport(config, memory)
    return Dock(transport, memory, spec, role, on_event, grace_seconds=config.grace_s, **options)


def choose_transport(config: TransferConfig, memory: Memory) -> Transport:
    """Return the transport that is asked for, or the best there is. TransportUnavailable: none can be used here."""
    is_on_gpu = memory.cuda_device is not None
    if config.transport == "tcp" and is_on_gpu:
        raise TransportUnavailable("transfer.transport tcp moves ordinary memory only, not a GPU's; nixl moves both")
    if config.transport == "tcp":
        return TcpTransport(config.host or _LOOPBACK)
    try:
        return NixlTransport()
    except TransportUnavailable:
        if config.transport == "nixl" or is_on_gpu:
            raise
        return TcpTransport(config.host or _LOOPBACK)


def _blobs(peer: bytes) -> tuple[bytes, ...]:
    """Return the blobs of a replica's ranks from its `ReplicaDock.blob`. ValueError: the bytes are no such blob."""
    try:
        blobs = msgpack.unpackb(peer, use_list=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"not a replica's docks: {error}") from error
    if not isinstance(blobs, tuple) or not all(isinstance(blob, bytes) for blob in blobs):
        raise ValueError("not a replica's docks")
    return blobs
