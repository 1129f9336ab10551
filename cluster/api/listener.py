"""An ingress's own listener: uvicorn, with bounds on the cost of a connection before there is a request."""

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10  # of request line and headers together; uvicorn has no limit with this parser
HEAD_TIMEOUT_S = 30.0  # in which they must have arrived
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHead(HttpToolsProtocol):
    """Ends connections whose request line, headers or trailers are too large, or whose next request does not come."""

    _head_bytes = 0
    _is_in_head = False
    _is_in_body = False
    _has_body_come = False  # since data came before
    _bytes_beside_body = 0  # in data without any part of a body: trailers
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._wait_for_head()
        self._head_bytes, self._is_in_head = 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._end_head()
        self._is_in_body, self._bytes_beside_body = True, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_body_come = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
        elif self._is_in_body:
            self._bytes_beside_body = 0 if self._has_body_come else self._bytes_beside_body + len(data)
            self._has_body_come = False
        elif self._late is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()  # an empty line: it has ended the wait for the next request that uvicorn began
        if max(self._head_bytes, self._bytes_beside_body) > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def _wait_for_head(self) -> None:
        self._end_head()
        self._late = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _end_head(self) -> None:
        self._is_in_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None


async def listen(api: Any, host: str, port: int, keep_alive_s: int = 75) -> uvicorn.Server:
    """Serve `api` on a port that several ingresses of this node may share.

    A token costs a quarter of the CPU time that it costs through Serve's proxy; on few cores the engine needs that
    time. Connections without a request end after `keep_alive_s` seconds: longer than the pools of clients keep them.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    config = uvicorn.Config(
        api,
        http=BoundedHead,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=keep_alive_s,
    )
    server = uvicorn.Server(config)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.01)
    return server
