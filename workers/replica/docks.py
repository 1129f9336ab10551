"""The docks of all ranks of a replica as one: calls go to every rank, and what the ranks report of a transfer is told
once, when it is true of all."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

import msgpack

from crossdock.kvtransfer.dock import Dock, DockCounts
from crossdock.kvtransfer.events import (
    Arrived,
    Committed,
    Event,
    Failed,
    Figures,
    Granted,
    Reason,
    Released,
    WriterStopped,
)
from crossdock.kvtransfer.layout import PoolSpec
from crossdock.kvtransfer.nixl import NixlTransport
from crossdock.kvtransfer.tcp import TcpTransport
from crossdock.kvtransfer.transport import Memory, Transport, TransportUnavailable
from crossdock.workers.model.model import PagedModel
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.ranks import Gang

_LOOPBACK = "127.0.0.1"  # where nobody has said which address the node has


class Docks:
    """One dock here and one at each follower of `gang`. The calls are `Dock`'s, with a replica in the place of a peer;
    `blob` is what the other side's need to reach this replica."""

    def __init__(
        self,
        model: PagedModel,
        spec: PoolSpec,
        role: str,
        config: TransferConfig,
        gang: Gang | None,
        on_event: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        """TransportUnavailable: NIXL is asked for, or the pool is a GPU's, and NIXL cannot be used here."""
        self._gang = gang
        self._on_event = on_event
        self._together = Together(range(len(spec.shards)))
        self._turn = threading.Lock()  # events come on as many threads as there are ranks
        self._rank = spec.rank
        self._own = _open(model, spec, role, config, lambda event: self._take(spec.rank, event), clock)
        blobs = {spec.rank: self._own.blob}
        if gang is not None:
            gang.on_event = lambda rank, fields: self._take(rank, unpack_event(fields[0]))
            blobs |= gang.open_docks(spec.model, role, config.model_dump())
        self.blob: bytes = msgpack.packb([blobs[rank] for rank in sorted(blobs)])

    def ship(self, request: str, epoch: int, peer: bytes, deadline_seconds: float) -> None:
        self._begin(True, request, epoch)
        self._call("ship", request, epoch, _blobs(peer), deadline_seconds)

    def expect(self, request: str, epoch: int, peer: bytes, deadline_seconds: float) -> None:
        self._begin(False, request, epoch)
        self._call("expect", request, epoch, _blobs(peer), deadline_seconds)

    def chunk(self, request: str, pages: Sequence[int], num_tokens: int) -> None:
        self._call("chunk", request, list(pages), num_tokens)

    def finish(self, request: str, pages: Sequence[int], num_tokens: int, state: bytes) -> None:
        self._call("finish", request, list(pages), num_tokens, state)

    def grant(self, request: str, epoch: int, first_page: int, pages: Sequence[int]) -> None:
        self._call("grant", request, epoch, first_page, list(pages))

    def cancel_ship(self, request: str, epoch: int) -> None:
        self._call("cancel_ship", request, epoch)

    def cancel_expect(self, request: str, epoch: int) -> None:
        self._call("cancel_expect", request, epoch)

    def wait(self, request: str, epoch: int, seconds: float) -> None:
        self._call("wait", request, epoch, seconds)

    def peer_dead(self, peer: bytes) -> None:
        for blob in _blobs(peer):
            self._call("peer_dead", blob)

    def counts(self) -> DockCounts:
        """Of this rank's dock; the others' do the same."""
        return self._own.counts()

    def close(self) -> None:
        self._own.close()

    def _call(self, name: str, *args: Any) -> None:
        getattr(self._own, name)(*args)  # first: what it refuses the others would refuse
        if self._gang is not None:
            self._gang.tell("dock", name, *args)

    def _begin(self, is_sending: bool, request: str, epoch: int) -> None:
        with self._turn:
            self._together.begin(is_sending, request, epoch)

    def _take(self, rank: int, event: Event) -> None:
        with self._turn:
            events, cancel = self._together.take(rank, event)
            for told in events:
                self._on_event(told)
        if cancel is not None:
            self._call(cancel, event.request, event.epoch)


class RankDock:
    """A follower's dock: does what the driver's `Docks` calls, and sends back what happens."""

    def __init__(
        self, model: PagedModel, spec: PoolSpec, role: str, transfer: dict[str, Any], send: Callable[[Any], None]
    ) -> None:
        config = TransferConfig.model_validate(transfer)
        self._dock = _open(model, spec, role, config, lambda event: send(pack_event(event)), None)
        self.blob = self._dock.blob

    def obey(self, call: Sequence[Any]) -> None:
        name, *args = call
        getattr(self._dock, name)(*args)


def _open(
    model: PagedModel,
    spec: PoolSpec,
    role: str,
    config: TransferConfig,
    on_event: Callable[[Event], None],
    clock: Callable[[], float] | None,
) -> Dock:
    pool = model.pool
    assert pool is not None
    memory = Memory(pool.data_ptr(), pool.nbytes, pool.device.index if pool.is_cuda else None)
    options: dict[str, Any] = {"clock": clock} if clock is not None else {}
    return Dock(_transport(config, memory), memory, spec, role, on_event, grace_seconds=config.grace_s, **options)


def _transport(config: TransferConfig, memory: Memory) -> Transport:
    is_gpus = memory.cuda_device is not None
    if config.transport == "tcp" and is_gpus:
        raise TransportUnavailable("transfer.transport tcp moves ordinary memory only, not a GPU's; nixl moves both")
    if config.transport == "tcp":
        return TcpTransport(config.host or _LOOPBACK)
    try:
        return NixlTransport()
    except TransportUnavailable:
        if config.transport == "nixl" or is_gpus:
            raise
        return TcpTransport(config.host or _LOOPBACK)


def _blobs(peer: bytes) -> list[bytes]:
    """Of the ranks of a replica, by its `Docks.blob`. ValueError: it is none."""
    try:
        blobs = msgpack.unpackb(peer)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"not a replica's docks: {error}") from error
    if not isinstance(blobs, list) or not all(isinstance(blob, bytes) for blob in blobs):
        raise ValueError("not a replica's docks")
    return blobs


# -- several ranks' events, told as one ------------------------------------------------------------------------------

_Key: TypeAlias = tuple[bool, str, int]  # sending, request, epoch


@dataclass(slots=True)
class _Transfer:
    committed: dict[int, int] = field(default_factory=dict)  # tokens, by rank
    arrived: dict[int, Arrived] = field(default_factory=dict)
    released: dict[int, Released] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    frontier: int = 0
    has_failed: bool = False


class Together:
    """What `ranks` report of one transfer each, as the events of one dock. Pure.

    A token has arrived when every rank has its part of it; a transfer has failed when one rank's has, and is over when
    all are.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = frozenset(ranks)
        self._open: dict[_Key, _Transfer] = {}
        self._over: OrderedDict[_Key, None] = OrderedDict()  # some events may come once more after the end

    def begin(self, is_sending: bool, request: str, epoch: int) -> None:
        self._over.pop((is_sending, request, epoch), None)

    def take(self, rank: int, event: Event) -> tuple[Sequence[Event], Literal["cancel_ship", "cancel_expect"] | None]:
        """What there is to tell, and the call that ends the transfer at every rank, if it must end."""
        is_sending = event.sending if isinstance(event, Failed) else isinstance(event, Granted | Released)
        key = is_sending, event.request, event.epoch
        if key in self._over:
            return (), None
        transfer = self._open.setdefault(key, _Transfer())
        match event:
            case Committed(num_tokens=num_tokens):
                transfer.committed[rank] = num_tokens
                return self._advance(event, transfer), None
            case Arrived():
                transfer.arrived[rank] = event
                if transfer.arrived.keys() == self._ranks:
                    self._end(key)
                    figures = _merged([it.figures for it in transfer.arrived.values()])
                    return (replace(transfer.arrived[min(transfer.arrived)], figures=figures),), None
            case Failed() if not transfer.has_failed:
                transfer.has_failed = True
                others = len(self._ranks) > 1
                return (event,), ("cancel_ship" if is_sending else "cancel_expect") if others else None
            case WriterStopped():
                transfer.stopped.add(rank)
                if transfer.stopped == self._ranks:
                    self._end(key)
                    return (event,), None
            case Released():
                transfer.released[rank] = event
                if transfer.released.keys() == self._ranks:
                    self._end(key)
                    figures = _merged([it.figures for it in transfer.released.values()])
                    arrived = all(it.arrived for it in transfer.released.values())
                    return (Released(event.request, event.epoch, arrived, figures),), None
            case _:
                pass
        return (), None

    def _advance(self, event: Committed, transfer: _Transfer) -> Sequence[Event]:
        frontier = min(transfer.committed.get(rank, 0) for rank in self._ranks)
        if frontier <= transfer.frontier or transfer.has_failed:
            return ()
        transfer.frontier = frontier
        return (replace(event, num_tokens=frontier),)

    def _end(self, key: _Key) -> None:
        del self._open[key]
        self._over[key] = None
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)


_REMEMBERED = 1024


def _merged(figures: Sequence[Figures]) -> Figures:
    """Bytes and writes of all ranks; times of the slowest."""
    return replace(
        max(figures, key=lambda it: it.total_seconds),
        num_bytes=sum(it.num_bytes for it in figures),
        hidden_bytes=sum(it.hidden_bytes for it in figures),
        num_writes=sum(it.num_writes for it in figures),
    )


_KINDS: Mapping[str, type[Event]] = {
    kind.__name__: kind for kind in (Granted, Released, Committed, Arrived, WriterStopped, Failed)
}


def pack_event(event: Event) -> list[Any]:
    fields = asdict(event)
    if isinstance(event, Failed):
        fields["reason"] = event.reason.value
    return [type(event).__name__, fields]


def unpack_event(data: Sequence[Any]) -> Event:
    name, fields = data
    if "figures" in fields:
        fields["figures"] = Figures(**fields["figures"])
    if "reason" in fields:
        fields["reason"] = Reason(fields["reason"])
    return _KINDS[name](**fields)
