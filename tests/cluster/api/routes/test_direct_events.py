"""Streams whose events are written in the turn in which tokens come: over sockets, through a real dispatcher."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from crossdock.cluster.api.http.connection import AnswerTransport
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.listener import listen
from crossdock.cluster.api.text.choices import Choice, Output
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.engine_client import RemoteMethod
from crossdock.workers.report.advertise import Message
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import HI, STORY, VOCAB_SIZE, ScriptedDispatcher
from tests.cluster.api.unread import STREAM, unread
from tests.cluster.dispatch.in_process import ready
from tests.cluster.ports import free_port
from tests.router.replicas import profile
from tests.waiting import until

TURNS = 30  # of the event loop between two messages: tasks that wait for a token have come to rest
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


class Scripted:
    """An `EngineClient` that sends each token of a script in a message of its own."""

    def __init__(self, script: ScriptedDispatcher) -> None:
        self.script = script
        self.is_endless = False
        self.beginning: list[bytes] = []  # what its first tokens stand for
        self.long = self._token(b"\x01")  # six characters of JSON
        self.aborted: list[str] = []
        self._submitted = asyncio.Queue[Submission]()

    def _token(self, text: bytes) -> int:
        return next(i for i in range(VOCAB_SIZE) if self.script.tokenizer.token_bytes(i) == text)

    async def messages(self) -> AsyncIterator[Message]:
        yield Message()
        while True:
            submission = await self._submitted.get()
            for delta in self._deltas(submission):
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                yield Message(deltas=[delta])

    def _deltas(self, submission: Submission) -> Iterable[TokenDelta]:
        first = 0
        while self.is_endless and submission.id not in self.aborted:
            yield TokenDelta(submission.id, [self.long] * 1000, first=first)
            first += 1000
        for position, text in enumerate(self.beginning):
            yield TokenDelta(submission.id, [self._token(text)], first=position)
        for position, delta in enumerate(() if self.is_endless else self.script.story(submission)):
            assert isinstance(delta, TokenDelta)
            delta.first = len(self.beginning) + position
            yield delta

    async def submit(self, submission: Submission) -> int:
        self._submitted.put_nowait(submission)
        return 0

    async def close(self) -> None: ...
    def still_reads(self) -> None: ...

    async def is_dead(self) -> bool:
        return False

    async def call(self, method: RemoteMethod, *arguments: Any) -> Any:
        if method == "abort":
            self.aborted += [request_id for request_id, _ in arguments[0]]


@asynccontextmanager
async def serving(tokenizer: ModelTokenizer, **options: Any) -> AsyncGenerator[tuple[Scripted, int], None]:
    """Serve a scripted replica on a port of our own listener."""
    replica, dispatcher, port = Scripted(ScriptedDispatcher(tokenizer)), Dispatcher("tiny"), free_port()
    dispatcher.join("a", replica, profile(vocab_size=VOCAB_SIZE))
    await ready(dispatcher)
    server = await listen(one_model_api(dispatcher, tokenizer, HttpConfig()), "127.0.0.1", port, **options)
    try:
        yield replica, port
    finally:
        await dispatcher.close()
        await server.close(5)


def without_times(content: bytes) -> bytes:
    """Return a stream without the names and times that differ between any two requests."""
    return re.sub(rb"[0-9a-f]{32}|(?<=_at\":)\d+|(?<=created\":)\d+", b"", content)


async def answer(port: int, path: str, body: dict[str, Any]) -> bytes:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=240) as http:
        found = await http.post(path, json={"stream": True, "temperature": 0, **body})
    assert found.status_code == 200, found.text
    return found.content


@pytest.mark.parametrize(
    ("path", "body", "is_direct"),
    [
        (CHAT, {"messages": HI}, True),
        (CHAT, {"messages": HI, "stream_options": OPTIONS}, True),
        (CHAT, {"messages": HI, "tools": [TOOL]}, True),
        (CHAT, {"messages": HI, "n": 2}, False),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2}, False),
        (CHAT, {"messages": HI, "return_token_ids": True}, False),
        (COMPLETION, {"prompt": "Hi"}, True),
        (COMPLETION, {"prompt": "Hi", "max_tokens": 5, "stream_options": OPTIONS}, True),
        (COMPLETION, {"prompt": "Hi", "echo": True}, True),
        (COMPLETION, {"prompt": "Hi", "stop": "lazy"}, True),
        (COMPLETION, {"prompt": "Hi", "logprobs": 1, "echo": True}, False),
        ("/v1/responses", {"input": "Hi", "store": False}, True),
        ("/v1/messages", {"messages": HI, "max_tokens": 100}, True),
    ],
)
async def test_events_written_at_once_are_those_that_tasks_write(
    path: str,
    body: dict[str, Any],
    is_direct: bool,
    tokenizer: ModelTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, write = list[bytes](), AnswerTransport.write_event
    monkeypatch.setattr(AnswerTransport, "write_event", lambda self, part: (written.append(part), write(self, part))[1])
    async with serving(tokenizer) as (_, port):
        direct = await answer(port, path, body)
        num_direct = len(written)
        monkeypatch.setattr(AnswerTransport, "is_ready", lambda self: False)
        by_tasks = await answer(port, path, body)
        assert without_times(direct) == without_times(by_tasks)
        assert direct.count(b"data: ") >= 5
        assert (num_direct >= 3) == is_direct
        assert len(written) == num_direct


async def test_client_of_http_1_0_gets_the_same_events_without_chunks(tokenizer: ModelTokenizer) -> None:
    async with serving(tokenizer) as (_, port):
        expected = await answer(port, CHAT, {"messages": HI})
        content = json.dumps({"messages": HI, "stream": True, "temperature": 0}).encode()
        head = f"POST {CHAT} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + content)
        async with asyncio.timeout(240):
            received = await reader.read()
        writer.close()
    _, _, body = received.partition(b"\r\n\r\n")
    assert without_times(body) == without_times(expected)


def text_of(content: bytes) -> str:
    events = [json.loads(event) for event in content.decode().replace("data: ", "").split("\n\n")[:-2]]
    return "".join(event["choices"][0]["text"] for event in events)


async def test_answer_whose_first_tokens_have_no_text_begins_with_its_head(tokenizer: ModelTokenizer) -> None:
    async with serving(tokenizer) as (replica, port):
        replica.beginning = [b"\xc3", b"\xa9"]
        assert text_of(await answer(port, COMPLETION, {"prompt": "Hi"})) == "é" + STORY


async def test_error_of_an_event_ends_its_request_alone(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Choice.read

    def broken(choice: Choice, delta: TokenDelta) -> Output:
        if choice.num_tokens == 5 and choice.submission.request_id == "broken":
            raise RuntimeError("cannot be read")
        return read(choice, delta)

    monkeypatch.setattr(Choice, "read", broken)
    async with serving(tokenizer) as (replica, port):
        headers = {"x-request-id": "broken"}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=240) as http:
            failed = await http.post(COMPLETION, json={"prompt": "Hi", "stream": True})
        assert "internal_error" in failed.text
        await until(lambda: len(replica.aborted) == 1)
        assert text_of(await answer(port, COMPLETION, {"prompt": "Hi"})) == STORY


async def test_stream_that_is_not_read_waits_for_its_client_and_is_aborted(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_written, write = 0, AnswerTransport.write_event

    def counted(writer: AnswerTransport, part: bytes) -> None:
        nonlocal num_written
        num_written += len(part)
        write(writer, part)

    monkeypatch.setattr(AnswerTransport, "write_event", counted)
    async with serving(tokenizer, write_timeout_s=0.5) as (replica, port):
        replica.is_endless = True
        with unread(port, STREAM):
            await until(lambda: len(replica.aborted) == 1)
            assert 0 < num_written < 32 << 20  # what fits into the kernel's buffers
