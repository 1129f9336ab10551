"""Our own listener bounds what a connection costs before there is a request."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from crossdock.cluster.api import listener
from crossdock.cluster.api.listener import MAX_HEAD_BYTES, listen


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    body += message["body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def on(client: Callable[[int], Awaitable[None]]) -> None:
    async def run() -> None:
        with socket.socket() as it:
            it.bind(("127.0.0.1", 0))
            port: int = it.getsockname()[1]
        server = await listen(echo, "127.0.0.1", port)
        try:
            await client(port)
        finally:
            server.should_exit = True
            await asyncio.sleep(0.2)

    asyncio.run(run())


async def answer(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:
        return b"reset"


@pytest.mark.parametrize("line", [b"x: " + b"y" * 4000 + b"\r\n", b"z" * 4000], ids=["many headers", "one without end"])
def test_a_head_without_end_is_ended(line: bytes) -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n")
        sent = 0
        try:
            while sent < 50 * MAX_HEAD_BYTES and not reader.at_eof():
                writer.write(line)
                await writer.drain()
                sent += len(line)
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        assert sent < 50 * MAX_HEAD_BYTES
        assert (await answer(reader)).startswith((b"HTTP/1.1 431", b"reset"))

    on(client)


def test_bodies_and_many_requests_on_a_connection_are_not_heads() -> None:
    async def client(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for number in range(4):
                headers = {f"x-{place}": "v" * 1000 for place in range(50)}
                body = bytes([65 + number]) * (10 * MAX_HEAD_BYTES)
                assert (await http.post("/", content=body, headers=headers)).content == body

    on(client)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost:"], ids=["silent", "half a head"])
def test_who_is_slow_is_not_waited_for(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEAD_TIMEOUT_S", 0.2)

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await answer(reader) == b""

    on(client)
