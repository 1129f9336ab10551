"""The listener bounds the cost of a connection before there is a request."""

import asyncio
import json
import logging
import random
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from crossdock.cluster.api.http import connection, listener
from crossdock.cluster.api.http.connection import MAX_HEAD_BYTES
from crossdock.cluster.api.http.listener import listen
from tests.cluster.api.unread import unread
from tests.cluster.ports import free_port

# For what depends on transports: Ray's actors run on uvloop where it is installed.
LOOPS = pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": each}) for each in (False, True)])


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    body += message.get("body", b"")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def listening(app: Any = echo, write_timeout_s: float = 60, keep_alive_s: int = 75) -> AsyncIterator[int]:
    """Open a listener, and yield its port. Connections that stay open end with the loop."""
    asyncio.get_running_loop().set_exception_handler(None)  # a loop logs a closed socket that was to accept
    port = free_port()
    server = await listen(app, "127.0.0.1", port, keep_alive_s=keep_alive_s, write_timeout_s=write_timeout_s)
    try:
        async with asyncio.timeout(240):
            yield port
    finally:
        await server.close(0)


async def answer(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 240)
    except ConnectionResetError:
        return b"reset"


async def opened(port: int, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection and send bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return reader, writer


async def exchange(port: int, sent: bytes) -> bytes:
    """Send bytes, and return all that comes until the server ends the connection."""
    reader, writer = await opened(port, sent)
    try:
        return await answer(reader)
    finally:
        writer.close()


def assert_error(received: bytes, status: int, code: str) -> str:
    """Check an answer in OpenAI's error shape that ends the connection; return its message."""
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0].startswith(f"http/1.1 {status} ")
    assert {"connection: close", "content-type: application/json", f"content-length: {len(body)}"} <= set(lines[1:])
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert isinstance(error["message"], str)
    return error["message"]


@pytest.mark.parametrize("line", [b"x: " + b"y" * 4000 + b"\r\n", b"z" * 4000], ids=["many lines", "one endless line"])
@pytest.mark.parametrize("is_body_before", [False, True], ids=["headers", "trailers"])
async def test_endless_headers_are_refused_before_the_client_has_sent_much(line: bytes, is_body_before: bool) -> None:
    """Headers may also follow a body that comes in chunks."""
    opening = b"GET / HTTP/1.1\r\nhost: a\r\n"
    if is_body_before:
        opening = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    async with listening() as port:
        reader, writer = await opened(port, opening)
        answering = asyncio.ensure_future(answer(reader))
        sent = 0
        while sent < 50 * MAX_HEAD_BYTES and not answering.done():
            writer.write(line)
            await writer.drain()
            sent += len(line)
            await asyncio.sleep(0)
        assert sent < 50 * MAX_HEAD_BYTES
        assert_error(await answering, 431, "headers_too_large")


async def test_body_in_many_small_chunks_with_trailers_is_read_whole() -> None:
    async with listening() as port:
        head = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        reader, writer = await opened(port, head)
        writer.write(b"1\r\nx\r\n" * (2 * MAX_HEAD_BYTES) + b"0\r\nx-trailer: v\r\n\r\n")
        assert (await answer(reader)).endswith(b"\r\n\r\n" + b"x" * (2 * MAX_HEAD_BYTES))


async def test_idle_connection_ends_after_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty line, which HTTP allows before a request, begins none: the next request must still come in time."""
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for seconds in (3600.0, 0.2):
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", seconds)  # of the next head
            writer.write(b"\r\n")
        assert await answer(reader) == b""


async def test_bodies_and_several_requests_do_not_count_as_head() -> None:
    async with listening() as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=240) as http:
        for number in range(4):
            headers = {f"x-{place}": "v" * 1000 for place in range(50)}
            body = bytes([65 + number]) * (10 * MAX_HEAD_BYTES)
            assert (await http.post("/", content=body, headers=headers)).content == body


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost:"], ids=["silent", "half a head"])
async def test_slow_head_is_refused(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    async with listening() as port:
        reader, _ = await opened(port, sent)
        assert await answer(reader) == b""


POST = b"POST / HTTP/1.1\r\nhost: a\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


NO_REQUESTS: list[tuple[bytes, int, str]] = [
    (b"garbage\r\n\r\n", 400, "invalid_http"),
    (b"\x16\x03\x01\x02\x00\x01\x00", 400, "invalid_http"),  # TLS
    (b"\0" * 50, 400, "invalid_http"),
    (b"GET\r\n\r\n", 400, "invalid_http"),
    (b"FOO / HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    (b"get / HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    (b"GET /a b HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    (b"GET \xff\xfe HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    (b"GET http:// HTTP/1.1\r\nhost: a\r\n\r\n", 400, "invalid_http"),
    (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 400, "invalid_http"),
    (b"GET / http/1.1\r\nhost: a\r\n\r\n", 400, "invalid_http"),
    (b"GET / HTTP/9.9\r\n\r\n", 505, "http_version_not_supported"),
    (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 505, "http_version_not_supported"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version_not_supported"),
    (b"GET / HTTP/1.1\r\nhost a\r\n\r\n", 400, "invalid_http"),
    (b"GET / HTTP/1.1\r\n: x\r\n\r\n", 400, "invalid_http"),
    (b"GET / HTTP/1.1\r\nx: a\0b\r\n\r\n", 400, "invalid_http"),
    (b"GET / HTTP/1.1\nhost: a\n\n", 400, "invalid_http"),
    (b"GET / HTTP/1.1\r\nx: a\r\n folded\r\n\r\n", 400, "invalid_http"),
    (POST + b"content-length: -1\r\n\r\n", 400, "invalid_http"),
    (POST + b"content-length: 5, 5\r\n\r\n", 400, "invalid_http"),
    (POST + b"content-length: " + b"9" * 30 + b"\r\n\r\n", 400, "invalid_http"),
    (POST + b"content-length: 4\r\ncontent-length: 5\r\n\r\n", 400, "invalid_http"),
    (POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
    (POST + b"transfer-encoding: gzip\r\n\r\n", 400, "invalid_http"),
    (CHUNKED + b"zz\r\n", 400, "invalid_http"),
    (CHUNKED + b"5\r\nabcdefgh\r\n", 400, "invalid_http"),
    (CHUNKED + b"f" * 18 + b"\r\n", 400, "invalid_http"),
    (POST + b"x: " + b"a" * 100_000 + b"\r\n\r\n", 431, "headers_too_large"),
    (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 431, "headers_too_large"),
    (POST + b"x: a\r\n" * 15_000 + b"\r\n", 431, "headers_too_large"),
    (CHUNKED + b"0\r\n" + b"x: a\r\n" * 15_000 + b"\r\n", 431, "headers_too_large"),
]


async def test_bytes_that_are_no_request_are_refused_in_openais_shape() -> None:
    """… as the first on a connection, and behind requests, which are answered first."""
    get = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    async with listening() as port:
        for sent, status, code in NO_REQUESTS:
            assert len(assert_error(await exchange(port, sent), status, code)) < 200
            received = await exchange(port, get + get + sent)
            assert received.startswith(b"HTTP/1.1 200 OK\r\n")
            assert_error(received[received.rindex(b"HTTP/1.1 %d " % status) :], status, code)
            assert received.count(b"\r\n\r\n") == 3


async def test_request_with_broken_body_is_aborted() -> None:
    """The application sees a client that has left."""
    messages: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while not messages or messages[-1] != "http.disconnect":
            messages.append((await receive())["type"])

    async with listening(app) as port:
        reader, writer = await opened(port, CHUNKED + b"3\r\nabc\r\n")
        while not messages:
            await asyncio.sleep(0.001)
        writer.write(b"no chunk\r\n")
        assert "chunk size" in assert_error(await answer(reader), 400, "invalid_http")
        while messages[-1] != "http.disconnect":
            await asyncio.sleep(0.001)


async def test_garbage_behind_a_request_leaves_its_stream_whole() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"100")]})
        for _ in range(100):
            await asyncio.sleep(0.001)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with listening(app) as port:
        reader, writer = await opened(port, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readuntil(b"xxx")
        writer.write(b"\0garbage" * 100_000)
        received = await answer(reader)
        assert received.startswith(b"x" * 97)
        assert_error(received[97:], 400, "invalid_http")


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answer without reading the body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


@LOOPS
@pytest.mark.parametrize("header", [b"connection: close\r\n", b""])
async def test_client_that_sends_before_it_reads_gets_the_early_answer(header: bytes) -> None:
    """Without a delay the server would reset the connection, and the client could not even send its body."""
    async with listening(refuse) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        size = 20 << 20
        writer.write(POST + header + b"content-length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            writer.write(b"a" * (1 << 16))
            await writer.drain()
        if not header:
            writer.write_eof()
        received = await answer(reader)
        assert received.startswith(b"HTTP/1.1 401 ")
        assert received.endswith(b"\r\n\r\nno")


async def test_body_that_goes_on_after_its_answer_does_not_keep_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.5)
    async with listening(refuse) as port:
        reader, writer = await opened(port, POST + b"content-length: 1000000\r\n\r\n")
        await reader.readuntil(b"no")
        while not reader.at_eof():
            try:
                writer.write(b"a")
                await asyncio.wait_for(reader.read(1), 0.05)
            except TimeoutError:
                pass
            except ConnectionError:
                break


async def send_for_ever(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0.001)


@LOOPS
@pytest.mark.parametrize(("seconds", "num_bytes"), [(0.3, 1 << 40), (1000.0, 1 << 20)], ids=["silent", "many bytes"])
async def test_refused_connection_ends_though_the_client_keeps_it(
    seconds: float, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", seconds)
    monkeypatch.setattr(connection, "LINGER_BYTES", num_bytes)
    async with listening() as port:
        reader, writer = await opened(port, b"garbage\r\n\r\n")
        assert_error(await answer(reader), 400, "invalid_http")  # the end of its sending side
        with pytest.raises(ConnectionError):
            await send_for_ever(writer, b"a" * (1 << 16 if seconds > 1 else 1))


def unread_large(port: int) -> socket.socket:
    """Ask for an answer that is larger than all buffers. Return the connection, which does not block."""
    wire = unread(port, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    wire.setblocking(False)
    return wire


class EndlessAnswer:
    """Sends without end, and counts."""

    def __init__(self) -> None:
        self.sent = 0
        self.ends: list[bool] = []  # whether the application learned that the client had left

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
            self.sent += 10_000
            await asyncio.sleep(0)
        self.ends.append(gone.result()["type"] == "http.disconnect")


@LOOPS
async def test_client_that_reads_nothing_is_disconnected_and_its_request_ends() -> None:
    app = EndlessAnswer()
    async with listening(app, write_timeout_s=0.3) as port:
        with unread_large(port):
            while not app.ends:
                await asyncio.sleep(0.01)
        assert app.ends == [True]
        assert app.sent < 50 << 20  # no more than the kernel's buffers hold: this process kept none


@LOOPS
@pytest.mark.parametrize("header", [b"", b"connection: close\r\n"])
async def test_finished_answer_that_is_not_read_does_not_keep_the_connection(
    header: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few bytes of it wait in this process, and all of the kernel's buffers are full."""
    connections: list[connection.Connections] = []
    create = connection.Connections.__init__

    def created(self: connection.Connections, most: int, write_timeout_s: float, *, has_keys: bool) -> None:
        create(self, most, write_timeout_s, has_keys=has_keys)
        connections.append(self)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        """Write until something waits in this process, then end."""
        (protocol,) = connections[-1]._owners
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not protocol.transport.get_write_buffer_size():
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    monkeypatch.setattr(connection.Connections, "__init__", created)
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(connection, "LINGER_S", 0.3)
    async with listening(app, write_timeout_s=0.3, keep_alive_s=0) as port:
        with unread(port, b"GET / HTTP/1.1\r\nhost: a\r\n" + header + b"\r\n"):
            while not connections[-1]._owners:
                await asyncio.sleep(0.001)
            while connections[-1]._owners:
                await asyncio.sleep(0.01)


async def test_client_that_reads_slowly_stays() -> None:
    """It reads for longer than the timeout. A try in which the machine stopped for half of the timeout says nothing."""
    timeout_s = 1.0
    for _ in range(20):
        app = EndlessAnswer()
        longest_pause = 0.0
        async with listening(app, write_timeout_s=timeout_s) as port:
            loop = asyncio.get_running_loop()
            with unread_large(port) as wire:
                began = newest = loop.time()
                while loop.time() < began + 1.5 * timeout_s and not app.ends:
                    await asyncio.sleep(0.05)
                    read = 0
                    while read < 200_000 and not app.ends:
                        read += len(await asyncio.wait_for(loop.sock_recv(wire, 65536), 240))
                    longest_pause = max(longest_pause, loop.time() - newest)
                    newest = loop.time()
                stays = app.ends == []
        if longest_pause < timeout_s / 2:
            break
    assert stays


async def test_waiting_connections_make_way_for_new_ones_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 3)
    async with listening() as port:
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await asyncio.sleep(0.05)
        await exchange(port, b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert await answer(streams[0][0]) in (b"", b"reset")
        for reader, writer in streams[1:]:
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_connection_beyond_the_bound_is_refused_while_all_others_have_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 2)
    async with listening() as port:
        busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in busy:
            writer.write(POST + b"content-length: 3\r\n\r\n")
        await asyncio.sleep(0.05)
        assert_error(await exchange(port, b""), 503, "too_many_connections")
        for reader, writer in busy:
            writer.write(b"abc")
            assert (await reader.readuntil(b"abc")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("wish", [b"websocket", b"h2c", b"TLS/1.0"])
@pytest.mark.parametrize("size", [1, 40, 1 << 20], ids=["byte by byte", "in pieces", "at once"])
async def test_wish_for_an_upgrade_is_ignored_and_the_request_answered_with_its_body(wish: bytes, size: int) -> None:
    """Java's clients and `curl --http2` ask for h2c with every request: bodies, pipelines and keep-alive stay."""
    wishes = b"host: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAMAAABk\r\n" % wish
    requests = (
        b"POST / HTTP/1.1\r\n" + wishes + b"content-length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\n" + wishes + b"transfer-encoding: chunked\r\n\r\n2\r\nde\r\n0\r\nx: y\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + wishes + b"\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 2\r\n\r\nfg",
    )
    async with listening() as port:
        reader, writer = await opened(port, b"")
        sent = b"".join(requests)
        for start in range(0, len(sent), size):
            writer.write(sent[start : start + size])
            await asyncio.sleep(0)
        received = await answer(reader)
    answers = received.split(b"HTTP/1.1 200 OK\r\n")
    assert [each.rpartition(b"\r\n\r\n")[2] for each in answers[1:]] == [b"abc", b"de", b"", b"fg"]
    assert b"connection: close" in answers[4]
    assert received.count(b"connection: close") == 1, "a wish for an upgrade ends no connection"


async def test_wish_for_an_upgrade_keeps_the_bounds_of_a_head_and_the_refusals_of_a_body() -> None:
    wishes = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close, upgrade\r\nupgrade: h2c\r\n"
    async with listening() as port:
        received = await exchange(port, wishes + b"content-length: 3\r\n\r\nabc")
        assert received.startswith(b"HTTP/1.1 200 ")
        assert received.endswith(b"abc")
        assert_error(await exchange(port, wishes + b"content-length: a\r\n\r\n"), 400, "invalid_http")
        assert_error(await exchange(port, wishes + b"transfer-encoding: chunked\r\n\r\nno"), 400, "invalid_http")
        assert_error(await exchange(port, wishes + b"x: " + b"y" * 2 * MAX_HEAD_BYTES), 431, "headers_too_large")


async def test_answer_without_a_length_ends_with_the_connection_for_a_client_of_http_1_0() -> None:
    """Such a client knows no chunks. nginx speaks 1.0 to the servers behind it unless told otherwise."""

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        for part in (b"ab", b"", b"cde"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with listening(stream) as port:
        head, _, body = (await exchange(port, b"GET / HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head
        assert body == b"abcde"
        head, _, body = (await exchange(port, b"HEAD / HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert (b"transfer-encoding" in head.lower(), body) == (False, b"")
    async with listening() as port:
        received = await exchange(port, b"POST / HTTP/1.0\r\ncontent-length: 3\r\n\r\nabc")
        assert b"content-length: 3\r\n" in received
        assert received.endswith(b"\r\n\r\nabc")


@pytest.mark.parametrize("header", [b"HTTP/1.0\r\n", b"HTTP/1.1\r\nconnection: close\r\n"])
async def test_requests_behind_the_last_one_are_not_begun(header: bytes, caplog: pytest.LogCaptureFixture) -> None:
    begun = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal begun
        begun += 1
        await asyncio.sleep(0.01)
        await echo(scope, receive, send)

    async with listening(app) as port:
        received = await exchange(
            port, b"GET / " + header + b"host: a\r\n\r\n" + b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 3
        )
        assert received.startswith(b"HTTP/1.1 200 ")
        assert (begun, received.count(b"HTTP/1.1")) == (1, 1)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_answer_that_began_before_its_body_broke_is_sent_whole(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"b"})

    async with listening(app) as port:
        reader, writer = await opened(port, CHUNKED + b"3\r\nabc\r\n")
        await reader.readuntil(b"\r\n\r\na")
        writer.write(b"no chunk\r\n")
        assert await answer(reader) == b"b"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def mutated(choice: random.Random) -> bytes:
    """Return requests, one after the other, with some of their bytes changed, dropped or repeated."""
    parts = [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", POST + b"content-length: 3\r\n\r\nabc", b"\r\n"]
    parts += [CHUNKED + b"3\r\nabc\r\n0\r\nx: y\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n"]
    data = bytearray(b"".join(choice.choices(parts, k=choice.randint(1, 4))))
    for _ in range(choice.randint(0, 4)):
        place = choice.randrange(len(data))
        match choice.randrange(4):
            case 0:
                data[place] = choice.choice(b"\0\r\n :;0Hf\xff")
            case 1:
                del data[place : place + choice.randint(1, 9)]
            case 2:
                data[place:place] = data[place : place + choice.randint(1, 40)]
            case _:
                data[place:place] = b"a" * choice.choice((1, 20_000, 70_000))
        data = data or bytearray(b"\r\n")
    return bytes(data)


async def test_any_bytes_get_answers_in_openais_shape_or_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.5)
    failures: list[Any] = []

    async def send(port: int, number: int) -> None:
        reader, writer = await opened(port, mutated(random.Random(number)))
        writer.write_eof()
        received = await answer(reader)
        writer.close()
        while received:
            head, _, rest = received.partition(b"\r\n\r\n")
            end = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
            assert len(rest) >= end
            if not head.startswith(b"HTTP/1.1 200 "):
                body = head + b"\r\n\r\n" + rest[:end]
                assert_error(body, int(head.split()[1]), json.loads(rest[:end])["error"]["code"])
            received = rest[end:]

    async with listening() as port:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        for first in range(0, 400, 40):
            await asyncio.gather(*(send(port, number) for number in range(first, first + 40)))
        monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 3600.0)
        assert (await exchange(port, b"GET / HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert failures == []
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_warning_of_malformed_requests_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "uvicorn.error")
    async with listening() as port:
        for _ in range(5):
            assert b" 400 " in await exchange(port, b"no request\r\n\r\n")
    assert len([record for record in caplog.records if record.name == "uvicorn.error"]) <= 1
    now = 0.0
    rare = listener.RareWarnings(lambda: now)
    record = logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, "Invalid HTTP request received.", None, None)
    assert [bool(rare.filter(record)) for _ in range(3)] == [True, False, False]
    now = 60.0
    assert rare.filter(record)
    record.levelno = logging.ERROR
    assert all(rare.filter(record) for _ in range(3))
