"""The docks of all ranks of a replica as one: calls go to every rank, and events are merged."""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from crossdock.kvtransfer.calls import AskCall, DockCall, ExpectCall, PeerDeadCall, ShipCall
from crossdock.kvtransfer.dock import Dock
from crossdock.kvtransfer.dock_core import DockCounts
from crossdock.kvtransfer.emulated import EmulatedTransport
from crossdock.kvtransfer.events import Event
from crossdock.kvtransfer.layout import PoolSpec
from crossdock.kvtransfer.nixl import NixlTransport
from crossdock.kvtransfer.tcp import TcpTransport
from crossdock.kvtransfer.transport import Memory, Transport, TransportUnavailable
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.transfer.event_merger import EventMerger

if TYPE_CHECKING:  # an emulated replica imports no torch
    from crossdock.workers.replica.ranks.worker_group import WorkerGroup

_LOOPBACK = "127.0.0.1"  # where no address of the node is given


class TransferDock(Protocol):
    """The docks of all ranks of a replica, as one: `ReplicaDock`, and `VirtualDock` of simulations."""

    blob: bytes
    """What the other side's replica needs to reach this one; `rank_blobs` makes the peers of a call from it."""

    def call(self, call: DockCall) -> None:
        """Make the call on the dock of every rank. Raises what `Dock.call` raises."""

    def counts(self) -> DockCounts:
        """Return the counts of one rank."""

    @property
    def is_alive(self) -> bool: ...

    def close(self) -> None: ...


class ReplicaDock:
    """One dock here and one at each follower of `worker_group`."""

    def __init__(
        self,
        memory: Callable[[], Memory],
        spec: PoolSpec,
        role: str,
        config: TransferConfig,
        worker_group: "WorkerGroup | None",
        on_event: Callable[[Event], None],
        clock: Callable[[], float],
        before_grant: Callable[[Iterable[int]], None] | None = None,
    ) -> None:
        """Open the pool to transfers. `memory` returns where that is now; `before_grant`: as of `Dock`.

        TransportUnavailable: as `open_dock`.
        """
        self._memory = memory
        self._arguments = spec, role, config
        self._clock = clock
        self._before_grant = before_grant
        self._worker_group = worker_group
        self._on_event = on_event
        self._turn = threading.Lock()  # events come on as many threads as there are ranks
        self._is_withdrawn = False
        self._open()

    def _open(self) -> None:
        spec, role, config = self._arguments
        self._merger = EventMerger(range(len(spec.shards)))
        on_own_event = partial(self._take, spec.rank)
        self._own = open_dock(self._memory(), *self._arguments, on_own_event, self._clock, self._before_grant)
        blobs = {spec.rank: self._own.blob}
        if self._worker_group is not None:
            blobs |= self._worker_group.open_docks(spec.model, role, config, self._take)
        self.blob: bytes = msgspec.msgpack.encode([blobs[rank] for rank in sorted(blobs)])

    def drain(self) -> None:
        """Wait until no transfer is under way here. In any thread but the one that handles events.

        Raises:
            ValueError: one does not end, though no request is here any more.
        """
        _, _, config = self._arguments
        if not self._own.drain(config.deadline_s + config.grace_s):
            raise ValueError("transfers of pages have not ended: try again")

    def withdraw(self) -> None:
        """Close the docks of all ranks, after `drain`: the memory of their pools is about to move."""
        if self._worker_group is not None:
            self._worker_group.close_docks()
        self._own.close()
        self._is_withdrawn = True

    def reopen(self) -> None:
        """Open new docks over the pools where they are now. `blob` changes: tell all that know this one."""
        if self._is_withdrawn:
            self._open()
            self._is_withdrawn = False

    def call(self, call: DockCall) -> None:
        """Make the call on the dock of every rank. Raises what `Dock.call` raises."""
        if self._is_withdrawn and isinstance(call, PeerDeadCall):
            return  # a dock that is opened later knows no peer
        if isinstance(call, ShipCall | ExpectCall):
            with self._turn:
                self._merger.begin(isinstance(call, ShipCall), call.request, call.epoch)
        self._own.call(call)  # first: what this dock refuses the others would refuse
        if self._worker_group is not None and not isinstance(call, AskCall):  # one rank asks for all
            self._worker_group.broadcast(call)

    def counts(self) -> DockCounts:
        """Return the counts of this rank's dock. The counts of other ranks are nearly equal."""
        return self._own.counts()

    @property
    def is_alive(self) -> bool:
        """Whether this rank's dock works. Another rank whose dock has failed ends at its next call."""
        return self._own.is_alive

    def close(self) -> None:
        self._own.close()

    def _take(self, rank: int, event: Event) -> None:
        with self._turn:
            events, cancel = self._merger.merge(rank, event)
            for merged in events:
                self._on_event(merged)
        if cancel is not None:
            self.call(cancel)


def open_dock(
    memory: Memory,
    spec: PoolSpec,
    role: str,
    config: TransferConfig,
    on_event: Callable[[Event], None],
    clock: Callable[[], float] | None = None,
    before_grant: Callable[[Iterable[int]], None] | None = None,
) -> Dock:
    """Open the pool of one rank, which `spec` describes, to transfers. `before_grant`: as of `Dock`.

    Raises:
        TransportUnavailable: NIXL is asked for, or the pool is a GPU's, and NIXL cannot be used here.
        ValueError: checksums are asked for, and the pool is a GPU's.
    """
    if config.checksum and memory.cuda_device is not None:
        raise ValueError("transfer.checksum: only pages in ordinary memory are summed, not a GPU's; leave it out")
    has_checksums = config.checksum and memory.bytes_per_second is None  # an emulated pool has no bytes to sum
    options: dict[str, Any] = {"clock": clock} if clock is not None else {}
    transport = choose_transport(config, memory)
    return Dock(
        transport,
        memory,
        spec,
        role,
        on_event,
        grace_seconds=config.grace_s,
        has_checksums=has_checksums,
        before_grant=before_grant,
        **options,
    )


def choose_transport(config: TransferConfig, memory: Memory) -> Transport:
    """Return the transport that is asked for, or the best there is. TransportUnavailable: none can be used here."""
    if memory.bytes_per_second is not None:
        return EmulatedTransport(TcpTransport(config.host or _LOOPBACK), memory.bytes_per_second)
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


def rank_blobs(peer: bytes) -> tuple[bytes, ...]:
    """Return the blobs of a replica's ranks from its `ReplicaDock.blob`. ValueError: the bytes are no such blob."""
    try:
        return msgspec.msgpack.decode(peer, type=tuple[bytes, ...])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a replica's docks: {error}") from error
