"""Chats, responses and messages with reasoning, tool calls, grammars and several choices; the sums of their streams.

The model is random and writes nonsense. Grammars make it write calls and JSON; its template can begin the reasoning.
"""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from streams import MAX_MODEL_LEN, Case, Malformed, undisturbed_config, with_answers
from tokenizers import AddedToken

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.media.media import Media
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.engine.computing import new_engine
from tests.cluster.api.one_model import one_model_api
from tests.cluster.dispatch.in_process import InProcess, ready
from tests.cluster.small_tokenizers import byte_level

_MOST_TRIES = 60
_AT_ONCE = 8  # questions to the engine that nothing disturbs
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# As Qwen3's, which the parsers are found by; short, because the random model needs no instruction.
_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
_MESSAGES = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
_END = "<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{# <tool_call> #}"
_WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "no", "truck", "is", "stored"]


def agent_tokenizer() -> Any:
    """Return a small tokenizer whose chat template is that of a reasoning model with tools."""
    tokenizer = byte_level()
    make_agent(tokenizer)
    return tokenizer


def make_agent(tokenizer: Any) -> None:
    """Make a tokenizer that of a reasoning model with tools. A template that shows messages with pictures stays."""
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in _MARKS])
    given, mark = tokenizer.chat_template, "{% if add_generation_prompt %}"
    messages = given.partition(mark)[0] if "part.type" in given else _MESSAGES
    tokenizer.chat_template = f"{_TOOLS}{messages}{_END}"


# -- questions ---------------------------------------------------------------------------------------------------------


def _schema(city: Sequence[str]) -> dict[str, Any]:
    """Return a schema whose values are short: a random model would write a free string to the end of its tokens."""
    return {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": list(city)},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "notes": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
        },
        "required": ["city", "days", "notes"],
        "additionalProperties": False,
    }


_FUNCTIONS = [
    {"name": "get_weather", "parameters": _schema(["Paris", "Rome"]), "strict": True},
    {"name": "book_truck", "parameters": _schema(["Oslo", "Bern", "Graz"]), "strict": True},
]
_FORMATS: tuple[dict[str, Any], ...] = (
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "plan", "schema": _schema(["Ulm", "Bonn"]), "strict": True},
        }
    },
    {"structured_outputs": {"regex": "[a-f]{20,60}"}},
    {"structured_outputs": {"choice": ["a long enough answer to be cut", "another answer of several tokens"]}},
)


def questions(count: int, seed: int, tokens: Mapping[str, int]) -> list[Case]:
    """Return requests of every kind. `tokens`: the ids of marks, which some requests make likely."""
    rng = random.Random(f"questions {seed}")
    makers = (_chat, _chat, _response, _message)
    return [makers[number % len(makers)](rng, number, tokens) for number in range(count)]


def _common(rng: random.Random, number: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"seed": number, "temperature": rng.choice([0.0, 0.7, 1.0])}
    if rng.random() < 0.5:
        fields["chat_template_kwargs"] = {"enable_thinking": True}
    return fields


def _text(rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.choice([2, 8, 30, 80])))


def _chat(rng: random.Random, number: int, tokens: Mapping[str, int]) -> Case:
    kind = rng.choice(["text", "auto", "required", "named", "format"])
    body = _common(rng, number) | {"messages": [{"role": "user", "content": _text(rng)}]}
    body |= {"max_completion_tokens": rng.choice([40, 120, 240]), "n": rng.choice([1, 1, 2, 3])}
    if "chat_template_kwargs" in body:
        body["thinking_token_budget"] = rng.choice([3, 12, 30])
    if kind == "format":
        return Case("format", body | rng.choice(_FORMATS), path="/v1/chat/completions", new_answer=ChatAnswer)
    if kind != "text":
        body["tools"] = [{"type": "function", "function": function} for function in _FUNCTIONS]
    if kind == "auto":  # strict functions: what the model begins with the mark, the grammar makes a call
        body["logit_bias"] = {str(tokens["<tool_call>"]): rng.choice([4, 8])}
    elif kind == "named":
        body["tool_choice"] = {"type": "function", "function": {"name": rng.choice(_FUNCTIONS)["name"]}}
    elif kind == "required":
        body |= {"tool_choice": "required", "parallel_tool_calls": rng.random() < 0.5}
    return Case(kind, body, path="/v1/chat/completions", new_answer=ChatAnswer)


def _response(rng: random.Random, number: int, tokens: Mapping[str, int]) -> Case:
    kind = rng.choice(["text", "required", "named", "format"])
    body = _common(rng, number) | {"input": _text(rng), "max_output_tokens": rng.choice([40, 120, 240])}
    if kind == "format":
        schema = {"type": "json_schema", "name": "plan", "schema": _schema(["Ulm", "Bonn"]), "strict": True}
        return Case(kind, body | {"text": {"format": schema}}, path="/v1/responses", new_answer=ResponseAnswer)
    if kind != "text":
        body["tools"] = [{"type": "function", **function} for function in _FUNCTIONS]
        choice = {"type": "function", "name": rng.choice(_FUNCTIONS)["name"]}
        body["tool_choice"] = choice if kind == "named" else "required"
    return Case(kind, body | {"store": False}, path="/v1/responses", new_answer=ResponseAnswer)


def _message(rng: random.Random, number: int, tokens: Mapping[str, int]) -> Case:
    kind = rng.choice(["text", "required", "named"])
    body = _common(rng, number) | {"messages": [{"role": "user", "content": _text(rng)}]}
    body["max_tokens"] = rng.choice([40, 120, 240])
    if "chat_template_kwargs" in body:
        body["thinking"] = {"type": "enabled", "budget_tokens": rng.choice([3, 12, 30])}
    if kind != "text":
        body["tools"] = [{"name": each["name"], "input_schema": each["parameters"]} for each in _FUNCTIONS]
        choice = {"type": "tool", "name": rng.choice(_FUNCTIONS)["name"]}
        body["tool_choice"] = choice if kind == "named" else {"type": "any"}
    return Case(kind, body, path="/v1/messages", new_answer=MessageAnswer)


# -- answers -----------------------------------------------------------------------------------------------------------


def _expect(condition: bool, reason: str) -> None:
    if not condition:
        raise Malformed(reason)


@dataclass(slots=True)
class _Part:
    """One choice of a chat, one item of a response, or one block of a message. `texts`: by kind."""

    texts: dict[str, str] = field(default_factory=dict)
    calls: list[list[str]] = field(default_factory=list)  # name and arguments
    ends: str | None = None
    ids: list[str] = field(default_factory=list)

    def add(self, kind: str, text: str) -> None:
        _expect(self.ends is None, f"{kind} after the end")
        self.texts[kind] = self.texts.get(kind, "") + text

    def value(self) -> Any:
        return [self.texts, self.calls, [] if self.ends is None else [self.ends]]


class ChatAnswer:
    """The choices of a chat."""

    def __init__(self) -> None:
        self.is_done = False
        self._id: str | None = None
        self._choices: dict[int, _Part] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        _expect(self._id in (None, event["id"]), "the id of the answer changes")
        self._id = event["id"]
        for choice in event["choices"]:
            part = self._choices.setdefault(choice["index"], _Part())
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    part.add(name, delta[name])
            for call in delta.get("tool_calls", ()):
                self._add_call(part, call)
            part.ends = choice["finish_reason"] or part.ends

    def _add_call(self, part: _Part, call: Mapping[str, Any]) -> None:
        function = call["function"]
        if call["index"] == len(part.calls):
            _expect(bool(call.get("id")) and call["id"] not in part.ids, "a call begins without an id of its own")
            part.ids.append(call["id"])
            part.calls.append([function["name"], function["arguments"]])
            return
        _expect(call["index"] == len(part.calls) - 1, "parts of two calls are mixed")
        _expect(call.get("id") in (None, part.ids[-1]) and not function.get("name"), "a call changes its id or name")
        part.calls[-1][1] += function["arguments"]

    def value(self) -> Any:
        return {f"{index}": part.value() for index, part in sorted(self._choices.items())}


class ResponseAnswer:
    """The items of a response."""

    def __init__(self) -> None:
        self.is_done = False
        self._numbers = 0
        self._items: list[_Part] = []
        self._status: list[str] = []

    def add(self, event: Mapping[str, Any]) -> None:
        _expect(event["sequence_number"] == self._numbers, "a sequence number is missing or comes twice")
        self._numbers += 1
        kind = event["type"]
        if kind == "response.output_item.added":
            item = event["item"]
            _expect(event["output_index"] == len(self._items), "an item is out of order")
            calls = [[item["name"], ""]] if item["type"] == "function_call" else []
            self._items.append(_Part(calls=calls, ids=[item["id"], item.get("call_id", "")]))
        elif kind.endswith(".delta"):
            part = self._items[event["output_index"]]
            _expect(event["item_id"] == part.ids[0] and part.ends is None, "a delta is of another item")
            if part.calls:
                part.calls[0][1] += event["delta"]
            else:
                part.add(kind.removeprefix("response."), event["delta"])
        elif kind == "response.output_item.done":
            self._items[event["output_index"]].ends = _item_end(event["item"], self._items[event["output_index"]])
        elif kind in ("response.completed", "response.incomplete"):
            for item, part in zip(event["response"]["output"], self._items, strict=True):
                _item_end(item, part)
            self._status, self.is_done = [event["response"]["status"]], True

    def value(self) -> Any:
        return [[item.value() for item in self._items], self._status]


def _item_end(item: Mapping[str, Any], part: _Part) -> str:
    """Return the status of a whole item, which must be the sum of its deltas."""
    _expect(item["id"] == part.ids[0], "an item changes its id")
    if part.calls:
        _expect([item["name"], item["arguments"]] == part.calls[0], "a call differs from its deltas")
        _expect(item["call_id"] == part.ids[1], "a call changes its id")
    else:
        whole = "".join(each["text"] for each in item["content"])
        _expect(whole == "".join(part.texts.values()), "an item differs from its deltas")
    status: str = item["status"]
    return status


class MessageAnswer:
    """The blocks of a message."""

    def __init__(self) -> None:
        self.is_done = False
        self._blocks: list[_Part] = []
        self._reason: list[Any] = []

    def add(self, event: Mapping[str, Any]) -> None:
        match event["type"]:
            case "content_block_start":
                block = event["content_block"]
                _expect(event["index"] == len(self._blocks), "a block is out of order")
                calls = [[block["name"], ""]] if block["type"] == "tool_use" else []
                self._blocks.append(_Part(calls=calls, ids=[block.get("id", "")]))
            case "content_block_delta":
                _expect(event["index"] == len(self._blocks) - 1, "a delta is of another block")
                part, delta = self._blocks[-1], event["delta"]
                if part.calls:
                    part.calls[0][1] += delta["partial_json"]
                else:
                    part.add(delta["type"], delta.get("text", "") + delta.get("thinking", ""))
            case "content_block_stop":
                _expect(event["index"] == len(self._blocks) - 1, "another block ends")
                self._blocks[-1].ends = "stopped"
            case "message_delta":
                self._reason = [event["delta"]["stop_reason"]]
            case "message_stop":
                self.is_done = True

    def value(self) -> Any:
        return [[block.value() for block in self._blocks], self._reason]


# -- what an engine answers that nothing disturbs ----------------------------------------------------------------------


def make_conversations(model: Path, count: int, seed: int) -> list[Case]:
    """Return questions of every kind, with the answers of an engine of this process."""
    tokenizer = ModelTokenizer.load(model)
    asked = questions(count, seed, tokenizer.added_tokens())
    return with_answers(asked, lambda budget: asyncio.run(answers_of(model, tokenizer, asked, budget)), 0.9)


async def answers_of(
    model: Path, tokenizer: ModelTokenizer, asked: Sequence[Case], budget: int, media: Media | None = None
) -> list[Any]:
    """Return the sum of the stream of each request. `media`: where they have pictures."""
    config = undisturbed_config(budget)
    replica = InProcess(engine=new_engine(load_model(ModelSpec(str(model), "float32", MAX_MODEL_LEN)), config, model))
    dispatcher = Dispatcher("tiny")
    dispatcher.join("only", replica, replica.profile)
    await ready(dispatcher)
    app = one_model_api(dispatcher, tokenizer, HttpConfig(), media=media)
    places = asyncio.Semaphore(_AT_ONCE)

    async def answer(case: Case, http: httpx.AsyncClient) -> Any:
        async with places:
            for _ in range(_MOST_TRIES):
                reply = await http.post(case.path, json={**case.request, "stream": True}, timeout=120)
                if reply.status_code != 429:
                    break
                await asyncio.sleep(float(reply.headers["retry-after"]))  # as a client does: grammars take a slow core
        if reply.status_code != 200:
            raise RuntimeError(f"{case}: {reply.status_code} {reply.text[:500]}")
        found = case.new_answer()
        for line in reply.text.split("\n"):  # `splitlines` also splits at U+2028, which JSON may contain
            if line.startswith("data: {"):
                found.add(json.loads(line[6:]))
        return found.value()

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        answers = await asyncio.gather(*(answer(case, http) for case in asked))
    await dispatcher.close()
    await replica.engine_thread.close()
    replica.engine_thread.engine.grammars.close()
    return answers
