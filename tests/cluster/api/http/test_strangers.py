"""Clients without a key, and pages of other sites: what they send costs the holders of keys nothing."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from crossdock.cluster.api.http import listener, request_body
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.listener import listen
from crossdock.cluster.api.routes.web_assets import web_assets
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import ScriptedDispatcher, Serve, held_bytes, raw, refused, serving
from tests.cluster.ports import free_port
from tests.waiting import eventually

KEYS = HttpConfig(api_keys=("k", "other"))
HEAD = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nauthorization: Bearer %b\r\n"


@pytest.mark.parametrize(
    "path", [b"/health", b"/metrics", b"/openapi.json", *(path.encode() for path in sorted(web_assets())[:1])]
)
@pytest.mark.parametrize("header", [b"content-length: 20000000", b"transfer-encoding: chunked"])
def test_body_on_an_open_path_is_refused_before_it_comes(
    engine: ScriptedDispatcher, tokenizer: ModelTokenizer, path: bytes, header: bytes
) -> None:
    with serving(engine, tokenizer, KEYS) as http, raw(str(http.base_url)) as wire:
        wire.sendall(HEAD % (path, b"wrong") + header + b"\r\n\r\n")
        answer = wire.recv(4096)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in answer.lower()


def test_bodies_of_one_key_leave_place_for_those_of_another(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    held = held_bytes(monkeypatch)
    body = {"prompt": "Hi", "user": "a" * 150_000}
    http = serve(api_keys=("k", "other"), request_memory_bytes=1 << 20)
    with raw(str(http.base_url)) as wire:
        wire.sendall(HEAD % (b"/v1/completions", b"k") + b"content-length: 300000\r\n\r\n" + b" " * 250_000)

        def post(key: str) -> httpx.Response:
            return http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

        eventually(lambda: held() >= 600_000)
        refused(post("k"), 429, code="request_memory")
        assert post("other").status_code == 200


def test_body_that_arrives_for_too_long_is_refused_however_fast_it_is(
    url: str, engine: ScriptedDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "LONGEST_S", 0.3)
    with raw(url) as wire:
        wire.sendall(HEAD % (b"/v1/completions", b"") + b"content-length: 100000\r\n\r\n")
        wire.settimeout(0.05)
        received, ends = b"", time.monotonic() + 240
        while not received and time.monotonic() < ends:
            wire.sendall(b" " * 200)
            with suppress(TimeoutError):
                received = wire.recv(4096)
        assert b" 408 " in received


LOCAL = ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.8.9.1", "[::1]", "[::1]:8000"]
OTHERS = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]"]


def statuses(http: httpx.Client, names: list[str]) -> set[int]:
    paths = ("/health", "/v1/models", "/v1/requests", "/metrics")
    return {http.get(path, headers={"host": name}).status_code for path in paths for name in names}


def test_server_without_keys_on_loopback_answers_to_local_names_alone(serve: Serve, engine: ScriptedDispatcher) -> None:
    """A page whose name was pointed to 127.0.0.1 sends that name, and the browser shows the page what is answered."""
    http = serve(allowed_hosts=("LLM.example",))
    assert statuses(http, [*LOCAL, "llm.example", "llm.example:443"]) == {200}
    assert statuses(http, [*OTHERS, "other.llm.example"]) == {403}
    answer = http.post("/v1/completions", json={"prompt": "Hi"}, headers={"host": "evil.example"})
    error = refused(answer, 403, code="host_not_allowed")
    assert "'evil.example'" in error["message"]
    assert "--allowed-hosts" in error["message"]
    with raw(str(http.base_url)) as wire:  # some probes send no name; every browser does
        wire.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in wire.recv(4096)
    assert engine.submissions == []


@pytest.mark.parametrize(
    "fields", [{"api_keys": ("k",)}, {"host": "0.0.0.0"}, {"allowed_hosts": ("*",)}], ids=["keys", "all", "any"]
)
def test_server_that_others_may_reach_answers_to_any_name(serve: Serve, fields: dict[str, Any]) -> None:
    http = serve(**fields)
    http.headers["authorization"] = "Bearer k"
    assert statuses(http, [*LOCAL, *OTHERS]) == {200}


def acts(http: httpx.Client, **headers: str) -> set[int]:
    """Return the statuses of requests that a browser sends for a page without asking the server before."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    form = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("/pause", {}),
        ("/resume", {}),
        ("/reset_prefix_cache", {}),
        ("/v1/files", form),
    ]
    return {http.post(path, headers=sent, **body).status_code for path, body in cases}


FOREIGN = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost.evil.example:8000"},
    {"origin": "http://[broken"},
    {"sec_fetch_site": "cross-site"},
    {"origin": "https://evil.example", "sec_fetch_site": "same-origin"},
]
OWN = [
    {},
    {"origin": "http://localhost:3000", "sec_fetch_site": "same-site"},
    {"origin": "http://127.0.0.1:8000", "sec_fetch_site": "same-origin"},
    {"origin": "https://llm.example"},
    {"origin": "https://chat.example", "sec_fetch_site": "cross-site"},
    {"origin": "chrome-extension://abcdef", "sec_fetch_site": "none"},
]


def test_page_of_another_site_does_not_act_on_a_server_without_keys(serve: Serve, tmp_path: Path) -> None:
    http = serve(allowed_hosts=("llm.example",), allowed_origins=("https://chat.example",), batch_folder=str(tmp_path))
    for headers in FOREIGN:
        assert acts(http, **headers) == {403}, headers
    for headers in OWN:
        statuses = acts(http, **headers)
        assert 403 not in statuses, headers
        assert 200 in statuses, headers
    error = refused(http.post("/pause", headers={"origin": "https://evil.example"}), 403, code="origin_not_allowed")
    assert "'https://evil.example'" in error["message"]
    assert "--allowed-origins" in error["message"]
    assert http.get("/health", headers={"origin": "https://evil.example"}).status_code == 200


def test_page_of_any_site_may_act_where_keys_or_the_operator_say_so(serve: Serve, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for http in (serve(allowed_origins=("*",), batch_folder=folder), serve(api_keys=("k",), batch_folder=folder)):
        http.headers["authorization"] = "Bearer k"
        assert http.post(
            "/v1/completions", json={"prompt": "Hi"}, headers={"origin": "https://evil.example"}
        ).is_success


@asynccontextmanager
async def listening(engine: Any, tokenizer: ModelTokenizer) -> AsyncIterator[int]:
    """Serve with keys and our own listener, and yield its port. The client has a minute."""
    port = free_port()
    server = await listen(one_model_api(engine, tokenizer, KEYS), "127.0.0.1", port, has_keys=True)
    try:
        async with asyncio.timeout(240):
            yield port
    finally:
        await server.close(1)


async def models(port: int, key: bytes) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for the models on a new connection. Returns the status line, and the connection, which stays open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer %b\r\n\r\n" % key)
    return await reader.readline(), reader, writer


async def test_strangers_that_hold_connections_leave_places_for_keys(
    engine: ScriptedDispatcher, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their requests run, their heads have not come whole, or they are silent; the newest are the most of all."""
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 20)

    async def hang() -> str:
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(engine, "metrics_text", hang)
    async with listening(engine, tokenizer) as port:
        strangers, holders = [], []
        for sent in (b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n", b"GET /metrics HTTP/1.1\r\nhost:", b""):
            for _ in range(25):
                strangers.append(await asyncio.open_connection("127.0.0.1", port))
                strangers[-1][1].write(sent)
            await asyncio.sleep(0)
            status, *connection = await models(port, b"k")
            assert status.startswith(b"HTTP/1.1 200 ")
            holders.append(connection)
        for reader, writer in holders:  # none of them made way for the strangers after it
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer k\r\n\r\n")
            await reader.readuntil(b"HTTP/1.1 200 ")
        for _, writer in (*strangers, *holders):
            writer.close()


async def test_key_has_its_share_of_connections_and_another_key_finds_places(
    engine: ScriptedDispatcher, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 20)
    engine.script = lambda submission: [60.0]
    async with listening(engine, tokenizer) as port:
        writers, refusals = [], 0
        for number in range(1, 21):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = b'{"prompt": "Hi"}'
            writer.write(HEAD % (b"/v1/completions", b"k") + b"content-length: %d\r\n\r\n" % len(body) + body)
            writers.append(writer)
            while engine.running + refusals < number:
                with suppress(TimeoutError):
                    refusals += b" 429 " in await asyncio.wait_for(reader.readline(), 0.02)
        assert 5 <= engine.running <= 10
        status, _, writer = await models(port, b"other")
        assert status.startswith(b"HTTP/1.1 200 ")
        for each in (*writers, writer):
            each.close()
