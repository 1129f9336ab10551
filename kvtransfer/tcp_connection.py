"""One socket of the TCP transport: bytes from a queue go out, bytes that come in fill the buffers of a parser."""

import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

_BATCH_BYTES = 1 << 20  # per system call; 4 MiB saved no CPU time (benchmarks/page_transfers.py, 2 cores, loopback)
_BATCH_BUFFERS = 64
_TURN_BYTES = 8 << 20  # per connection and poll, so that other connections get their turn

Parser: TypeAlias = Iterator[list[memoryview]]


class ConnectionClosed(Exception):
    """The other side closed the connection, or broke the rules of this one."""


@dataclass(slots=True, eq=False)
class TcpConnection:
    """A socket: bytes from a queue go out, bytes that come in fill the buffers that a parser asks for in turn."""

    socket: socket.socket
    peer: str  # "" until the greeting
    parser: Parser
    wanted: deque[memoryview] = field(default_factory=deque)
    queue: deque[memoryview] = field(default_factory=deque)
    is_connecting: bool = False
    since: float = 0.0

    def flush(self) -> None:
        """Send from the queue as much as the socket takes."""
        for _ in range(_TURN_BYTES // _BATCH_BYTES):
            if not self.queue:
                return
            try:
                num_bytes = self.socket.sendmsg(_batch(self.queue))
            except BlockingIOError:
                return
            _advance(self.queue, num_bytes)

    def fill(self) -> None:
        """Read the bytes that are there and let the parser act on them.

        Raises:
            ConnectionClosed: the stream has ended, or the parser refuses it.
        """
        num_left = _TURN_BYTES
        self._parse()
        while num_left > 0:
            try:
                num_bytes = self.socket.recvmsg_into(_batch(self.wanted))[0]
            except BlockingIOError:
                return
            if num_bytes == 0:
                raise ConnectionClosed("closed by the other side")
            _advance(self.wanted, num_bytes)
            self._parse()
            num_left -= num_bytes
        # Bytes that are left keep the socket readable: the next poll comes back to it.

    def _parse(self) -> None:
        while not self.wanted:
            self.wanted.extend(view for view in next(self.parser) if view.nbytes)


def _batch(views: deque[memoryview]) -> list[memoryview]:
    """Return the first views, as many as one system call should take."""
    batch = []
    num_bytes = 0
    for view in views:
        batch.append(view)
        num_bytes += view.nbytes
        if num_bytes >= _BATCH_BYTES or len(batch) == _BATCH_BUFFERS:
            break
    return batch


def _advance(views: deque[memoryview], num_bytes: int) -> None:
    """Remove the first `num_bytes` bytes."""
    while num_bytes:
        if num_bytes < views[0].nbytes:
            views[0] = views[0][num_bytes:]
            return
        num_bytes -= views.popleft().nbytes


def tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that vanished sends no FIN: keepalive finds it. A write to it meets the transfer's own deadline.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
