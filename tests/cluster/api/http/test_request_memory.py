"""Count what requests hold until it is free: while they wait, run in the background, or are not read."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http import request_memory
from crossdock.cluster.api.http.http_guard import HttpGuard
from crossdock.cluster.api.http.listener import listen
from crossdock.cluster.api.http.request_memory import RequestMemory
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.shares import Shares
from tests.cluster.api.scripted_api import ScriptedDispatcher, Serve, guarded, raw, refused
from tests.cluster.api.unread import unread
from tests.cluster.ports import free_port
from tests.waiting import eventually, until

MIB = 1 << 20
UNREAD = [{"role": "user", "content": "Hi", "name": "x" * 200_000}]  # no template reads the name


def test_body_counts_while_its_request_waits_for_a_token(serve: Serve, engine: ScriptedDispatcher) -> None:
    engine.script = lambda submission: [60.0]
    content = json.dumps({"messages": UNREAD, "max_tokens": 1}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(content) + content
    http = serve(request_memory_bytes=MIB)
    with raw(str(http.base_url)) as first, raw(str(http.base_url)) as second:
        for number, wire in enumerate((first, second), start=1):
            wire.sendall(request)
            eventually(lambda number=number: engine.running == number)
        answer = http.post("/v1/chat/completions", json={"messages": UNREAD, "max_tokens": 1})
        refused(answer, 429, code="request_memory")
    eventually(lambda: engine.running == 0)
    engine.script = engine.story
    for _ in range(5):
        answer = http.post("/v1/chat/completions", json={"messages": UNREAD, "max_tokens": 1})
        assert answer.status_code == 200


def test_response_in_the_background_counts_until_its_end(serve: Serve, engine: ScriptedDispatcher) -> None:
    engine.script = lambda submission: [60.0]
    body: dict[str, Any] = {"input": "Hi", "background": True, "user": "x" * 200_000}
    http = serve(request_memory_bytes=MIB)
    names = [http.post("/v1/responses", json=body).json()["id"] for _ in range(2)]
    refused(http.post("/v1/responses", json=body), 429, code="request_memory")
    assert http.post(f"/v1/responses/{names[0]}/cancel").status_code == 200
    names.append(http.post("/v1/responses", json=body).json()["id"])
    for name in names:
        assert http.delete(f"/v1/responses/{name}").status_code == 200


def test_objects_of_a_body_count_beside_its_text(serve: Serve) -> None:
    """4,000 parts of a message take 100 KB as text, and 2 MB as strings and mappings."""
    parts = [{"type": "text", "text": "a"}] * 4000
    http = serve(request_memory_bytes=MIB)
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    refused(answer, 429, code="request_memory")


def test_tokens_of_prompts_count(serve: Serve, tokenizer: ModelTokenizer) -> None:
    """Each is an object of its own: 38,000 tokens take more than a megabyte, as ids of a body or made from a text."""
    letters = "zq" * 95
    assert len(tokenizer.encode(letters)) == len(letters)
    http = serve(request_memory_bytes=MIB)
    for prompt in (letters, [5] * 190):
        assert http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).status_code == 200
        answer = http.post("/v1/completions", json={"prompt": [prompt] * 200, "max_tokens": 1})
        refused(answer, 429, code="request_memory")


def test_log_probabilities_of_an_answer_count_before_it_begins(serve: Serve, engine: ScriptedDispatcher) -> None:
    body = {"prompt": "Hi", "max_tokens": 100, "logprobs": 0, "logprob_token_ids": list(range(128))}
    http = serve(request_memory_bytes=MIB)
    refused(http.post("/v1/completions", json=body), 429, code="request_memory")
    assert http.post("/v1/completions", json={**body, "max_tokens": 10}).status_code == 200
    assert len(engine.submissions) == 1


@pytest.mark.parametrize(("text", "is_in_chunks"), [("é" * 130_000, False), ("a" * 600_000, True)])
def test_text_of_a_body_counts_beside_its_bytes(serve: Serve, text: str, is_in_chunks: bool) -> None:
    """Text that is not ASCII takes four bytes a character; a body in chunks has told no length before."""
    content = json.dumps({"prompt": "Hi", "max_tokens": 1, "user": text}, ensure_ascii=False).encode()
    http = serve(request_memory_bytes=MIB)

    def post(content: bytes) -> httpx.Response:
        parts = iter((content[:1000], content[1000:])) if is_in_chunks else content
        return http.post("/v1/completions", content=parts, headers={"content-type": "application/json"})

    refused(post(content), 429, code="request_memory")
    assert post(content.replace(text[: len(text) // 2].encode(), b"")).status_code == 200


async def test_body_that_was_announced_keeps_its_room_as_others_come() -> None:
    shares = Shares(10 * MIB)
    first, second, other = RequestMemory(shares, "a"), RequestMemory(shares, "a"), RequestMemory(shares, "b")
    first.announce(MIB)
    second.announce(MIB)
    other.hold(5 * MIB)
    first.hold(2 * MIB)
    assert shares.num_used == 9 * MIB
    with pytest.raises(ApiError, match="are free"):
        first.hold(1)
    first.release()
    assert shares.num_used == 7 * MIB


def test_heap_is_trimmed_once_a_large_request_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    shares = Shares(1 << 30)
    monkeypatch.setattr(request_memory._heap, "trim_later", lambda: trims.append(shares.num_used))
    for num_bytes in (100_000, 2 * MIB):
        memory = RequestMemory(shares, "")
        memory.hold(num_bytes)
        assert not trims
        memory.release()
        memory.release()
    assert len(trims) == 1


@pytest.mark.parametrize(("path", "limit"), [("/v1/chat/completions", {"max_tokens": 1}), ("/tokenize", {})])
def test_json_in_strings_counts_what_it_becomes(serve: Serve, path: str, limit: dict[str, int]) -> None:
    """A value of two characters takes 40 bytes once it is parsed, before the template shows it."""
    statuses = []
    http = serve(request_memory_bytes=MIB)
    for num_values in (10, 30_000):
        function = {"name": "f", "arguments": '{"a": [' + "1," * num_values + "0]}"}
        call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        statuses.append(http.post(path, json={"messages": [call], **limit}).status_code)
    assert statuses == [200, 429]


async def test_answer_counts_until_it_is_read() -> None:
    """It waits in this process for a client that reads nothing, whose request has ended for the application."""
    size = 16 * MIB

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": b"x" * size})

    port = free_port()
    server = await listen(guarded(app, memory=Shares(20 * MIB)), "127.0.0.1", port)
    async with asyncio.timeout(240), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=240) as http:
        with unread(port, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n") as wire:
            wire.setblocking(False)
            loop, received = asyncio.get_running_loop(), 0
            received += len(await loop.sock_recv(wire, 100))
            refused(await http.get("/"), 429, code="request_memory")
            while received < size:
                received += len(await loop.sock_recv(wire, 1 << 20))
        answer = await http.get("/")
        while answer.status_code == 429:  # until the server sees that the last bytes have left
            answer = await http.get("/")
        assert (answer.status_code, len(answer.content)) == (200, size)
    await server.close(1)


async def test_of_large_bodies_that_come_together_as_many_are_served_as_fit() -> None:
    """Parts of 64 bodies come in turns. Eight fit, each held twice: as bytes, and once it is parsed."""
    size, most, turns = MIB, 16 * MIB, 16
    served, statuses = asyncio.Event(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["memory"].hold_parsed((await receive())["body"], 0, 0)
        await served.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(guard: HttpGuard) -> None:
        parts = iter([*[b"x" * (size // turns)] * turns])

        async def receive() -> Any:
            await asyncio.sleep(0)  # the next client's turn
            part = next(parts, None)
            if part is None:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": part, "more_body": parts.__length_hint__() > 0}

        async def send(message: Any) -> None:
            await asyncio.sleep(0)
            if "status" in message:
                statuses.append(message["status"])

        headers = [(b"content-length", b"%d" % size)]
        await guard({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive, send)

    guard = guarded(app, size, memory=Shares(most))
    async with asyncio.timeout(240), asyncio.TaskGroup() as clients:
        for _ in range(64):
            clients.create_task(ask(guard))
        await until(lambda: len(statuses) == 64 - most // (2 * size))
        served.set()
    assert statuses == [429] * 56 + [200] * 8
