"""The ranks of one replica: a driver, which schedules and samples, and followers, which are told of each step in one
message. They begin together, and when one ends or hangs all end.

A message goes over a socket from the driver to each follower: its end is how either learns that the other is gone, at
once. Tensors go by torch.distributed, whose calls have a deadline: that is how a hung rank is found.
"""

import contextlib
import fcntl
import hmac
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import msgpack
import torch
import torch.distributed as dist

from crossdock.kernels.options import AttentionBackend, KVCacheDtype
from crossdock.kvtransfer.layout import LayerShape, PoolSpec, Shard
from crossdock.workers.model.checkpoint import resolve_model
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.fp8_scales import exponents, fingerprint_of
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.kv_memory import PageBudget, count_pages_that_fit
from crossdock.workers.model.load import load_model
from crossdock.workers.model.memory_budget import MemoryBudget
from crossdock.workers.model.memory_fit import used
from crossdock.workers.model.model import PagedModel

logger = logging.getLogger(__name__)

Held: TypeAlias = Sequence[Sequence[int]]
"""What a rank holds of each of its layers: number, first KV head, last, how many there are, key and value dims; where
pages are e4m3 also the exponents of its heads' scales, all of keys, then all of values."""

_LENGTH = struct.Struct("!I")


class RankFailed(RuntimeError):
    """A rank of the replica could not start, has ended or hangs; the message is its own where it had one."""


@dataclass(frozen=True, slots=True)
class GangSpec:
    """What all ranks of a replica are told at start. Crosses processes."""

    model: str | None
    dtype: str
    max_model_len: int | None
    page_size: int  # tokens
    budget: MemoryBudget  # of each rank
    num_threads: int
    tensor_size: int = 1
    num_stages: int = 1
    deadline_s: float = 60.0  # for any rank's part of one step
    start_s: float = 900.0  # until all have loaded their parts
    attention_backend: AttentionBackend = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"

    @property
    def size(self) -> int:
        return self.tensor_size * self.num_stages

    def place(self, rank: int) -> RankPosition:
        return RankPosition(rank, self.tensor_size, self.num_stages)

    @property
    def driver(self) -> int:
        return self.place(0).driver


@dataclass(frozen=True, slots=True)
class Address:
    """Where followers find their driver. The cookie keeps others out."""

    host: str
    port: int
    store_port: int
    cookie: bytes


class Channel:
    """Messages of a kind and its fields over a socket, whole and in order."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, kind: str, *fields: Any) -> None:
        data = msgpack.packb([kind, *fields])
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> tuple[str, list[Any]]:
        """EOFError or OSError: the other side is gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        kind, *fields = msgpack.unpackb(self._read(length))
        return kind, fields

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def own_address(self) -> str:
        return str(self._socket.getsockname()[0])

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return bytes(data)


class Phases:
    """Says of each phase of a rank's start how long it took, and what memory it has left in use."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._since = time.monotonic()

    def done(self, what: str) -> None:
        now = time.monotonic()
        self._say(f"{what} in {now - self._since:.1f} s, {used()}")
        self._since = now


def load_rank(
    spec: GangSpec, place: RankPosition, store: Any, say: Callable[[str], None]
) -> tuple[PagedModel, PageBudget]:
    """Joins the world of the gang, loads this rank's part of the model, and finds what room it has for pages.

    Raises:
        DoesNotFit: with how much is missing, and what would fit.
    """
    phases = Phases(say)
    torch.set_num_threads(spec.num_threads)  # Ray sets OMP_NUM_THREADS by its own accounting
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = timedelta(seconds=spec.start_s)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=start)
    links = Collectives(place, spec.deadline_s, "nccl" if device == "cuda" else "gloo")
    phases.done("joined the others")

    def loaded() -> None:
        phases.done("weights read")
        links.wait_for_all()  # reading has no deadline, the check that follows has

    path = resolve_model(spec.model)
    dtype = None if spec.dtype == "auto" else getattr(torch, spec.dtype)
    kv_bytes = spec.budget.known(device) or 0
    model = load_model(
        *(path, dtype, spec.max_model_len, device, links, kv_bytes, loaded),
        attention_backend=spec.attention_backend,
        kv_cache_dtype=spec.kv_cache_dtype,
    )
    phases.done("logits checked")
    room = count_pages_that_fit(model, spec.budget, spec.page_size)
    if spec.budget.known(device) is None:
        phases.done("memory measured")
    return model, room


def held(model: PagedModel) -> Held:
    """What this rank has of the model's keys and values."""
    found = []
    for number, shape in enumerate(model.layers, model.part.first_layer):
        start, stop, count = model.part.heads.get(number, (0, shape.num_kv_heads, shape.num_kv_heads))
        scales = model.scales[number - model.part.first_layer] if model.scales else ()
        powers = [power for scale in scales for power in exponents(scale)]
        found.append((number, start, stop, count, shape.key_dim, shape.value_dim, *powers))
    return found


def pool_spec(
    everyone: Sequence[Held], rank: int, model: PagedModel, name: str, page_size: int, pages: int
) -> PoolSpec:
    """The KV pool of `rank` as other replicas must know it; `everyone`: what each rank holds."""
    layers = {number: LayerShape(*shape) for ours in everyone for number, _, _, *shape in (row[:6] for row in ours)}
    dtype = str(model.kv_dtype).removeprefix("torch.")
    if model.scales:
        dtype += f", scales {_fingerprint_of_scales(everyone)}"
    return PoolSpec(
        model=name,
        dtype=dtype,
        itemsize=model.kv_dtype.itemsize,
        page_size=page_size,
        layers=tuple(layers[number] for number in sorted(layers)),
        shards=tuple(Shard(ours[0][0], tuple((start, stop) for _, start, stop, *_ in ours)) for ours in everyone),
        rank=rank,
        num_pages=pages,
    )


def _fingerprint_of_scales(everyone: Sequence[Held]) -> str:
    """The same for any division of a model among ranks, if those that share a head have it with the same scales."""
    heads: list[tuple[int, ...]] = []
    for number, start, stop, _, _, _, *powers in (row for ours in everyone for row in ours):
        keys, values = powers[: stop - start], powers[stop - start :]
        heads += zip([number] * (stop - start), range(start, stop), keys, values, strict=True)
    return fingerprint_of(heads)


# -- the driver ------------------------------------------------------------------------------------------------------


_NO_ROOM = PageBudget(0, 0)


@dataclass(slots=True, eq=False)
class _Follower:
    channel: Channel
    held: Held | None = None  # once it is ready
    room: PageBudget = _NO_ROOM
    blob: bytes | None = None  # of its dock


class Gang:
    """A driver's view of its followers. `on_lost` is told once, from any thread, why there is no gang any more."""

    def __init__(self, spec: GangSpec, host: str, on_lost: Callable[[str], None]) -> None:
        self.spec = spec
        self.place = spec.place(spec.driver)
        self.on_event: Callable[[int, Any], None] = lambda _rank, _event: None  # of a follower's dock
        self._on_lost = on_lost
        self._followers: dict[int, _Follower] = {}
        self._news = threading.Condition()
        self._why: str | None = None  # it is lost
        self._is_closing = False
        self._held: Held = ()
        self._room = _NO_ROOM
        self._listener = socket.create_server((host, 0))
        self._store: Any = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.address = Address(host, self._listener.getsockname()[1], self._store.port, secrets.token_bytes(16))
        threading.Thread(target=self._accept, name="gang listener", daemon=True).start()

    def load(self) -> PagedModel:
        """The driver's own part, loaded while the others load theirs. RankFailed: one of them could not."""
        _use_interface_of(self.address.host)
        model, self._room = load_rank(
            self.spec, self.place, self._store, lambda what: logger.info("%s: %s", self.place, what)
        )
        self._held = held(model)
        self._wait(lambda it: it.held is not None, "did not load its part")
        return model

    @property
    def room(self) -> PageBudget:
        """As many pages as every rank has room for, and the bytes of the largest of any rank."""
        rooms = [self._room, *(follower.room for follower in self._followers.values())]
        return PageBudget(min(room.num_pages for room in rooms), max(room.page_bytes for room in rooms))

    @property
    def everyone(self) -> list[Held]:
        """What each rank holds, by rank."""
        theirs = {rank: follower.held or () for rank, follower in self._followers.items()}
        return [theirs.get(rank, self._held) for rank in range(self.spec.size)]

    def begin(self, num_pages: int) -> None:
        """Every rank allocates its pool."""
        self.tell("begin", num_pages)

    def step(self, inputs: bytes) -> None:
        self.tell("step", inputs)

    def open_docks(self, name: str, role: str, transfer: dict[str, Any]) -> dict[int, bytes]:
        """Every follower opens a dock over its pool; the docks' blobs, by rank."""
        self.tell("open", self.everyone, name, role, transfer)
        self._wait(lambda it: it.blob is not None, "did not open its pool to transfers")
        return {rank: follower.blob or b"" for rank, follower in self._followers.items()}

    def tell(self, kind: str, *fields: Any) -> None:
        """One message to every follower. A follower that is gone is noticed elsewhere."""
        for follower in self._followers.values():
            with contextlib.suppress(OSError):
                follower.channel.send(kind, *fields)

    def fail(self, error: BaseException) -> None:
        """The driver's own part of a step raised: mostly because another rank is gone, which then says why."""
        with self._news:
            self._news.wait_for(lambda: self._why is not None, _LAST_WORDS_S)
        self._lost(f"{self.place}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends the followers after what they have been told."""
        self._is_closing = True
        self.tell("end")
        self._listener.close()
        for follower in self._followers.values():
            follower.channel.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _wait(self, is_done: Callable[[_Follower], bool], what: str) -> None:
        def missing() -> list[int]:
            followers = self._followers
            return [
                rank
                for rank in range(self.spec.size)
                if rank != self.place.rank and (rank not in followers or not is_done(followers[rank]))
            ]

        with self._news:
            self._news.wait_for(lambda: self._why is not None or not missing(), self.spec.start_s)
            if self._why is None and missing():
                self._why = f"{self.spec.place(missing()[0])} {what} within {self.spec.start_s:.0f} s"
            if self._why is not None:
                raise RankFailed(self._why)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while len(self._followers) < self.spec.size - 1:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._read, args=(Channel(connection),), name="rank", daemon=True).start()

    def _read(self, channel: Channel) -> None:
        """All that one follower says, until it is gone."""
        try:
            _, (cookie, rank) = channel.receive()
        except (EOFError, OSError, ValueError):
            return
        if not isinstance(cookie, bytes) or not hmac.compare_digest(cookie, self.address.cookie):
            channel.close()
            return
        place = self.spec.place(rank)
        follower = _Follower(channel)
        with self._news:
            self._followers[rank] = follower
        try:
            while True:
                kind, fields = channel.receive()
                with self._news:
                    match kind:
                        case "phase":
                            logger.info("%s: %s", place, fields[0])
                        case "ready":
                            follower.held, follower.room = fields[0], PageBudget(*fields[1])
                        case "opened":
                            follower.blob = fields[0]
                        case "failed":
                            logger.error("%s failed:\n%s", place, fields[1])
                            self._lost(f"{place}: {fields[0]}")
                    self._news.notify_all()
                if kind == "event":
                    self.on_event(rank, fields)
        except (EOFError, OSError):
            self._lost(f"{place}: its process has ended")

    def _lost(self, why: str) -> None:
        with self._news:
            if self._why is not None or self._is_closing:
                return
            self._why = why
            self._news.notify_all()
        self._on_lost(why)


_LAST_WORDS_S = 1.0


# -- a follower ------------------------------------------------------------------------------------------------------


class FollowerDock(Protocol):
    """What a follower does about KV transfers; see docks.py."""

    blob: bytes

    def obey(self, call: Sequence[Any]) -> None: ...


OpenDock: TypeAlias = Callable[[PagedModel, PoolSpec, str, Any, Callable[[Any], None]], FollowerDock]


def follow(spec: GangSpec, rank: int, address: Address, open_dock: OpenDock) -> None:
    """The life of a follower: loads its part and computes what it is told, until the driver ends it. When the driver
    is gone without a word the process ends on the spot, whatever it was doing.

    Raises:
        Exception: whatever went wrong here; the driver has been told.
    """
    channel = Channel(socket.create_connection((address.host, address.port), timeout=_CONNECT_S))
    channel.send("hello", address.cookie, rank)
    inbox = _listen(channel)
    try:
        _use_interface_of(channel.own_address)
        store = dist.TCPStore(address.host, address.store_port, is_master=False)  # type: ignore[attr-defined]
        model, room = load_rank(spec, spec.place(rank), store, lambda what: channel.send("phase", what))
        channel.send("ready", held(model), room)
        _obey(spec, rank, model, inbox, channel, open_dock)
    except Exception as error:
        with contextlib.suppress(OSError):
            channel.send("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
        raise


def _obey(
    spec: GangSpec,
    rank: int,
    model: PagedModel,
    inbox: queue.SimpleQueue[tuple[str, list[Any]]],
    channel: Channel,
    open_dock: OpenDock,
) -> None:
    num_pages = 0
    dock: FollowerDock | None = None
    while True:
        kind, fields = inbox.get()
        match kind:
            case "step":
                StepInputs.unpack(fields[0]).run(model)
            case "begin":
                num_pages = fields[0]
                model.allocate_pool(num_pages, spec.page_size)
            case "open":
                everyone, name, role, transfer = fields
                layout = pool_spec(everyone, rank, model, name, spec.page_size, num_pages)
                dock = open_dock(model, layout, role, transfer, lambda event: channel.send("event", event))
                channel.send("opened", dock.blob)
            case "dock":
                assert dock is not None
                model.wait()  # pages that are shipped must have been written
                dock.obey(fields)
            case "end":
                dist.destroy_process_group()
                return


def _listen(channel: Channel) -> queue.SimpleQueue[tuple[str, list[Any]]]:
    """The driver's messages in order, read by a thread of their own, which sees the driver's end at once."""
    inbox: queue.SimpleQueue[tuple[str, list[Any]]] = queue.SimpleQueue()

    def read() -> None:
        kind = ""
        try:
            while kind != "end":
                kind, fields = channel.receive()
                inbox.put((kind, fields))
        except (EOFError, OSError):
            os._exit(1)  # a collective that waits for the dead would hold the process and its memory until its deadline

    threading.Thread(target=read, name="driver", daemon=True).start()
    return inbox


_CONNECT_S = 60.0


def _use_interface_of(address: str) -> None:
    """gloo would look the host's own name up, which need not be an address that the other ranks reach."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    os.environ["GLOO_SOCKET_IFNAME"] = name
                    return


_SIOCGIFADDR = 0x8915
