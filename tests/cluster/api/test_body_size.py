"""Bodies beyond the limit of bytes: refused early, and in a way that clients can read."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import httpx

from crossdock.cluster.api.http_guard import HttpGuard
from crossdock.cluster.api.keys import KeyRing
from crossdock.cluster.api.limits import Ledger
from tests.cluster.api.scripted_api import ScriptedDispatcher, raw, refused


def test_too_large_body_is_refused(http: httpx.Client, url: str, engine: ScriptedDispatcher) -> None:
    body = b'{"prompt": "' + b"a" * 200_000 + b'"}'
    answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    refused(answer, 413, code="request_too_large", type="invalid_request_error")
    chunks = (body[i : i + 10_000] for i in range(0, len(body), 10_000))
    answer = http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
    refused(answer, 413, code="request_too_large")
    # The body is announced and never sent: the answer comes at once.
    with raw(url) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 104857600\r\n\r\n")
        assert b" 413 " in wire.recv(4096)
        assert http.get("/health").status_code == 200


def test_too_large_body_is_not_read(http: httpx.Client) -> None:
    """The connection ends soon after the limit; only the kernel's buffers take more."""
    taken = 0

    def body() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(1600):
            taken += 65536
            yield b" " * 65536

    for headers in ({}, {"content-length": str(1600 * 65536)}):
        taken = 0
        headers = {"content-type": "application/json", **headers}
        refused(http.post("/v1/completions", content=body(), headers=headers), 413)
        assert taken < 50 << 20


def test_too_large_body_is_read_no_further_than_twice_the_limit() -> None:
    received = 0
    sent: list[Any] = []

    async def receive() -> Any:
        nonlocal received
        received += 1000
        return {"type": "http.request", "body": b"a" * 1000, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("not reached")

    guard = HttpGuard(
        app, keys=KeyRing(), open_paths=(), ledger=Ledger(), max_body_bytes=10_000, request_timeout_s=None
    )
    for headers, most in (
        ([], 20_000),
        ([(b"content-length", b"x")], 20_000),
        ([(b"content-length", b"10001")], 20_000),
        ([(b"content-length", b"20001")], 0),  # not even begun: reading all of that would take too long
        ([(b"content-length", b"9" * 5000)], 0),
        (
            [(b"content-length", b"10001"), (b"expect", b"100-continue")],
            0,
        ),  # the client sends nothing before it is asked
    ):
        received = 0
        asyncio.run(guard({"type": "http", "path": "/", "headers": headers}, receive, send))
        assert received == most
        assert sent[0]["status"] == 413
        sent.clear()


def test_client_that_sends_all_before_it_reads_sees_the_refusal(url: str, engine: ScriptedDispatcher) -> None:
    """The body does not fit into the kernel's buffers, so an answer before its end would be lost with a reset."""
    size = 199_000
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    )
    for _ in range(20):
        with raw(url) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            wire.sendall(head.encode() + b"a" * size)
            assert b" 413 " in wire.recv(4096)
