"""The listener bounds the cost of a connection before there is a request."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from crossdock.cluster.api import listener
from crossdock.cluster.api.listener import MAX_HEAD_BYTES, listen
from tests.cluster.ports import free_port


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    body += message["body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def with_listener(client: Callable[[int], Awaitable[None]]) -> None:
    """Run `client` with the port of a listener."""

    async def main() -> None:
        port = free_port()
        server = await listen(echo, "127.0.0.1", port)
        try:
            await client(port)
        finally:
            server.should_exit = True
            await asyncio.sleep(0.2)

    asyncio.run(main())


async def answer(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:
        return b"reset"


def assert_refused_in_time(opening: bytes, line: bytes) -> None:
    """Assert that a client that sends `line` again and again after `opening` is refused before it has sent much."""

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(opening)
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

    with_listener(client)


@pytest.mark.parametrize(
    "line", [b"x: " + b"y" * 4000 + b"\r\n", b"z" * 4000], ids=["many headers", "one endless header"]
)
def test_endless_head_is_refused(line: bytes) -> None:
    assert_refused_in_time(b"GET / HTTP/1.1\r\nhost: a\r\n", line)


@pytest.mark.parametrize(
    "line", [b"x: " + b"y" * 4000 + b"\r\n", b"z" * 4000], ids=["many trailers", "one endless trailer"]
)
def test_endless_trailers_are_refused(line: bytes) -> None:
    """Headers may also follow a body that comes in chunks."""
    assert_refused_in_time(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n", line)


def test_body_in_many_small_chunks_with_trailers_is_read_whole() -> None:
    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"1\r\nx\r\n" * (2 * MAX_HEAD_BYTES) + b"0\r\nx-trailer: v\r\n\r\n")
        assert (await answer(reader)).endswith(b"\r\n\r\n" + b"x" * (2 * MAX_HEAD_BYTES))

    with_listener(client)


def test_idle_connection_ends_after_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty line, which HTTP allows before a request, begins none: the next request must still come in time."""
    monkeypatch.setattr(listener, "HEAD_TIMEOUT_S", 0.2)

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.write(b"\r\n")
        assert await answer(reader) == b""

    with_listener(client)


def test_bodies_and_several_requests_do_not_count_as_head() -> None:
    async def client(port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for number in range(4):
                headers = {f"x-{place}": "v" * 1000 for place in range(50)}
                body = bytes([65 + number]) * (10 * MAX_HEAD_BYTES)
                assert (await http.post("/", content=body, headers=headers)).content == body

    with_listener(client)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost:"], ids=["silent", "half a head"])
def test_slow_head_is_refused(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEAD_TIMEOUT_S", 0.2)

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await answer(reader) == b""

    with_listener(client)
