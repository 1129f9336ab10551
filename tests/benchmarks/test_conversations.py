"""Chats, responses and messages of the chaos benchmark over real engines, of which one after the other is lost."""

import asyncio
import importlib
import json
import random
import re
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from pydantic import ByteSize

from crossdock.cluster.api.http.answers import error_event
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.http_guard import as_api_error
from crossdock.cluster.api.routes.messages import message_error_event
from crossdock.cluster.api.routes.response_events import ResponseAnswer
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher, SuspectRequest
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine import calibrate
from crossdock.workers.replica.engine.computing import new_engine
from tests.benchmarks.scripts import script
from tests.cluster.api.one_model import one_model_api
from tests.cluster.dispatch.in_process import IN_TURN, InProcess, ready
from tests.known_seconds import known_sweep

conversations = script("chaos/conversations")


def replica_of(model: Path) -> InProcess:
    config = EngineConfig(
        kv_cache_memory=ByteSize(32 << 20), max_num_batched_tokens=128, max_num_seqs=16, admission="queue"
    )
    return InProcess(engine=new_engine(load_model(ModelSpec(str(model), "float32", 1024)), config, model))


class Losses:
    """Replicas that serve conversations, and a task that loses one after the other in the middle of streams."""

    def __init__(self, model: Path, num_losses: int) -> None:
        self.dispatcher = Dispatcher("tiny", IN_TURN)
        self.replicas = {f"r{number}": replica_of(model) for number in range(num_losses + 1)}
        self.num_lost = 0
        self.app = one_model_api(self.dispatcher, ModelTokenizer.load(model), HttpConfig.model_validate({}))

    async def start(self) -> None:
        for name, replica in self.replicas.items():
            self.dispatcher.join(name, replica, replica.profile)
        await ready(self.dispatcher, len(self.replicas))

    async def lose_all_but_one(self) -> None:
        """Lose a replica whenever one has three streams with tokens."""
        while len(self.replicas) - self.num_lost > 1:
            await asyncio.sleep(0.01)
            live = await self.dispatcher.live_requests(None)
            streaming = [each["replica"] for each in live if each["num_output_tokens"] > 4]
            for name in set(streaming):
                if streaming.count(name) >= 3 and not self.replicas[name].is_killed:
                    self.replicas[name].is_killed = True
                    self.dispatcher.leave(name)
                    self.num_lost += 1
                    break

    async def close(self) -> None:
        await self.dispatcher.close()
        for replica in self.replicas.values():
            await replica.engine_thread.close()
            replica.engine_thread.engine.grammars.close()


def answer_of(reply: httpx.Response, conversation: Any) -> Any:
    """Return the answer that the events of a reply make. Raises the error that the reply has, as `streams.Told`."""
    told = importlib.import_module("streams").Told
    if reply.status_code != 200:
        raise told(reply.status_code, reply.json()["error"], 0)
    answer = conversation.new_answer()
    for line in reply.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if error := event.get("error") or (event.get("response") or {}).get("error"):
                raise told(200, error, 1)
            answer.add(event)
        elif line == "data: [DONE]":
            answer.is_done = True
    return answer


async def difference(http: httpx.AsyncClient, conversation: Any, places: asyncio.Semaphore) -> str | None:
    """Return how the stream of a conversation differs from the undisturbed one; None where it does not."""
    told = importlib.import_module("streams").Told
    async with places:
        body = conversation.body(random.Random(str(conversation.request)))
        while True:
            reply = await http.post(conversation.path, json=body, timeout=240)
            try:
                answer = answer_of(reply, conversation)
                break
            except told as error:
                if error.status == 429:  # on a slow machine more grammars wait to be compiled than one client may have
                    await asyncio.sleep(float(reply.headers["retry-after"]))
                elif not error.is_suspect:  # … or two replicas are lost before its first token
                    return str(error)
    if not answer.is_done:
        return f"the stream ends early: {reply.text[-300:]}"
    found: str | None = conversation.difference(answer, is_whole=True)
    return found


async def disturbed(model: Path, asked: list[Any], num_losses: int, at_once: int) -> tuple[list[str], int, int]:
    """Return the differences, the number of lost replicas, and how often a request went on elsewhere."""
    losses, places = Losses(model, num_losses), asyncio.Semaphore(at_once)
    await losses.start()
    losing = asyncio.create_task(losses.lose_all_but_one())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(losses.app), base_url="http://localhost") as http:
        found = await asyncio.gather(*(difference(http, each, places) for each in asked))
    losing.cancel()
    again = re.search(r"crossdock_ingress_placed_again_total (\d+)", losses.dispatcher.metrics.text())
    assert again is not None
    await losses.close()
    wrong = [f"{each}: {problem}" for each, problem in zip(asked, found, strict=True) if problem is not None]
    return wrong, losses.num_lost, int(again[1])


def test_conversations_whose_replicas_are_lost_equal_the_undisturbed_ones(
    conversations: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deltas joined: content, reasoning, names and arguments of calls; ids do not change within a stream."""
    monkeypatch.setattr(calibrate, "remembered_sweep", known_sweep)
    fleet = importlib.import_module("fleet")
    model = fleet.tiny_model(tmp_path / "model", conversations.agent_tokenizer())
    asked = conversations.make_conversations(model, 20, 5)
    written = str([each.expected for each in asked])
    for part in ("get_weather", "book_truck", "reasoning_content", "reasoning_text.delta", "thinking_delta"):
        assert part in written, f"no answer has {part}"
    wrong, num_lost, num_again = asyncio.run(disturbed(model, asked, num_losses=2, at_once=12))
    assert not wrong
    assert num_lost == 2
    assert num_again >= 6


ERROR_EVENTS = {
    "/v1/chat/completions": error_event,
    "/v1/responses": ResponseAnswer({}).error_event,
    "/v1/messages": partial(message_error_event, "a"),
}


@pytest.mark.parametrize("path", ERROR_EVENTS)
def test_streams_that_end_as_suspect_are_known_in_every_api(conversations: ModuleType, path: str) -> None:
    """Not every API gives this error a code."""
    asked = next(each for each in conversations.questions(4, 0, {"<tool_call>": 0}) if each.path == path)
    reply = httpx.Response(200, content=ERROR_EVENTS[path](as_api_error(SuspectRequest.after(2))))
    with pytest.raises(importlib.import_module("streams").Told) as told:
        answer_of(reply, asked)
    assert told.value.is_suspect


def test_answer_that_differs_or_contradicts_itself_is_seen(conversations: ModuleType) -> None:
    def chunk(delta: dict[str, Any], finish: str | None = None, name: str = "a") -> dict[str, Any]:
        return {"id": name, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    call = {"index": 0, "id": "call_1", "function": {"name": "f", "arguments": "{"}}
    more = {"index": 0, "function": {"arguments": "}"}}
    chunks = [chunk({"role": "assistant"}), chunk({"tool_calls": [call]}), chunk({"tool_calls": [more]}, "tool_calls")]

    def joined(*events: dict[str, Any]) -> Any:
        answer = conversations.ChatAnswer()
        for event in events:
            answer.add(event)
        return answer

    expected = conversations.Case("named", {}, joined(*chunks).value())
    assert expected.difference(joined(*chunks), is_whole=True) is None
    assert expected.difference(joined(*chunks[:2]), is_whole=False) is None
    assert expected.difference(joined(*chunks[:2]), is_whole=True) is not None
    other = chunk({"tool_calls": [{**call, "function": {"name": "f", "arguments": "["}}]})
    assert expected.difference(joined(chunks[0], other), is_whole=False) is not None
    malformed = importlib.import_module("streams").Malformed
    for wrong in (
        chunk({"tool_calls": [{**more, "id": "call_2"}]}),
        chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [{**call, "index": 1}]}),
        chunk({"content": "a"}, name="b"),
    ):
        with pytest.raises(malformed):
            joined(*chunks[:2], wrong)
