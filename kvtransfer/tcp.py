"""Pages over plain TCP, in pure Python: works wherever two processes reach each other, from and into ordinary memory.

Each side connects to the other in order to send, so frames go one way on a connection and acknowledgements the other.
A frame is a header, a table of byte ranges, a message and the bytes of the ranges. These bytes go from pool to pool
without another copy in Python. A process that connects sends the secret from the listener's blob first. A write is done
when its acknowledgement comes: then, and only then, its pages lie in the target's pool.
"""

import contextlib
import errno
import hmac
import logging
import math
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import msgpack

from crossdock.kvtransfer import messages
from crossdock.kvtransfer.fence import RecentNames
from crossdock.kvtransfer.plan import GroupRanges, PageCopies
from crossdock.kvtransfer.tcp_connection import ConnectionClosed, Parser, TcpConnection, family_of, tune
from crossdock.kvtransfer.transport import (
    Memory,
    Peer,
    PeerLost,
    Received,
    TransportEvent,
    WriteDone,
    WriteFailed,
    host_view,
)

logger = logging.getLogger(__name__)

_GREETING = struct.Struct("<8s32sH")  # magic, cookie, length of the name that follows
_MAGIC = b"crossdk1"
_FRAME = struct.Struct("<QII")  # number of the write, ranges, bytes of the message
_RANGE = struct.Struct("<QQ")  # offset in the pool, length
_ACK = struct.Struct("<Q")
_MAX_RANGES = 1 << 18
_MAX_NAME = 256
_MAX_STRANGERS = 64  # connections that have not sent the secret yet
_GREETING_SECONDS = 30.0  # for a peer's first bytes: the process of a busy machine may stand still meanwhile
_ACCEPT_PAUSE_SECONDS = 0.5  # after a connection could not be accepted: without a pause each poll would try at once


@dataclass(slots=True, eq=False)
class _TcpRoute:
    """How this pool's pages map onto a peer's, and the connection to it."""

    peer: Peer
    page_bytes: int
    ranges: GroupRanges
    connection: TcpConnection | None = None
    open_writes: set[int] = field(default_factory=set)


class TcpTransport:
    """Listens on any free port of `host`, the address at which other replicas reach this host."""

    kind = "tcp"
    lost_is_fence = True
    busy_seconds = math.inf
    idle_seconds = math.inf

    def __init__(self, host: str = "127.0.0.1") -> None:
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(f"host {host!r} means any: name the address at which others reach this host")
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=128)
        self._listener.setblocking(False)
        self._host = host
        self._cookie = secrets.token_bytes(32)
        self._name = ""
        self._memory = memoryview(b"")
        self._routes: dict[str, _TcpRoute] = {}
        self._incoming: set[TcpConnection] = set()
        self._refused = RecentNames()  # lost peers: a late connection of theirs must not bring a stale write
        self._accepts_at = 0.0  # the listener waits until then
        self._has_warned = False  # whether the log says that connections cannot be accepted
        self._events: list[TransportEvent] = []
        self._num_writes = 0
        self.num_strangers = 0  # connections closed because the secret was wrong or did not come
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakened = socket.socketpair()
        for end in (self._waker, self._wakened):
            end.setblocking(False)
        self._selector.register(self._wakened, selectors.EVENT_READ, self._drain_waker)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    # -- Transport -------------------------------------------------------------------------------------------------

    def open(self, name: str, memory: Memory) -> bytes:
        self._name, self._memory = name, host_view(memory)
        return msgpack.encode([self._host, self._listener.getsockname()[1], self._cookie])

    def connect(self, peer: Peer, page_bytes: int, num_pages: int, ranges: GroupRanges) -> None:
        self._refused.discard(peer.name)
        if peer.name not in self._routes:
            self._routes[peer.name] = _TcpRoute(peer, page_bytes, ranges)

    def write(self, peer: str, copies: Sequence[PageCopies], message: bytes) -> int:
        self._num_writes += 1
        route = self._routes.get(peer)
        if route is None:
            self._events.append(WriteFailed(self._num_writes, f"{peer} is not connected"))
            return self._num_writes
        route.open_writes.add(self._num_writes)
        parts = _merged(route, copies)
        table = b"".join(_RANGE.pack(target, length) for _, target, length in parts)
        data = [self._memory[source : source + length] for source, _, length in parts]
        self._enqueue(route, [_FRAME.pack(self._num_writes, len(parts), len(message)) + table + message, *data])
        return self._num_writes

    def send(self, peer: str, message: bytes) -> None:
        if peer in self._routes:
            self._enqueue(self._routes[peer], [_FRAME.pack(0, 0, len(message)) + message])

    def poll(self, seconds: float) -> list[TransportEvent]:
        timeout = 0.0 if self._events else None if seconds == math.inf else max(0.0, seconds)
        if any(not connection.peer for connection in self._incoming):
            timeout = min(_GREETING_SECONDS, math.inf if timeout is None else timeout)
        if not self.is_accepting:
            left = self._accepts_at - time.monotonic()
            timeout = min(max(left, 0.0), math.inf if timeout is None else timeout)
            if left <= 0:
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for key, ready in self._selector.select(timeout):
            handle: Callable[[int], None] = key.data
            handle(ready)
        self._close_silent_strangers()  # not before what they have sent is read: this thread may have stood still
        events = self._events
        self._events = []
        return events

    @property
    def is_accepting(self) -> bool:
        """Whether new connections are accepted. After an accept that failed, none is accepted for a while."""
        return self._listener in self._selector.get_map()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full of earlier wakes, so the poll will end; or closed meanwhile
            self._waker.send(b"\0")

    def disconnect(self, peer: str, *, is_idle: bool = False) -> None:
        route = self._routes.pop(peer, None)
        if route:
            self._fail_writes(route, "disconnected")
            if route.connection:
                self._close(route.connection)
        for connection in [c for c in self._incoming if c.peer == peer]:
            self._close(connection)
        if is_idle:
            self._refused.discard(peer)
        else:
            self._refused.add(peer)

    def close(self) -> None:
        for connection in [*self._incoming, *(r.connection for r in self._routes.values() if r.connection)]:
            self._close(connection)
        self._selector.close()
        for end in (self._listener, self._waker, self._wakened):
            end.close()
        self._memory.release()

    # -- connections -----------------------------------------------------------------------------------------------

    def _enqueue(self, route: _TcpRoute, parts: Sequence[bytes | memoryview]) -> None:
        try:
            connection = route.connection or self._dial(route)
        except Exception as error:  # of any kind: another process made the address
            self._lose(route.peer.name, f"{route.peer.name}: {type(error).__name__}: {error}")
            return
        connection.queue.extend(memoryview(part) for part in parts)
        self._watch(connection)

    def _dial(self, route: _TcpRoute) -> TcpConnection:
        host, port, cookie = msgpack.decode(route.peer.address)
        name = self._name.encode()
        greeting = _GREETING.pack(_MAGIC, cookie, len(name)) + name
        sock = socket.socket(family_of(host), socket.SOCK_STREAM)
        connection = TcpConnection(sock, route.peer.name, self._acknowledgements(route), is_connecting=True)
        connection.queue.append(memoryview(greeting))
        try:
            tune(sock)
            code = sock.connect_ex((host, port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, errno.errorcode.get(code, "cannot connect"))
            self._selector.register(sock, selectors.EVENT_WRITE, lambda ready: self._serve(connection, ready))
        except BaseException:
            sock.close()
            raise
        route.connection = connection
        return connection

    def _accept(self, _ready: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has gone meanwhile
        except OSError as error:  # no file descriptor, or no memory, is left: neither is a reason to end the dock
            self._pause_accepting(error)
            return
        self._has_warned = False
        strangers = [connection for connection in self._incoming if not connection.peer]
        if len(strangers) >= _MAX_STRANGERS:  # a peer sends the secret at once: the oldest is none
            self.num_strangers += 1
            self._close(min(strangers, key=lambda connection: connection.since))
        connection = TcpConnection(sock, "", iter(()), since=time.monotonic())
        connection.parser = self._frames(connection)
        try:
            tune(sock)
            self._selector.register(sock, selectors.EVENT_READ, lambda ready: self._serve(connection, ready))
        except OSError:
            self.num_strangers += 1
            sock.close()
            return
        self._incoming.add(connection)

    def _pause_accepting(self, error: OSError) -> None:
        self._selector.unregister(self._listener)
        self._accepts_at = time.monotonic() + _ACCEPT_PAUSE_SECONDS
        if not self._has_warned:
            self._has_warned = True
            logger.error("%s accepts no connections for now, and tries again: %s", self._name, error)

    def _serve(self, connection: TcpConnection, ready: int) -> None:
        if connection.socket.fileno() < 0:
            return  # closed by an earlier event of this very poll
        try:
            if connection.is_connecting:
                code = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, errno.errorcode.get(code, "cannot connect"))
                connection.is_connecting = False
            if ready & selectors.EVENT_WRITE:
                connection.flush()
            if ready & selectors.EVENT_READ:
                connection.fill()
            self._watch(connection)
        except Exception as error:
            if not isinstance(error, OSError | ConnectionClosed):
                logger.exception("a connection of %s is closed", connection.peer or "a stranger")
            if connection.peer:
                self._lose(connection.peer, f"{connection.peer}: {error}")
            else:
                self.num_strangers += 1
                self._close(connection)

    def _watch(self, connection: TcpConnection) -> None:
        writing = selectors.EVENT_WRITE if connection.queue or connection.is_connecting else 0
        reading = 0 if connection.is_connecting else selectors.EVENT_READ
        key = self._selector.get_key(connection.socket)
        if key.events != reading | writing:
            self._selector.modify(connection.socket, reading | writing, key.data)

    def _lose(self, peer: str, detail: str) -> None:
        """Close both directions at once: after this, no byte from `peer` can reach the pool."""
        route = self._routes.get(peer)
        if route:
            self._fail_writes(route, detail)
        self.disconnect(peer)
        self._events.append(PeerLost(peer, detail))

    def _fail_writes(self, route: _TcpRoute, detail: str) -> None:
        self._events.extend(WriteFailed(number, detail) for number in sorted(route.open_writes))
        route.open_writes.clear()

    def _close(self, connection: TcpConnection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.queue.clear()
        connection.wanted.clear()
        self._incoming.discard(connection)

    def _close_silent_strangers(self) -> None:
        too_old = time.monotonic() - _GREETING_SECONDS
        for connection in [c for c in self._incoming if not c.peer and c.since < too_old]:
            self.num_strangers += 1
            self._close(connection)

    def _drain_waker(self, _ready: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakened.recv(4096):
                pass

    # -- parsers: they yield the buffers to fill next, and act when these are full ----------------------------------

    def _acknowledgements(self, route: _TcpRoute) -> Parser:
        """Parse what comes back on a connection to a peer."""
        ack = bytearray(_ACK.size)
        while True:
            yield [memoryview(ack)]
            (number,) = _ACK.unpack(ack)
            if number not in route.open_writes:
                raise ConnectionClosed("acknowledged a write that is not open")
            route.open_writes.remove(number)
            self._events.append(WriteDone(number))

    def _frames(self, connection: TcpConnection) -> Parser:
        """Parse the greeting and the frames of a process that connected to this one."""
        greeting = bytearray(_GREETING.size)
        yield [memoryview(greeting)]
        magic, cookie, name_length = _GREETING.unpack(greeting)
        if magic != _MAGIC or not hmac.compare_digest(cookie, self._cookie) or not 0 < name_length <= _MAX_NAME:
            raise ConnectionClosed("no valid greeting")
        name = bytearray(name_length)
        yield [memoryview(name)]
        peer = name.decode(errors="replace")
        if peer in self._refused:
            raise ConnectionClosed(f"{peer} was lost")
        connection.peer = peer
        header = bytearray(_FRAME.size)
        while True:
            yield [memoryview(header)]
            number, num_ranges, message_length = _FRAME.unpack(header)
            if num_ranges > _MAX_RANGES or message_length > messages.MAX_BYTES:
                raise ConnectionClosed(f"a frame of {num_ranges} ranges and a message of {message_length} bytes")
            table = bytearray(num_ranges * _RANGE.size)
            message = bytearray(message_length)
            yield [memoryview(table), memoryview(message)]
            views = []
            for offset, length in _RANGE.iter_unpack(table):
                if offset + length > self._memory.nbytes:
                    raise ConnectionClosed(
                        f"a write to {offset}, {length} bytes, beyond the pool's {self._memory.nbytes}"
                    )
                views.append(self._memory[offset : offset + length])
            if views:
                yield views
            self._events.append(Received(peer, bytes(message)))
            if number:
                connection.queue.append(memoryview(_ACK.pack(number)))
                connection.flush()


def _merged(route: _TcpRoute, copies: Sequence[PageCopies]) -> list[tuple[int, int, int]]:
    """Return (offset in this pool, offset in the peer's, length); ranges that are neighbours on both sides are one."""
    merged: list[tuple[int, int, int]] = []
    target_page_bytes = route.peer.spec.page_bytes
    parts = (
        (source_page * route.page_bytes + part.source, target_page * target_page_bytes + part.target, part.length)
        for copy in copies
        for source_page, target_page in zip(copy.source_pages, copy.target_pages, strict=True)
        for part in route.ranges[copy.group]
    )
    for source, target, part_length in parts:
        if merged:
            begin, other, length = merged[-1]
            if begin + length == source and other + length == target:
                merged[-1] = begin, other, length + part_length
                continue
        merged.append((source, target, part_length))
    return merged
