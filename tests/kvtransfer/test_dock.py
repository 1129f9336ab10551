"""A dock raises callers' errors at the call, drops malformed messages, and ends. test_transports.py has transfers."""

import logging
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import msgpack

from crossdock.kvtransfer.calls import (
    MAX_RESULT_BYTES,
    CancelExpectCall,
    CancelShipCall,
    ChunkCall,
    ExpectCall,
    FinishCall,
    GrantCall,
    PeerDeadCall,
    ShipCall,
)
from crossdock.kvtransfer.dock import Dock
from crossdock.kvtransfer.events import Arrived, Event, Failed, Reason, Released, WriterStopped
from crossdock.kvtransfer.layout import IncompatiblePools, LayerShape, PoolLayout, PoolSpec
from crossdock.kvtransfer.messages import Abort, Hello, encode
from crossdock.kvtransfer.tcp import TcpTransport
from crossdock.kvtransfer.transport import Memory, Peer, TransportEvent

from .one_group import whole
from .shards import shard_model

LAYERS = (LayerShape(2, 8, 8),)
SPEC = PoolSpec.whole(PoolLayout(LAYERS, 4, 2), "m", "float16", 16)
PEER = msgpack.decode(msgpack.encode(Peer("n", "tcp", b"", SPEC)))


class Transport(TcpTransport):
    """Notes when the dock's thread, at its end, closes it."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = threading.Event()
        self.num_failures = 0  # polls that will fail

    def poll(self, seconds: float) -> list[TransportEvent]:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("the device is busy")
        return super().poll(seconds)

    def close(self) -> None:
        super().close()
        self.closed.set()


class Local:
    """A dock in this process, with its pool and its events."""

    def __init__(self, spec: PoolSpec = SPEC, on_event: Any = None, grace_seconds: float = 1.0, **others: Any) -> None:
        self.pool = bytearray(spec.nbytes)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.transport = Transport()
        options = {"grace_seconds": grace_seconds} | others
        self.dock = Dock(self.transport, Memory.of(self.pool), spec, "test", on_event or self.events.put, **options)

    def next(self, kind: type) -> Event:
        while not isinstance(event := self.events.get(timeout=240), kind):
            pass
        return event


@pytest.fixture
def pair() -> Iterator[tuple[Local, Local]]:
    docks = Local(), Local()
    yield docks
    for local in docks:
        local.dock.close()


def send(source: Local, target: Local, result: bytes = b"") -> None:
    target.dock.call(ExpectCall("r", 1, (source.dock.blob,), 5))
    source.dock.call(ShipCall("r", 1, (target.dock.blob,), 5))
    target.dock.call(GrantCall("r", 1, 0, whole([3])))
    source.dock.call(FinishCall("r", whole([1]), 2, result))


def test_transfer_between_two_docks_in_one_process_arrives(pair: tuple[Local, Local]) -> None:
    source, target = pair
    source.pool[SPEC.page_bytes : 2 * SPEC.page_bytes] = b"\x07" * SPEC.page_bytes
    result = b"s" * MAX_RESULT_BYTES
    send(source, target, result)
    arrived = target.next(Arrived)
    assert isinstance(arrived, Arrived)
    assert arrived.result == result
    source.next(Released)
    assert source.dock.drain(5)
    assert target.dock.drain(5)
    assert target.pool[3 * SPEC.page_bytes :][: SPEC.page_bytes] == b"\x07" * SPEC.page_bytes


def test_pages_are_written_to_once_their_owner_has_let_them_be_granted() -> None:
    held = list[tuple[list[int], bytes]]()
    target = Local(before_grant=lambda pages: held.append((list(pages), bytes(target.pool))))
    source = Local()
    source.pool[:] = b"\x07" * len(source.pool)
    target.dock.call(ExpectCall("r", 1, (source.dock.blob,), 5))
    source.dock.call(ShipCall("r", 1, (target.dock.blob,), 5))
    source.dock.call(FinishCall("r", whole([1]), 2, b""))
    target.dock.call(GrantCall("r", 1, 0, whole([3])))
    target.next(Arrived)
    source.next(Released)
    source.dock.close()
    target.dock.close()
    assert held == [([3], bytes(SPEC.nbytes))]
    assert any(target.pool)


def test_call_with_bad_arguments_raises_at_once(pair: tuple[Local, Local]) -> None:
    dock, other = pair[0].dock, pair[1].dock
    with pytest.raises(ValueError, match="num_tokens must be within 2 pages of 4, not 9"):
        dock.call(ChunkCall("r", whole([1, 2]), 9))
    with pytest.raises(ValueError, match="pages must be within 0 and 15"):
        dock.call(FinishCall("r", whole([16]), 1))
    with pytest.raises(ValueError, match="result has"):
        dock.call(FinishCall("r", whole([1]), 1, b"x" * (MAX_RESULT_BYTES + 1)))
    for pages in ([1, 1], [-1], [16]):
        with pytest.raises(ValueError, match="pages must be different ones within 0 and 15"):
            dock.call(GrantCall("r", 1, 0, whole(pages)))
    with pytest.raises(ValueError, match="no blobs"):
        dock.call(ShipCall("r", 1, (), 5))
    with pytest.raises(ValueError, match="not a dock's blob"):
        dock.call(ShipCall("r", 1, (b"noise",), 5))
    nixl = replace(Peer.unpack(other.blob), transport="nixl").pack()
    with pytest.raises(ValueError, match="uses nixl, this dock tcp"):
        dock.call(ExpectCall("r", 1, (nixl,), 5))
    assert dock.counts().num_open == 0


def test_call_with_a_blob_of_another_pool_raises_at_once(pair: tuple[Local, Local]) -> None:
    other = replace(Peer.unpack(pair[1].dock.blob), spec=replace(SPEC, model="m2")).pack()
    for call in (ShipCall, ExpectCall):
        with pytest.raises(IncompatiblePools, match=r"(?s)differ in model.*m +m2 <- differs"):
            pair[0].dock.call(call("r", 1, (other,), 5))


def test_expect_without_the_blob_of_a_source_rank_raises(pair: tuple[Local, Local]) -> None:
    spec = replace(SPEC, shards=shard_model(LAYERS, 2))
    half = replace(Peer.unpack(pair[1].dock.blob), spec=spec).pack()
    with pytest.raises(IncompatiblePools, match=r"ranks \(0, 1\) write to this one; blobs of 1 were given"):
        pair[0].dock.call(ExpectCall("r", 1, (half,), 5))


def test_dock_with_too_little_memory_raises() -> None:
    transport = TcpTransport()
    with pytest.raises(ValueError, match=f"memory has 10 bytes; 16 pages need {SPEC.nbytes}"):
        Dock(transport, Memory.of(bytearray(10)), SPEC, "test", print)
    transport.close()


def with_spec(**fields: Any) -> bytes:
    return msgpack.encode([4, PEER | {"spec": PEER["spec"] | fields}])


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (b"", "truncated"),
        (b"\xc1", "malformed"),
        (msgpack.encode([3, "n", "tcp", b"", []]), "version 3 of another release; this is 4"),  # as it was packed once
        (msgpack.encode([5, {}, "more"]), "version 5 of another release; this is 4"),
        (msgpack.encode([4, {"name": "n", "transport": "tcp", "address": b""}]), "spec"),
        (with_spec(itemsize="2"), "itemsize"),
        (with_spec(shards=[{"first_layer": 0, "heads": [[0, 9]]}]), "heads"),
    ],
)
def test_malformed_blob_raises(blob: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=f"not a dock's blob: .*{reason}"):
        Peer.unpack(blob)


def test_malformed_messages_are_dropped_and_counted(
    pair: tuple[Local, Local], caplog: pytest.LogCaptureFixture
) -> None:
    source, target = pair
    other = TcpTransport()
    other.open("noisy", Memory.of(bytearray(8)))
    other.connect(Peer.unpack(target.dock.blob), 8, 1, [])
    lying = encode(Abort("r", 1, source.dock.blob))  # with the blob of another dock
    with caplog.at_level(logging.ERROR):
        for message in (b"noise", encode(Hello("r", -1)), lying):
            other.send(target.dock.name, message)
        while target.dock.counts().num_malformed < 3:
            other.poll(0.01)
    send(source, target)
    target.next(Arrived)
    other.close()


def test_messages_about_unknown_transfers_are_counted(pair: tuple[Local, Local]) -> None:
    source, target = pair
    target.dock.call(ExpectCall("r", 1, (source.dock.blob,), 5))
    target.dock.call(GrantCall("r", 1, 0, whole([1])))
    while source.dock.counts().num_unknown == 0:
        pass
    target.dock.call(CancelExpectCall("r", 1))


def test_call_after_close_raises() -> None:
    local = Local()
    local.dock.close()
    with pytest.raises(RuntimeError, match="the dock is closed"):
        local.dock.call(ChunkCall("r", whole([1]), 1))
    assert not local.dock.drain(0.1) or local.dock.counts().num_open == 0


def test_dock_whose_callback_fails_ends_and_its_next_call_raises(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Event) -> None:
        raise KeyError("the owner's mistake")

    local = Local(on_event=broken)
    local.dock.call(CancelShipCall("r", 1))
    assert local.transport.closed.wait(240), "the dock's thread closes its transport at its end"
    with pytest.raises(RuntimeError, match="the dock is closed") as error:
        local.dock.call(ChunkCall("r", whole([1]), 1))
    assert isinstance(error.value.__cause__, KeyError)
    assert "has failed" in caplog.text
    local.dock.close()


def test_dock_whose_polls_fail_for_a_while_goes_on(pair: tuple[Local, Local], caplog: pytest.LogCaptureFixture) -> None:
    source, target = pair
    source.transport.num_failures = 2
    send(source, target)
    target.next(Arrived)
    assert source.transport.num_failures == 0
    assert caplog.text.count("could not be polled") == 1
    assert source.dock.is_alive


def test_dock_whose_transport_is_beyond_repair_ends(caplog: pytest.LogCaptureFixture) -> None:
    local = Local()
    local.transport.num_failures = 1_000_000
    local.transport.wake()
    assert local.transport.closed.wait(240)
    assert not local.dock.is_alive
    assert "has failed" in caplog.text
    local.dock.close()


def test_message_too_large_to_send_fails_its_transfer_alone() -> None:
    tiny = PoolSpec.whole(PoolLayout((LayerShape(1, 1, 1),), 1, 1), "m", "float16", 300_000)
    source, target = Local(tiny), Local(tiny)
    target.dock.call(ExpectCall("r", 1, (source.dock.blob,), 0.2))
    target.dock.call(GrantCall("r", 1, 0, whole(range(300_000))))
    assert target.next(Failed) == Failed("r", 1, False, Reason.DEADLINE, "")
    target.next(WriterStopped)
    target.dock.call(ExpectCall("small", 1, (source.dock.blob,), 60))
    source.dock.call(ShipCall("small", 1, (target.dock.blob,), 60))
    target.dock.call(GrantCall("small", 1, 0, whole([3])))
    source.dock.call(FinishCall("small", whole([1]), 1, b""))
    target.next(Arrived)
    for local in (source, target):
        local.dock.close()


def test_dock_that_forgot_a_peer_exchanges_pages_with_it_again(pair: tuple[Local, Local]) -> None:
    source, target = pair
    send(source, target)
    target.next(Arrived)
    for number in range(600):
        stranger = replace(Peer.unpack(target.dock.blob), name=f"gone-{number}").pack()
        for local in pair:
            local.dock.call(ShipCall(f"r{number}", 1, (stranger,), 0.01))
            local.dock.call(CancelShipCall(f"r{number}", 1))
            local.next(Released)
    assert target.dock.name not in source.dock._core._peers
    source.dock.call(ShipCall("again", 1, (target.dock.blob,), 60))
    target.dock.call(ExpectCall("again", 1, (source.dock.blob,), 60))
    target.dock.call(GrantCall("again", 1, 0, whole([3])))
    source.dock.call(FinishCall("again", whole([1]), 1, b""))
    assert target.next(Arrived).request == "again"


@pytest.mark.parametrize("is_known_before", [False, True])
def test_transfer_with_a_dead_peer_ends_and_frees_its_pages(is_known_before: bool) -> None:
    """The death may be known before the transfer begins, or afterwards."""
    one, gone = Local(grace_seconds=0.05), Local()
    gone.dock.close()
    if is_known_before:
        one.dock.call(PeerDeadCall(gone.dock.blob))
    one.dock.call(ExpectCall("in", 1, (gone.dock.blob,), 600))
    one.dock.call(GrantCall("in", 1, 0, whole([3])))
    one.dock.call(ShipCall("out", 1, (gone.dock.blob,), 600))
    one.dock.call(CancelExpectCall("in", 1))
    if not is_known_before:
        one.dock.call(PeerDeadCall(gone.dock.blob))
    ended: set[type] = set()
    while ended != {WriterStopped, Released}:
        ended |= {type(one.events.get(timeout=240))} & {WriterStopped, Released}
    assert one.dock.drain(5)
    one.dock.close()
