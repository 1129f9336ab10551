"""HttpGuard over sockets: API keys, their limits, body sizes, request ids, time limits and clients that leave."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import HI, ScriptedDispatcher, Serve, complete, events, guarded, raw, refused
from tests.waiting import eventually

JSON = "host: localhost\r\ncontent-type: application/json\r\n"


def test_api_key_is_required_and_not_shown(serve: Serve) -> None:
    http = serve(api_keys=("first", "schlüssel"))

    def post(authorization: str | None) -> httpx.Response:
        headers = {} if authorization is None else {"authorization": authorization.encode()}
        return http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)  # type: ignore[arg-type]

    for right in ("Bearer first", "bearer first", "Bearer schlüssel"):
        assert post(right).status_code == 200
    for wrong in (None, "", "Bearer", "Bearer firs", "Bearer first2", "Basic first", "first"):
        answer = post(wrong)
        refused(answer, 401, type="invalid_request_error", code="invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "first" not in answer.text
    refused(http.get("/v1/models"), 401)
    refused(http.get("/v1/nothing"), 401)
    refused(http.get("/v1/../v1/models"), 401)
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert http.get(path).status_code == 200
    assert "schlüssel" not in repr(HttpConfig(api_keys=("schlüssel",)))


def test_key_file_is_read_again_without_restart(
    serve: Serve, engine: ScriptedDispatcher, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text("old")
    http = serve(api_keys_file=str(path))

    def status(key: str) -> int:
        return http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    assert (status("old"), status("new")) == (200, 401)
    beside = tmp_path / "keys.new"
    beside.write_text("new")
    beside.replace(path)
    eventually(lambda: (status("old"), status("new")) == (401, 200))
    with pytest.raises(ValueError, match=r"http\.api_keys_file"):
        one_model_api(engine, tokenizer, HttpConfig(api_keys_file=str(tmp_path / "other")))  # type: ignore[arg-type]


@pytest.mark.usefixtures("stopped_minute")
def test_key_at_its_limit_is_refused(serve: Serve, engine: ScriptedDispatcher) -> None:
    limits = {"key": "k", "requests_per_minute": 4, "tokens_per_minute": 100, "max_concurrent_requests": 1}
    http = serve(api_keys=[limits, "free"])

    def post(key: str = "k", num_tokens: int = 10, **fields: Any) -> httpx.Response:
        body = {"prompt": [5] * num_tokens, "max_tokens": 5, **fields}
        return http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    first = post()
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "4"
    assert first.headers["x-ratelimit-remaining-requests"] == "3"
    assert first.headers["x-ratelimit-limit-tokens"] == "100"
    one_is_refused = threading.Event()

    def held(submission: Submission) -> Iterator[TokenDelta | Exception | float]:
        yield TokenDelta(submission.id, [])
        while not one_is_refused.is_set():
            yield 0.01
        yield from engine.story(submission)

    engine.script = held
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(post) for _ in range(2)]
        try:
            eventually(lambda: any(each.done() for each in asked))
        finally:
            one_is_refused.set()
        assert sorted(each.result().status_code for each in asked) == [200, 429], "one at a time"
    engine.script = engine.story
    refused(post(num_tokens=90), 429, code="rate_limit_exceeded", type="rate_limit_error")
    assert post(stream=True).status_code == 200
    late = post()
    error = refused(late, 429, code="rate_limit_exceeded")
    assert "4 requests per minute" in error["message"]
    assert int(late.headers["retry-after"]) >= 1
    assert late.headers.get_list("x-ratelimit-remaining-requests") == ["0"]
    assert "x-ratelimit-limit-requests" not in post("free").headers
    assert http.get("/v1/models", headers={"authorization": "Bearer k"}).status_code == 200, "reading is free"


@pytest.mark.usefixtures("stopped_minute")
def test_key_without_tokens_is_refused_before_its_prompt_is_encoded(
    serve: Serve, engine: ScriptedDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = ModelTokenizer.encode

    def counted(self: ModelTokenizer, text: str, **ways: bool) -> list[int]:
        encoded.append(text)
        return encode(self, text, **ways)

    monkeypatch.setattr(ModelTokenizer, "encode", counted)
    http = serve(api_keys=[{"key": "k", "tokens_per_minute": 20}])
    http.headers["authorization"] = "Bearer k"
    engine.script = lambda submission: [TokenDelta(submission.id, [7] * 60, finish_reason=FinishReason.LENGTH)]
    assert http.post("/v1/completions", json={"prompt": [5] * 10, "max_tokens": 60}).status_code == 200
    encoded.clear()
    refused(http.post("/v1/completions", json={"prompt": "a dog"}), 429, code="rate_limit_exceeded")
    refused(http.post("/v1/chat/completions", json={"messages": HI}), 429, code="rate_limit_exceeded")
    assert encoded == []


@pytest.mark.usefixtures("stopped_minute")
@pytest.mark.parametrize("is_stream", [False, True])
def test_outputs_are_charged_for_every_choice(serve: Serve, is_stream: bool) -> None:
    http = serve(api_keys=[{"key": "k", "tokens_per_minute": 60}])
    body = {"prompt": [[5] * 10, [6] * 7], "max_tokens": 5, "n": 2, "stream": is_stream}
    headers = {"authorization": "Bearer k"}
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    left = http.get("/v1/models", headers=headers).headers["x-ratelimit-remaining-tokens"]
    assert int(left) == 60 - 17 - 20
    refused(http.post("/v1/completions", json={"prompt": [5] * 55}, headers=headers), 429)


def test_ended_request_frees_its_place(serve: Serve, engine: ScriptedDispatcher) -> None:
    """However a request ends, the next one is accepted."""
    key = {"key": "k", "max_concurrent_requests": 1, "tokens_per_minute": 1000}
    http = serve(api_keys=[key], max_body_bytes=1000)
    headers = {"authorization": "Bearer k"}
    for body in (b"{", b'{"prompt": 5}', b"x" * 2000, b'{"prompt": "Hi", "n": 999}'):
        answer = http.post("/v1/completions", content=body, headers=headers | {"content-type": "application/json"})
        assert answer.status_code in (400, 413)
    engine.script = lambda submission: [RuntimeError("broken")]
    assert http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers).status_code == 500
    engine.script = engine.story
    assert http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers).status_code == 200


def test_body_that_stops_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossdock.cluster.api.http.request_body.SILENCE_S", 0.2)
    http = serve()
    with raw(str(http.base_url)) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\nabc")
        assert b"408" in wire.recv(4096)


def test_client_without_key_is_answered_before_its_body(serve: Serve, url: str) -> None:
    """The answer comes before the body."""
    http = serve(api_keys=("k",))
    with raw(str(http.base_url)) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")
        assert b"401" in wire.recv(4096)


def test_request_id_is_taken_from_client_or_made(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    def post(given: str | None) -> httpx.Response:
        return http.post("/v1/completions", json={"prompt": "Hi"}, headers={"x-request-id": given} if given else {})

    answers = [post("mine-1"), post("mine-1")]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine-1", "mine-1"]
    assert answers[0].json()["id"] == "cmpl-mine-1"
    assert len({s.id for s in engine.submissions}) == 2  # those of submissions are unique
    assert all("mine-1" in s.id for s in engine.submissions)
    generated = {
        post(None).headers["x-request-id"],
        post("a b").headers["x-request-id"],
        post("x" * 129).headers["x-request-id"],
    }
    assert len(generated) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in generated)
    assert http.get("/nope", headers={"x-request-id": "mine-2"}).headers["x-request-id"] == "mine-2"
    stream = http.post("/v1/completions", json={"prompt": "Hi", "stream": True}, headers={"x-request-id": "mine-3"})
    assert stream.headers["x-request-id"] == "mine-3"


async def test_client_leaving_while_sending_ends_request() -> None:
    messages = [{"type": "http.request", "body": b"a", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def never(*_: Any) -> None:
        raise AssertionError("not reached")

    await guarded(never)({"type": "http", "path": "/", "headers": []}, receive, never)


BODIES: list[Any] = [  # path, body, submissions
    ("/v1/completions", {"prompt": ["a", "b"]}, 2),
    ("/v1/completions", {"prompt": "a"}, 1),
    ("/v1/chat/completions", {"messages": HI}, 1),
    ("/v1/chat/completions", {"messages": HI, "n": 3}, 3),
    ("/v1/messages", {"messages": HI, "max_tokens": 50}, 1),
    ("/v1/responses", {"input": "Hi"}, 1),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize(("path", "body", "count"), BODIES)
def test_client_leaving_aborts_its_requests(
    url: str, engine: ScriptedDispatcher, path: str, body: dict[str, Any], count: int, tokens: int, stream: bool
) -> None:
    """The client waits for the first token, or reads tokens already."""
    engine.script = lambda s: [*engine.story(s)[:tokens], 60.0]
    content = json.dumps({**body, "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\n{JSON}content-length: {len(content)}\r\n\r\n"
    with raw(url) as wire:
        wire.sendall(head.encode() + content)
        if stream and tokens:
            assert b"200 OK" in wire.recv(4096)
        eventually(lambda: engine.running == count)
    eventually(lambda: engine.running == 0)
    assert sorted(engine.aborted) == sorted(s.id for s in engine.submissions)


def test_client_leaving_fast_stream_aborts_it(url: str, engine: ScriptedDispatcher) -> None:
    """A stream without pauses ends while a token is being sent as often as between tokens."""
    engine.script = lambda s: (TokenDelta(s.id, [5]) for _ in range(100_000))
    content = json.dumps({"prompt": "a", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\n{JSON}content-length: {len(content)}"
    for _ in range(5):
        with raw(url) as wire:
            wire.sendall(head.encode() + b"\r\n\r\n" + content)
            wire.recv(4096)
        eventually(lambda: engine.running == 0)
    assert len(engine.aborted) == 5


@pytest.mark.parametrize("n", [1, 3])
def test_request_over_time_limit_is_ended(
    serve: Serve, engine: ScriptedDispatcher, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = serve(request_timeout_s=0.3)
    engine.script = lambda s: [60.0]
    for stream in (False, True):
        answer = http.post("/v1/completions", json={"prompt": "Hi", "n": n, "stream": stream})
        assert "0.3 s" in refused(answer, 504, type="server_error", code="request_timeout")["message"]
    clocks: list[asyncio.Timeout] = []
    timeout = asyncio.timeout

    def kept(seconds: float | None) -> asyncio.Timeout:
        clock = timeout(seconds)
        if seconds == 3600.0:
            clocks.append(clock)
        return clock

    def script(submission: Submission) -> Iterator[Any]:
        yield from engine.story(submission)[:3]
        if clocks[-1].when():  # no other choice has done so
            clocks[-1].reschedule(0.0)  # the limit is over now, however long the tokens took
        yield 60.0

    monkeypatch.setattr(asyncio, "timeout", kept)
    http = serve(request_timeout_s=3600.0)
    engine.script = script
    *chunks, last = events(http.post("/v1/completions", json={"prompt": "Hi", "n": n, "stream": True}))
    assert chunks
    assert last["error"]["code"] == "request_timeout"
    refused(http.post("/v1/chat/completions", json={"messages": HI, "n": n}), 504)
    assert len(engine.aborted) == len(engine.submissions) == 4 * n
    engine.script = engine.story
    complete(http)


@pytest.mark.parametrize("fields", [{"port": -1}, {"api_keys": ("",)}, {"max_body_bytes": 0}, {"prot": 1}])
def test_http_config_with_invalid_value_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HttpConfig(**fields)


@pytest.mark.parametrize("name", ["Authorization", "X-API-Key"])
def test_second_header_with_a_key_is_refused(serve: Serve, name: str) -> None:
    value = "Bearer k" if name == "Authorization" else "k"
    http = serve(api_keys=("k",))
    assert http.get("/v1/models", headers={name: value}).status_code == 200
    for first in ("Bearer other", value):
        refused(http.get("/v1/models", headers=[(name, first), (name, value)]), 400, code="repeated_header")
