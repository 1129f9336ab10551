"""Docks of simulated replicas: the real protocol, on links whose messages and pages take simulated time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

import msgspec

from crossdock.cluster.simulate.clock import Clock
from crossdock.kvtransfer.calls import DockCall, PeerDeadCall
from crossdock.kvtransfer.dock_core import MAX_WRITE_BYTES, DockCore, DockCounts
from crossdock.kvtransfer.events import Event
from crossdock.kvtransfer.layout import PoolSpec
from crossdock.kvtransfer.plan import GroupRanges, PageCopies, bytes_by_group
from crossdock.kvtransfer.transport import (
    Memory,
    Peer,
    Received,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from crossdock.workers.replica.transfer.replica_dock import rank_blobs


@dataclass(slots=True)
class VirtualNetwork:
    """Links: one out of and one into every replica. One message with pages at a time, first come first served."""

    clock: Clock
    latency_s: float  # of a message between replicas
    docks: dict[str, "VirtualDock"] = field(default_factory=dict)  # of the replicas that live, by name
    hung: set[str] = field(default_factory=set)  # names of docks that take nothing in and send nothing
    _free: dict[tuple[str, bool], float] = field(default_factory=dict)  # by replica and whether out: when it is free

    def works(self, name: str) -> bool:
        """Return whether a dock is up and does not hang."""
        return name in self.docks and name not in self.hung

    def send(self, source: str, target: str, num_bytes: float, bytes_per_second: float) -> float:
        """Return when pages that are sent now will have arrived.

        While a message waits for the target's link, the source's link has time for others.
        """
        out = (source, True)
        into = (target, False)
        seconds = num_bytes / bytes_per_second
        begin = max(self.clock.now, self._free.get(out, 0.0))
        self._free[out] = begin + seconds
        self._free[into] = end = max(begin, self._free.get(into, 0.0)) + seconds
        return end

    def deliver(self, target: str, event: TransportEvent, at: float) -> None:
        """Have the dock of a replica take in an event at a time, if it works then."""

        def arrive(_: float) -> None:
            if self.works(target):
                self.docks[target].take_in(event)

        self.clock.at(at, arrive)

    def end(self, name: str) -> None:
        """Take a dock from the network, as the other docks will know: it has died."""
        blob = self.docks.pop(name).blob
        for dock in self.docks.values():
            self.clock.at(self.clock.now + self.latency_s, partial(dock.lose, blob))


@dataclass(slots=True)
class VirtualTransport:
    """Moves the pages of one dock, which are counted and not there."""

    name: str
    network: VirtualNetwork
    bytes_per_second: float
    kind: str = "virtual"
    lost_is_fence: bool = True
    busy_seconds: float = inf
    idle_seconds: float = inf
    _sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # bytes of a page of each group, by peer
    _num_writes: int = 0

    def open(self, name: str, memory: Memory) -> bytes:
        return b""

    def connect(self, peer: Peer, page_bytes: int, num_pages: int, ranges: GroupRanges) -> None:
        self._sizes[peer.name] = bytes_by_group(ranges)

    def write(self, peer: str, copies: Sequence[PageCopies], message: bytes) -> int:
        """Deliver `message` when the links have had time for the pages, behind the writes before."""
        self._num_writes += 1
        clock = self.network.clock
        target = self.network.docks.get(peer)
        if target is None or peer not in self._sizes:
            self.network.deliver(self.name, WriteFailed(self._num_writes, f"{peer} has died"), clock.now)
            return self._num_writes
        num_bytes = sum(len(copy.source_pages) * self._sizes[peer][copy.group] for copy in copies)
        slower = min(self.bytes_per_second, target.bytes_per_second)
        arrives = self.network.send(self.name, peer, num_bytes, slower)
        clock.at(arrives, partial(self._arrive, peer, self._num_writes, message))
        return self._num_writes

    def send(self, peer: str, message: bytes) -> None:
        self.network.deliver(peer, Received(self.name, message), self.network.clock.now + self.network.latency_s)

    def poll(self, seconds: float) -> list[TransportEvent]:
        """Return nothing: the network delivers what happens."""
        return []

    def wake(self) -> None:
        pass

    def disconnect(self, peer: str, *, is_idle: bool = False) -> None:
        self._sizes.pop(peer, None)

    def close(self) -> None:
        pass

    def _arrive(self, peer: str, number: int, message: bytes, now: float) -> None:
        """End a write, unless the replica that sent it has died or hangs meanwhile."""
        docks = self.network.docks
        if not self.network.works(self.name):
            return
        if peer in docks:
            self.send(peer, message)
            docks[self.name].take_in(WriteDone(number))
        else:
            docks[self.name].take_in(WriteFailed(number, f"{peer} has died"))


@dataclass(slots=True, eq=False)
class VirtualDock:
    """Takes the calls of a `ReplicaDock`, in place of the docks of all ranks of a replica."""

    name: str
    spec: PoolSpec
    network: VirtualNetwork
    bytes_per_second: float
    num_ranks: int  # each may write as much at a time as a dock
    grace_s: float
    on_event: Callable[[Event], None]
    blob: bytes = field(init=False)
    _core: DockCore = field(init=False)
    _events: list[Event] = field(default_factory=list)
    _ticks_at: float = inf

    def __post_init__(self) -> None:
        transport = VirtualTransport(self.name, self.network, self.bytes_per_second)
        own = Peer(self.name, transport.kind, b"", self.spec).pack()
        self.blob = msgspec.msgpack.encode([own])
        most = MAX_WRITE_BYTES * self.num_ranks
        take = self._events.append
        self._core = DockCore(transport, self.spec, own, take, self.grace_s, most, self.network.clock.time)
        self.network.docks[self.name] = self

    def call(self, call: DockCall) -> None:
        """Make a call. Raises what the record of the call says."""
        self._core.make(call, self._core.partners_of(call), self.network.clock.now)
        self._go_on()

    def counts(self) -> DockCounts:
        """Return how many transfers are under way."""
        return self._core.counts

    @property
    def is_alive(self) -> bool:
        return self.name in self.network.docks

    def close(self) -> None:
        """End the dock. Transfers under way fail at the other replicas."""
        self.network.end(self.name)

    def take_in(self, event: TransportEvent) -> None:
        """Take in what the network delivers."""
        self._core.handle(event)
        self._go_on()

    def lose(self, blob: bytes, now: float) -> None:
        """Note that the replica behind a blob has died."""
        if self.network.works(self.name):
            for rank in rank_blobs(blob):
                self.call(PeerDeadCall(rank))

    def _go_on(self) -> None:
        """Report events, and look again when a deadline has passed."""
        events = self._events.copy()
        self._events.clear()
        for event in events:
            self.on_event(event)
        if (at := self._core.next_deadline) < self._ticks_at:
            self._ticks_at = at
            self.network.clock.at(at, self._tick)

    def _tick(self, now: float) -> None:
        if now >= self._ticks_at and self.network.works(self.name):
            self._ticks_at = inf
            self._core.tick()
            self._go_on()
