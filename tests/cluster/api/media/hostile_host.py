"""A host on the loopback network that serves pictures badly, names that lead to it and elsewhere, and a witness."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

from tests.cluster.api.media.picture_models import encoded, picture
from tests.cluster.api.media.video_models import video_file

HOST = "127.0.0.2"  # stands for a public address in these tests; the witness listens on 127.0.0.1
NAMES: dict[str, Sequence[str]] = {
    "pictures.example": [HOST],
    "a.cdn.example": [HOST],
    "xn--fa-hia.example": [HOST],  # faß.example; an older encoding of names makes fass.example of the same
    "private.example": ["127.0.0.1"],
    "ten.example": ["10.0.0.1"],
    "six.example": ["::1"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "nat.example": ["64:ff9b::7f00:1"],
    "sixtofour.example": ["2002:7f00:1::"],
    "local.example": ["fe80::1%lo"],
    "unique.example": ["fd00:ec2::254"],
    "metadata.example": ["169.254.169.254"],
    "azure.example": ["168.63.129.16"],
    "shared.example": ["100.100.100.200"],
    "zero.example": ["0.0.0.0"],
    "broadcast.example": ["255.255.255.255"],
    "multicast.example": ["224.0.0.1"],
    "mixed.example": [HOST, "127.0.0.1"],
    "none.example": [],
}


class Names:
    """A resolver with the names above. `rebind.example` has another address at every second look."""

    def __init__(self) -> None:
        self.looks: Counter[str] = Counter()

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        self.looks[host] += 1
        if host == "rebind.example":
            return [HOST if self.looks[host] % 2 else "127.0.0.1"]
        if host in ("127.0.0.1", "localhost"):
            return ["127.0.0.1"]
        if host not in NAMES:
            raise OSError("no such host")
        return NAMES[host]


class Witness:
    """Listens on 127.0.0.1 and counts connections: there must be none."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]

    def num_connections(self) -> int:
        """Return how many connections were made, one that waits to be accepted included."""
        count = 0
        with suppress(BlockingIOError):
            while True:
                self._socket.accept()[0].close()
                count += 1
        return count

    def close(self) -> None:
        self._socket.close()


class HostileHost:
    """Answers each request by its path: see `_answer`."""

    def __init__(self) -> None:
        self._socket = socket.create_server((HOST, 0))
        self.port: int = self._socket.getsockname()[1]
        self.requests: list[str] = []
        self.opens = threading.Event()  # /held waits for it
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.opens.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(240)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                wire, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=[wire], daemon=True).start()

    def _serve(self, wire: socket.socket) -> None:
        with wire, suppress(OSError):
            wire.settimeout(240)
            head = b""
            while b"\r\n\r\n" not in head:
                received = wire.recv(65536)
                if not received:
                    return
                head += received
            self.requests.append(head.decode("latin-1"))
            self._answer(wire, urlsplit(head.split(b" ")[1].decode("latin-1")))

    def _answer(self, wire: socket.socket, url: object) -> None:
        path, query = url.path, parse_qs(url.query)  # type: ignore[attr-defined]
        match path:
            case "/dog.png":
                _send(wire, encoded(picture()))
            case "/walk.mp4":
                _send(wire, video_file())
            case "/to":
                location = unquote(query["u"][0])
                wire.sendall(f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode())
            case "/endless":
                wire.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    wire.sendall(b"x" * 65536)
            case "/slow":
                wire.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                for _ in range(100):
                    wire.sendall(b"x")
                    time.sleep(0.1)
            case "/held":
                self.opens.wait(240)
                _send(wire, encoded(picture()), status=query.get("status", ["200"])[0])
            case "/silent":
                time.sleep(5)
            case "/headers":
                wire.sendall(b"HTTP/1.1 200 OK\r\n")
                while True:
                    wire.sendall(b"X-A: " + b"a" * 4096 + b"\r\n")
            case "/long":
                wire.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")
            case "/cut":
                wire.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nshort")
            case "/gzip":
                _send(wire, b"\x1f\x8b", "Content-Encoding: gzip\r\n")
            case "/html":
                _send(wire, b"<html><title>TOP-SECRET</title></html>", "Content-Type: text/html\r\n")
            case "/empty":
                _send(wire, b"")
            case "/garbage":
                wire.sendall(b"\x00\x01\x02 TOP-SECRET\r\n\r\n")
            case _:
                wire.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 10\r\n\r\nTOP-SECRET")


def _send(wire: socket.socket, body: bytes, headers: str = "", status: str = "200") -> None:
    wire.sendall(f"HTTP/1.1 {status} OK\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body)
