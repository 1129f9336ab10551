"""A listener that closes drops no request: neither those that run, nor those of connections made just now."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from crossdock.cluster.api.http import connection
from crossdock.cluster.api.http.listener import Listener, listen
from tests.cluster.api.http.test_listener import LOOPS, answer, echo, opened
from tests.cluster.ports import free_port

pytestmark = LOOPS


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLOSING_S", 0.3)


REQUEST = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nhi"


@asynccontextmanager
async def closing() -> AsyncIterator[tuple[Listener, int, asyncio.Event]]:
    """Open a listener that the client closes. Its app answers once the event is set."""
    may_answer = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await may_answer.wait()
        await echo(scope, receive, send)

    port = free_port()
    server = await listen(app, "127.0.0.1", port)
    async with asyncio.timeout(240):
        yield server, port, may_answer
    may_answer.set()
    assert await server.close(240)


async def test_closing_listener_lets_the_running_request_end_and_takes_no_other() -> None:
    async with closing() as (server, port, may_answer):
        reader, writer = await opened(port, REQUEST)
        await asyncio.sleep(0.1)
        assert not await server.close(0.3), "the request still runs"
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        ending = asyncio.ensure_future(server.close(240))
        may_answer.set()
        received = await answer(reader)
        assert received.startswith(b"HTTP/1.1 200")
        assert received.endswith(b"hi")
        assert b"connection: close" in received.lower()
        writer.close()
        assert await ending


async def test_closing_listener_ends_an_idle_connection_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLOSING_S", 1000.0)
    async with closing() as (server, port, may_answer):
        may_answer.set()
        reader, writer = await opened(port, REQUEST)
        await reader.readuntil(b"hi")
        assert await server.close(240)
        assert await answer(reader) == b""
        writer.close()


async def test_closing_listener_serves_connections_that_only_the_kernel_has_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are not reset, whether their request is there or follows."""
    monkeypatch.setattr(connection, "CLOSING_S", 60.0)  # a busy machine needs time until the other requests follow
    async with closing() as (server, port, may_answer):
        may_answer.set()
        wires = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]  # the event loop has no turn here
        for wire in wires[::2]:
            wire.sendall(REQUEST)
        ending = asyncio.ensure_future(server.close(240))
        await asyncio.sleep(0.2)
        for wire in wires[1::2]:
            wire.sendall(REQUEST)
        for wire in wires:
            reader, writer = await asyncio.open_connection(sock=wire)
            assert (await answer(reader)).startswith(b"HTTP/1.1 200")
            writer.close()
        assert await ending


async def test_closing_listener_does_not_wait_long_for_a_connection_without_a_request() -> None:
    async with closing() as (server, port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.1)
        assert await server.close(240)
        assert await answer(reader) == b""
        writer.close()
