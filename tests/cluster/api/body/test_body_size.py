"""Bodies beyond the limit of bytes: refused early, and in a way that clients can read."""

import socket
from contextlib import suppress
from typing import Any

import httpx
import pytest

from crossdock.cluster.api.http import request_body
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.scripted_api import ScriptedDispatcher, guarded, held_bytes, raw, refused, serving
from tests.waiting import eventually

POST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


def test_too_large_body_is_refused(http: httpx.Client, url: str, engine: ScriptedDispatcher) -> None:
    body = b'{"prompt": "' + b"a" * 200_000 + b'"}'
    answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    refused(answer, 413, code="request_too_large", type="invalid_request_error")
    chunks = (body[i : i + 10_000] for i in range(0, len(body), 10_000))
    answer = http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
    refused(answer, 413, code="request_too_large")
    # The body is announced and never sent: the answer comes at once.
    with raw(url) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 104857600\r\n\r\n")
        assert b" 413 " in wire.recv(4096)
        assert http.get("/health").status_code == 200


async def test_too_large_body_is_read_no_further_than_twice_the_limit() -> None:
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

    guard = guarded(app, 10_000)
    for headers, most in (
        ([], 20_000),
        ([(b"content-length", b"x")], 20_000),
        ([(b"content-length", b"10001")], 20_000),
        ([(b"content-length", b"20001")], 0),  # not even begun: reading all of that would take too long
        ([(b"content-length", b"9" * 5000)], 0),
        ([(b"content-length", b"10001"), (b"expect", b"100-continue")], 0),  # the client waits to be asked
    ):
        received = 0
        await guard({"type": "http", "path": "/", "headers": headers}, receive, send)
        assert received == most
        assert sent[0]["status"] == 413
        sent.clear()


def test_client_that_sends_all_before_it_reads_sees_the_refusal(url: str, engine: ScriptedDispatcher) -> None:
    """The body does not fit into the kernel's buffers, so an answer before its end would be lost with a reset."""
    size = 199_000
    for _ in range(20):
        with raw(url) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            wire.sendall(POST % size + b"a" * size)
            assert b" 413 " in wire.recv(4096)


def test_body_that_trickles_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part comes in time, and the whole never would."""
    monkeypatch.setattr(request_body, "SILENCE_S", 0.4)
    with raw(url) as wire:
        wire.sendall(POST % 100_000)
        wire.settimeout(0.05)
        received = b""
        while not received:
            wire.sendall(b" ")
            with suppress(TimeoutError):
                received = wire.recv(4096)
        assert b" 408 " in received


def test_large_bodies_at_once_are_bounded_and_small_ones_are_not(
    engine: ScriptedDispatcher, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body counts twice: as it is, and as what it becomes."""
    body = b'{"prompt": "Hi", "user": "' + b"a" * 400_000 + b'"}'
    config, held = HttpConfig(request_memory_bytes=1 << 20), held_bytes(monkeypatch)
    with serving(engine, tokenizer, config) as http, raw(str(http.base_url)) as wire:
        wire.sendall(POST % len(body) + body[:350_000])
        eventually(lambda: held() >= 350_000)
        headers = {"content-type": "application/json"}
        answer = http.post("/v1/completions", content=body, headers=headers)
        refused(answer, 429, code="request_memory")
        assert answer.headers["retry-after"] == "1"
        assert http.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200
        wire.sendall(body[350_000:])
        assert b" 200 OK" in wire.recv(4096)
        for _ in range(3):
            assert http.post("/v1/completions", content=body, headers=headers).status_code == 200
