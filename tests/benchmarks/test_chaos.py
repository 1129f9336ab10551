"""The chaos benchmark sees what it looks for: lost and late messages, wrong tokens, hung and broken streams."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from crossdock.kvtransfer.messages import Hello, encode
from crossdock.kvtransfer.transport import PeerLost, Received, TransportEvent, WriteDone
from tests.benchmarks.scripts import script

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
REFUSAL = b'{"error": {"message": "too late", "code": "rate_limit_exceeded"}}'
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n" % len(REFUSAL) + REFUSAL


faulty = script("chaos/faulty")
streams = script("chaos/streams")


class _Scripted:
    """A transport that reports what it is given."""

    def __init__(self) -> None:
        self.events: list[TransportEvent] = []
        self.waits: list[float] = []

    def poll(self, seconds: float) -> list[TransportEvent]:
        self.waits.append(seconds)
        events, self.events = self.events, []
        return events


def lossy(faulty: ModuleType, folder: Path, **shares: float) -> Any:
    class Lossy(faulty._LossyReceiver, _Scripted):  # type: ignore[misc,name-defined]
        disturbance = faulty.Disturbance(str(folder), **shares)

    return Lossy()


def message(number: int) -> bytes:
    return encode(Hello(f"r{number}", 0))


def test_lost_messages_are_dropped_and_counted_and_nothing_else_is(faulty: ModuleType, tmp_path: Path) -> None:
    transport = lossy(faulty, tmp_path, lost=1.0)
    transport.events = [Received("a", message(0)), WriteDone(7), Received("a", b"?"), PeerLost("b", "gone")]
    assert transport.poll(5.0) == [WriteDone(7), PeerLost("b", "gone")]
    assert faulty.counts(tmp_path) == {"transfer message lost: Hello": 1, "transfer message lost: malformed": 1}


def test_late_message_holds_back_those_behind_it_and_no_other_peer(
    faulty: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(faulty.time, "monotonic", lambda: now)
    chances = iter([0.0, 0.9, 0.9])  # the first is late
    monkeypatch.setattr(random, "random", lambda: next(chances))
    monkeypatch.setattr(random, "choice", lambda delays: delays[-1])
    transport = lossy(faulty, tmp_path, late=0.5)
    first, second, other = Received("a", message(0)), Received("a", message(1)), Received("b", message(2))
    transport.events = [first, second, other]
    assert transport.poll(60.0) == [other]
    assert transport.poll(60.0) == []
    assert transport.waits[-1] == 6.0, "the poll must end when the message is due"
    now += 6.0
    assert transport.poll(60.0) == [first, second]


def test_messages_held_back_come_before_the_loss_of_their_peer(faulty: ModuleType, tmp_path: Path) -> None:
    transport = lossy(faulty, tmp_path, late=1.0)
    transport.events = [Received("a", message(0)), PeerLost("a", "gone")]
    assert transport.poll(0.0) == [Received("a", message(0)), PeerLost("a", "gone")]


def event(*token_ids: int) -> bytes:
    data = b"data: " + json.dumps({"choices": [{"token_ids": token_ids}]}).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
ERROR = chunk(b'data: {"error": {"message": "lost", "code": "service_unavailable"}}\n\n')
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def of(*parts: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)

    return answer


async def silent(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + event(1))
    await asyncio.sleep(5)


async def outcomes(streams: ModuleType, answers: list[Answer], **habits: Any) -> tuple[dict[str, int], list[str]]:
    """Return the outcomes and problems of one client that streams [1, 2, 3] once for each answer, retries apart."""
    waiting = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await waiting.pop(0)(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    case = streams.Case("a case", {"prompt": [5, 6], "max_tokens": 3}, [1, 2, 3])
    clients = streams.Clients(port, [case], streams.Habits(**habits), seed=0, limit=1)
    await clients._client(random.Random(0))
    server.close()
    assert not waiting
    return dict(clients.outcomes), clients.problems


def test_whole_stream_with_the_right_tokens_is_complete(streams: ModuleType) -> None:
    answer = of(HEAD, event(1), event(2, 3), DONE)
    assert asyncio.run(outcomes(streams, [answer])) == ({"complete": 1}, [])


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ([HEAD, event(1, 2, 4), DONE], "wrong answer"),
        ([HEAD, event(1, 2), DONE], "wrong answer"),
        ([HEAD, event(1, 2, 3)], "cut"),
        ([], "cut"),
        ([HEAD, event(1), ERROR, DONE], "told 200 service_unavailable after some events"),
        ([REFUSED], "told 429"),
    ],
)
def test_stream_that_is_wrong_or_broken_is_a_problem(streams: ModuleType, parts: list[bytes], complaint: str) -> None:
    counted, (problem,) = asyncio.run(outcomes(streams, [of(*parts)]))
    assert not counted
    assert complaint in problem


def test_stream_without_progress_is_hung(streams: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "HUNG_S", 0.1)
    _, (problem,) = asyncio.run(outcomes(streams, [silent]))
    assert "hung after 1 events" in problem


def test_refusal_where_refusals_are_allowed_is_counted_and_tried_again(streams: ModuleType) -> None:
    answers = [of(REFUSED), of(HEAD, event(1, 2, 3), DONE)]
    counted, problems = asyncio.run(outcomes(streams, answers, may_refuse=True))
    assert (counted, problems) == ({"429 before the first token": 1, "complete": 1}, [])


def test_hostile_request_that_is_served_is_a_problem(streams: ModuleType) -> None:
    answer = of(HEAD, event(1, 2, 3), DONE)
    counted, (problem,) = asyncio.run(outcomes(streams, [answer], hostile=1.0))
    assert not counted
    assert "hostile: served" in problem
