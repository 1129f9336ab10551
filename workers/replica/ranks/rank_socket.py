"""One connection between a driver and a follower: both authenticate, then whole messages pass, in order.

Not multiprocessing.connection: it has no deadline for a stranger's handshake, and its close wakes no reading thread.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass

_LENGTH = struct.Struct("!I")
_MAX_BYTES = 1 << 28  # of one message; the page table of 512 sequences of 1M tokens, in pages of 16, has 128 MiB
_NONCE_BYTES = 32
_HANDSHAKE_S = 60.0  # for all of it: on a busy machine the other side may stand still meanwhile
_CONNECT_S = 60.0
_SIDES = (b"driver", b"follower")


class AuthenticationFailed(ConnectionError):
    """The other side does not know the worker group's cookie."""


@dataclass(frozen=True, slots=True)
class WorkerGroupAddress:
    """Where followers find their driver. The cookie keeps other processes out."""

    host: str
    port: int
    store_port: int
    cookie: bytes


class RankSocket:
    """An authenticated connection that carries messages of at most 256 MiB. Threads may send at the same time."""

    def __init__(self, connection: socket.socket, cookie: bytes, *, is_driver: bool) -> None:
        """Authenticate both sides, before anything else is read. `is_driver`: this side is the driver.

        Raises:
            OSError: the connection ended or was silent too long; AuthenticationFailed: the cookies differ.
            EOFError: the other side has closed the connection.
        """
        self._socket = connection
        self._sending = threading.Lock()
        self._deadline: float | None = time.monotonic() + _HANDSHAKE_S  # of every read
        connection.settimeout(_HANDSHAKE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._authenticate(cookie, *(_SIDES if is_driver else reversed(_SIDES)))
        except BaseException:
            self.close()
            raise
        self._deadline = None
        connection.settimeout(None)

    @classmethod
    def connect(cls, address: WorkerGroupAddress, host: str | None = None) -> "RankSocket":
        """Connect a follower to its driver, from the follower's own address `host`; None: any."""
        source = None if host is None else (host, 0)
        connection = socket.create_connection((address.host, address.port), _CONNECT_S, source)
        return cls(connection, address.cookie, is_driver=False)

    def send(self, message: bytes) -> None:
        """Send one message. OSError: the other side is gone."""
        if len(message) > _MAX_BYTES:
            raise ValueError(f"a message of {len(message)} bytes; at most {_MAX_BYTES} can be sent")
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes:
        """Wait for one message. EOFError or OSError: the other side is gone, or not a rank."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _MAX_BYTES:
            raise OSError(f"a message of {length} bytes; at most {_MAX_BYTES} are taken")
        return self._read(length)

    def close(self) -> None:
        """End the connection. Threads that wait in `receive`, on either side, are woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def own_address(self) -> str:
        return str(self._socket.getsockname()[0])

    def _authenticate(self, cookie: bytes, own: bytes, other: bytes) -> None:
        """Prove the cookie to the other side, and check its proof: each side signs the other's nonce."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._socket.sendall(nonce)
        self._socket.sendall(hmac.digest(cookie, own + self._read(_NONCE_BYTES), "sha256"))
        if not hmac.compare_digest(self._read(32), hmac.digest(cookie, other + nonce, "sha256")):
            raise AuthenticationFailed("the other side does not have this worker group's cookie")

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            if self._deadline is not None:  # of the whole, not of each byte
                self._socket.settimeout(max(self._deadline - time.monotonic(), 0.001))
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return bytes(data)
