"""An ingress's own listener: uvicorn on a port, with bounds on the cost of its connections."""

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn

from crossdock.cluster.api.http.connection import Connections

MOST_CONNECTIONS = 16384  # and at most half of the files that this process may open
_QUIET_S = 60.0
_MOST_TEXTS = 64


class RareWarnings(logging.Filter):
    """Lets each text of uvicorn's warnings through once a minute: a stranger causes one with each malformed request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next: dict[str, float] = {}  # seconds of the clock, by text

    def filter(self, record: logging.LogRecord) -> bool:
        now = self._clock()
        text = str(record.msg)
        if record.levelno != logging.WARNING:
            return True
        if now < self._next.get(text, now):
            return False
        if len(self._next) >= _MOST_TEXTS:
            self._next.clear()
        self._next[text] = now + _QUIET_S
        return True


_rare_warnings = RareWarnings()


class Listener:
    """A port that is listened on, until `close`. Belongs to one event loop."""

    def __init__(
        self, server: uvicorn.Server, listening: socket.socket, connections: Connections, serving: "asyncio.Task[None]"
    ) -> None:
        """`listening`: the socket of `server`, which runs in the task `serving`."""
        self._server = server
        self._listening = listening
        self._connections = connections
        self._serving = serving

    def check(self) -> None:
        """Raise RuntimeError where the port is not served any more, though this was not asked for."""
        if self._serving.done() and not self._connections.is_closing:
            raise RuntimeError("the port is not served any more") from self._serving.exception()

    async def close(self, seconds: float) -> bool:
        """Accept no further connection, and wait until every request has its answer, but at most `seconds`.

        Idle connections end at once. May be called again, to wait longer. Returns whether every request was answered.
        """
        if not self._connections.is_closing:
            await self._stop_accepting()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._serving), seconds)
        return self._serving.done()

    async def _stop_accepting(self) -> None:
        """Stop listening, and serve the connections that the kernel has accepted for this socket: it would reset them.

        A client that connected just now has a request on the way, though another ingress listens on the port as well.
        """
        waiting = []
        with suppress(BlockingIOError):
            while True:
                waiting.append(self._listening.accept()[0])
        for server in self._server.servers:
            server.close()
        self._connections.is_closing = True
        loop = asyncio.get_running_loop()
        for accepted in waiting:
            with suppress(OSError):  # its client has left
                await loop.connect_accepted_socket(self._make_protocol, accepted)
        self._server.should_exit = True

    def _make_protocol(self) -> asyncio.Protocol:
        config = self._server.config
        state = self._server.server_state
        return self._connections.protocol(config=config, server_state=state, app_state=self._server.lifespan.state)


async def listen(
    api: Any,
    host: str,
    port: int,
    *,
    keep_alive_s: int = 75,
    write_timeout_s: float = 60.0,
    has_keys: bool = False,
) -> "Listener":
    """Serve `api` on a port that several ingresses of this node may share.

    A token costs a quarter of the CPU time that it costs through Serve's proxy; on few cores the engine needs that
    time. Connections without a request end after `keep_alive_s` seconds: longer than the pools of clients keep them. A
    client that reads nothing of its answer for `write_timeout_s` is disconnected. `has_keys`: clients show API keys.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = Connections(min(MOST_CONNECTIONS, most_files // 2), write_timeout_s, has_keys=has_keys)
    config = uvicorn.Config(
        api,
        http=connections.protocol,  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        lifespan="off",
        timeout_keep_alive=keep_alive_s,
    )
    logging.getLogger("uvicorn.error").addFilter(_rare_warnings)  # once, however often this is called
    server = uvicorn.Server(config)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.01)
    return Listener(server, listener, connections, task)
