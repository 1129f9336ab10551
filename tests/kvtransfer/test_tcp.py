"""The TCP transport with peers that break its rules: strangers, broken frames, peers that vanish."""

import contextlib
import logging
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from itertools import count

import msgpack
import pytest

from crossdock.kvtransfer.layout import LayerShape, PoolLayout, PoolSpec
from crossdock.kvtransfer.messages import MAX_BYTES
from crossdock.kvtransfer.plan import ByteRange, GroupRanges
from crossdock.kvtransfer.tcp import TcpTransport
from crossdock.kvtransfer.transport import (
    Memory,
    Peer,
    PeerLost,
    Received,
    TransportEvent,
    WriteDone,
    WriteFailed,
)
from tests.waiting import PATIENCE_S

from .one_group import copies

SPEC = PoolSpec.whole(PoolLayout((LayerShape(2, 8, 8),), 4, 2), "m", "float16", 16)
PAGE_BYTES = SPEC.page_bytes
ROUNDS = 100  # a poll accepts one connection
WHOLE = ((ByteRange(0, 0, PAGE_BYTES),),)


class Side:
    """A transport, its pool, and its address. Polled by the test: no threads."""

    def __init__(self, name: str) -> None:
        self.transport = TcpTransport()
        self.pool = bytearray(SPEC.nbytes)
        self.peer = Peer(name, "tcp", self.transport.open(name, Memory.of(self.pool)), SPEC)
        self.events: list[TransportEvent] = []

    def connect(self, other: "Side", ranges: GroupRanges = WHOLE) -> None:
        self.transport.connect(other.peer, PAGE_BYTES, SPEC.num_pages, ranges)

    def dial(self) -> socket.socket:
        """Connect as a stranger would."""
        host, port, _ = msgpack.unpackb(self.peer.address)
        return socket.create_connection((host, port))

    def greeting(self, name: bytes = b"other", cookie: bytes | None = None) -> bytes:
        secret = msgpack.unpackb(self.peer.address)[2] if cookie is None else cookie
        return struct.pack("<8s32sH", b"crossdk1", secret, len(name)) + name


def poll(*sides: Side, until: type | None = None) -> None:
    """Poll all sides until one has an event of this type; without a type, often enough for all that has been sent."""
    deadline = time.monotonic() + PATIENCE_S
    for number in count():
        for side in sides:
            news = side.transport.poll(0.001)
            side.events.extend(news)
            if until and any(isinstance(event, until) for event in news):
                return
        if until is None and number == ROUNDS:
            return
        assert time.monotonic() < deadline, f"no {until}"


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    pair = Side("left"), Side("right")
    yield pair
    for side in pair:
        side.transport.close()


def test_write_lands_and_its_message_follows(sides: tuple[Side, Side]) -> None:
    left, right = sides
    left.connect(right)
    left.pool[:] = bytes(index % 251 for index in range(SPEC.nbytes))
    number = left.transport.write("right", copies([3, 4, 9], [7, 8, 1]), b"tag")
    poll(left, right, until=WriteDone)
    assert left.events == [WriteDone(number)]
    assert right.events == [Received("left", b"tag")]
    for source, target in ((3, 7), (4, 8), (9, 1)):
        begin, end = source * PAGE_BYTES, target * PAGE_BYTES
        assert right.pool[end : end + PAGE_BYTES] == left.pool[begin : begin + PAGE_BYTES]
    assert not any(right.pool[:PAGE_BYTES])


def test_ranges_within_a_page_land_at_their_offsets(sides: tuple[Side, Side]) -> None:
    left, right = sides
    left.connect(right, ((ByteRange(0, 10, 4), ByteRange(8, 0, 2)),))
    left.pool[PAGE_BYTES : PAGE_BYTES + 10] = b"abcdefghij"
    left.transport.write("right", copies([1], [2]), b"")
    poll(left, right, until=WriteDone)
    page = bytes(right.pool[2 * PAGE_BYTES : 3 * PAGE_BYTES])
    assert page == b"ij" + bytes(8) + b"abcd" + bytes(PAGE_BYTES - 14)


def test_messages_in_both_directions_keep_their_order(sides: tuple[Side, Side]) -> None:
    left, right = sides
    left.connect(right)
    right.connect(left)
    for number in range(200):
        left.transport.send("right", b"%d" % number)
        right.transport.send("left", b"%d" % -number)
    poll(left, right)
    assert [event.message for event in right.events if isinstance(event, Received)] == [b"%d" % n for n in range(200)]
    assert [event.message for event in left.events if isinstance(event, Received)] == [b"%d" % -n for n in range(200)]


@pytest.mark.parametrize("sent", ["a request of HTTP", "zeros", "another secret"])
def test_connection_without_the_secret_is_closed_and_counted(sides: tuple[Side, Side], sent: str) -> None:
    left, _ = sides
    foreign = left.greeting(cookie=b"\0" * 32) + struct.pack("<QII", 1, 1, 0)
    http = b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 4
    with left.dial() as stranger:
        stranger.sendall({"zeros": b"\0" * 100, "another secret": foreign}.get(sent, http))
        poll(left)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert (left.transport.num_strangers, left.events) == (1, [])


def test_greeting_that_came_while_this_process_stood_still_is_read_before_silent_strangers_are_closed(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, _ = sides
    with left.dial() as other, left.dial() as silent:
        poll(left)
        other.sendall(left.greeting() + struct.pack("<QII", 0, 0, 2) + b"hi")
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 600)
        poll(left, until=Received)
        poll(left)
        assert silent.recv(1) == b""
    assert (left.transport.num_strangers, left.events) == (1, [Received("other", b"hi")])


def test_silent_connections_beyond_the_limit_leave_place_for_a_peer(
    sides: tuple[Side, Side],
) -> None:
    left, right = sides
    silent = [left.dial() for _ in range(70)]
    poll(left)
    assert left.transport.num_strangers == 6
    right.connect(left)
    right.transport.send("left", b"hello")
    poll(left, right, until=Received)
    for number, stranger in enumerate(silent):
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            assert (stranger.recv(1), number < 7) == (b"", True)
        stranger.close()
    poll(left)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<QII", 1, 1, 0) + struct.pack("<QQ", SPEC.nbytes - 1, 2),
        struct.pack("<QII", 1, 1, 0) + struct.pack("<QQ", (1 << 64) - 1, 1),
        struct.pack("<QII", 1, 1 << 31, 0),
        struct.pack("<QII", 1, 0, MAX_BYTES + 1),
    ],
    ids=["beyond the pool", "far beyond", "too many ranges", "too long a message"],
)
def test_frame_out_of_bounds_ends_the_connection_and_changes_nothing(sides: tuple[Side, Side], frame: bytes) -> None:
    left, _ = sides
    with left.dial() as other:
        other.sendall(left.greeting() + frame + b"x" * 64)
        poll(left, until=PeerLost)
    assert [type(event) for event in left.events] == [PeerLost]
    assert not any(left.pool)


def test_half_a_write_delivers_no_message(sides: tuple[Side, Side]) -> None:
    left, _ = sides
    with left.dial() as other:
        frame = struct.pack("<QII", 1, 1, 3) + struct.pack("<QQ", 0, 100) + b"tag"
        other.sendall(left.greeting() + frame + b"x" * 99)
        poll(left)
        assert left.events == []
    poll(left, until=PeerLost)
    assert not any(isinstance(event, Received) for event in left.events)


def test_write_to_a_closed_port_fails_and_loses_the_peer(sides: tuple[Side, Side]) -> None:
    left, right = sides
    gone = Side("gone")
    left.connect(gone)
    gone.transport.close()
    number = left.transport.write("gone", copies([0], [0]), b"")
    poll(left, until=PeerLost)
    assert [type(event) for event in left.events] == [WriteFailed, PeerLost]
    assert left.events[0].write == number  # type: ignore[union-attr]
    left.transport.send("gone", b"")  # no event: the loss has been reported
    assert left.transport.write("gone", copies([0], [0]), b"") == number + 1
    left.events.clear()
    poll(left, until=WriteFailed)
    left.connect(right)
    left.transport.send("right", b"still here")
    poll(left, right, until=Received)


def test_late_connection_of_a_lost_peer_is_refused_until_connect(sides: tuple[Side, Side]) -> None:
    """A write that a lost peer had begun must not arrive over another connection."""
    left, _ = sides
    with left.dial() as other:
        other.sendall(left.greeting(b"right") + struct.pack("<QII", 0, 0, 1) + b"a")
        poll(left, until=Received)
    poll(left, until=PeerLost)
    with left.dial() as late:
        late.sendall(left.greeting(b"right") + struct.pack("<QII", 0, 0, 1) + b"b")
        poll(left)
    assert sum(isinstance(event, Received) for event in left.events) == 1
    left.connect(sides[1])
    with left.dial() as again:
        again.sendall(left.greeting(b"right") + struct.pack("<QII", 0, 0, 1) + b"c")
        poll(left, until=Received)


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Leave this process no file descriptor to open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 64, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def test_process_without_descriptors_goes_on_and_accepts_when_it_has_some(
    sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    left, right = sides
    left.connect(right)
    right.connect(left)
    left.transport.send("right", b"before")
    poll(left, right, until=Received)
    with left.dial() as waiting, caplog.at_level(logging.ERROR):
        with no_descriptors_left():
            end = time.monotonic() + 1.5  # three pauses
            while time.monotonic() < end:
                left.transport.send("right", b"meanwhile")
                poll(left, right, until=Received)
            assert len(caplog.records) == 1
            assert "accepts no connections for now" in caplog.text
        waiting.sendall(left.greeting(b"waiting") + struct.pack("<QII", 0, 0, 2) + b"hi")
        poll(left, until=Received)
    assert left.events[-1] == Received("waiting", b"hi")
    assert left.transport.is_accepting


def test_process_without_descriptors_waits_between_two_attempts_to_accept(sides: tuple[Side, Side]) -> None:
    left, _ = sides
    with left.dial(), no_descriptors_left():
        assert left.transport.is_accepting
        left.transport.poll(1.0)
        assert not left.transport.is_accepting, "the connection that waits would end every poll at once"


def test_process_without_descriptors_fails_a_write_to_a_new_peer(sides: tuple[Side, Side]) -> None:
    left, right = sides
    left.connect(right)
    with no_descriptors_left():
        left.transport.write("right", copies([0], [0]), b"")
        poll(left, right, until=PeerLost)
    assert [type(event) for event in left.events] == [WriteFailed, PeerLost]


@pytest.mark.parametrize(
    "address",
    [
        b"",
        b"\xc1",
        b"\x93",
        msgpack.packb(["127.0.0.1", 1 << 20, bytes(32)]),
        msgpack.packb(["127.0.0.1", -1, bytes(32)]),
        msgpack.packb(["127.0.0.1", "x", bytes(32)]),
        msgpack.packb(["127.0.0.1", 1, "no bytes"]),
        msgpack.packb([None, 1, bytes(32)]),
        msgpack.packb(["\ud800".encode("utf-8", "surrogatepass"), 1, bytes(32)]),
        msgpack.packb(["x" * 300, 1, bytes(32)]),
    ],
)
def test_address_of_another_process_that_makes_no_sense_loses_that_peer(
    sides: tuple[Side, Side], address: bytes
) -> None:
    left, _ = sides
    left.transport.connect(Peer("foreign", "tcp", address, SPEC), PAGE_BYTES, SPEC.num_pages, WHOLE)
    left.transport.send("foreign", b"hello")
    poll(left, until=PeerLost)
    assert [type(event) for event in left.events] == [PeerLost]


def test_departed_peers_leave_nothing_but_a_bounded_list_of_names(sides: tuple[Side, Side]) -> None:
    left, _ = sides
    for number in range(1500):
        peer = Peer(f"peer-{number}", "tcp", left.peer.address, SPEC)
        left.transport.connect(peer, PAGE_BYTES, SPEC.num_pages, WHOLE)
        left.transport.disconnect(peer.name)
    sizes = {name: len(value) for name, value in vars(left.transport).items() if hasattr(value, "__len__")}
    assert {name for name, size in sizes.items() if size} == {"_host", "_cookie", "_memory", "_name", "_refused"}
    assert sizes["_refused"] == 1024


def test_many_wakes_end_a_poll_at_once(sides: tuple[Side, Side]) -> None:
    left, _ = sides
    for _ in range(5_000):  # more than the socket takes
        left.transport.wake()
    begin = time.monotonic()
    left.transport.poll(300.0)
    assert time.monotonic() - begin < 240, "the poll lasted as long as it may"


def test_open_with_gpu_memory_raises() -> None:
    transport = TcpTransport()
    with pytest.raises(ValueError, match="not a GPU's"):
        transport.open("left", Memory(0, 100, cuda_device=0))
    transport.close()


def test_transport_on_any_host_raises() -> None:
    with pytest.raises(ValueError, match="name the address at which others reach"):
        TcpTransport("0.0.0.0")


def test_transport_on_ipv6_advertises_its_host() -> None:
    with contextlib.suppress(OSError):
        transport = TcpTransport("::1")
        assert msgpack.unpackb(transport.open("left", Memory.of(bytearray(8))))[0] == "::1"
        transport.close()
