"""Anthropic's Messages API, as Anthropic's own client reads it."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.api.body.messages_body import MessagesRequest
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ReplicaLost
from crossdock.workers.schedule.request.request import TokenDelta
from tests.cluster.api.routes.test_responses_api import PARSERS, THOUGHT, WRITTEN
from tests.cluster.api.scripted_api import (
    HI,
    MAX_MODEL_LEN,
    STORY,
    ScriptedDispatcher,
    Serve,
    named_events,
    serving,
)

MOVE = {"name": "move", "description": "Go", "input_schema": {"type": "object", "properties": {"to": {}}}}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
def claude(url: str, engine: ScriptedDispatcher) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=240) as client:
        yield client


def ask(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/messages", json={"messages": HI, "max_tokens": 50, **fields})


def refused(answer: httpx.Response, status: int, kind: str = "invalid_request_error") -> str:
    """Check Anthropic's error shape; return the message."""
    assert answer.status_code == status, answer.text
    error = answer.json()
    assert error.keys() == {"type", "error", "request_id"}
    assert error["request_id"] == answer.headers["x-request-id"]
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert error["error"].keys() == {"type", "message"}
    message: str = error["error"]["message"]
    return message


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, of which each must have a type of Anthropic's package."""
    found = named_events(answer)
    for event in found:
        EVENT.validate_python(event)
    return found


def test_message_is_answered_in_anthropics_types(claude: anthropic.Anthropic, tokenizer: ModelTokenizer) -> None:
    answer = claude.messages.create(model="tiny", max_tokens=50, messages=[{"role": "user", "content": "Hi"}])
    Message.model_validate(answer.model_dump())
    [block] = answer.content
    assert isinstance(block, anthropic.types.TextBlock)
    assert block.text == STORY
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    usage = answer.usage
    assert usage.output_tokens == len(tokenizer.encode(STORY)) + 1
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (4, 0)


def test_message_is_the_submission_of_the_same_chat(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3}
    answer = ask(http, system="Be brief.", stop_sequences=["fox"], **fields, messages=_TALK)
    assert answer.status_code == 200, answer.text
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Ho"},
            {"role": "user", "content": "a\nb"},
        ],
        "max_tokens": 50,
        "stop": ["fox"],
        **fields,
    }
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    ours, theirs = engine.submissions
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert ours.sampling == theirs.sampling
    assert ours.slo_class == theirs.slo_class


_TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": [{"type": "text", "text": "Ho", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
]


def test_stream_builds_the_whole_message(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    with claude.messages.stream(model="tiny", max_tokens=50, messages=[{"role": "user", "content": "Hi"}]) as stream:
        assert "".join(stream.text_stream) == STORY
        streamed = stream.get_final_message()
    whole = claude.messages.create(model="tiny", max_tokens=50, messages=[{"role": "user", "content": "Hi"}])
    assert streamed.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    kinds = [event["type"] for event in events(ask(http, stream=True))]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["fox", "dog"]}, "stop_sequence", "fox"),
        ({}, "end_turn", None),
    ],
)
def test_end_of_message_has_its_reason(
    http: httpx.Client, stream: bool, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    answer = ask(http, stream=stream, **fields)
    end = next(e["delta"] for e in events(answer) if e["type"] == "message_delta") if stream else answer.json()
    assert (end["stop_reason"], end["stop_sequence"]) == (reason, sequence)


def test_limit_beyond_the_context_ends_with_the_context(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    engine.script = partial(engine.story, words="dog " * 300)
    answer = ask(http, max_tokens=32_000).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == MAX_MODEL_LEN
    message = refused(ask(http, messages=[{"role": "user", "content": "dog " * 300}]), 400)
    assert "maximum context length" in message


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "move"}])
def test_forced_call_is_a_tool_use_block_whole_and_streamed(
    claude: anthropic.Anthropic, engine: ScriptedDispatcher, tokenizer: ModelTokenizer, choice: Any
) -> None:
    engine.script = partial(engine.story, words=WRITTEN)
    fields: Any = {"model": "tiny", "max_tokens": 90, "messages": HI, "tools": [MOVE], "tool_choice": choice}
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        [block] = answer.content
        assert isinstance(block, anthropic.types.ToolUseBlock)
        assert (block.name, block.input) == ("move", {"to": {"x": 3}})
        assert block.id.startswith("toolu_")
        assert answer.stop_reason == "tool_use"


def test_thoughts_text_and_calls_are_blocks_whole_and_streamed(tokenizer: ModelTokenizer) -> None:
    engine = ScriptedDispatcher(tokenizer, max_model_len=1000)
    engine.script = partial(engine.story, words=THOUGHT)
    fields: Any = {"model": "tiny", "max_tokens": 300, "messages": HI}
    fields["tools"] = [{"name": name, "input_schema": {}} for name in "fg"]
    with (
        serving(engine, tokenizer, PARSERS) as http,
        anthropic.Anthropic(base_url=str(http.base_url), api_key="none", max_retries=0) as claude,
    ):
        whole = claude.messages.create(**fields)
        with claude.messages.stream(**fields) as stream:
            streamed = stream.get_final_message()
        single = claude.messages.create(**fields, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        omitted = claude.messages.create(**fields, thinking={"type": "adaptive", "display": "omitted"})
    for answer in (whole, streamed):
        Message.model_validate(answer.model_dump())
        thinking, text, first, second = answer.content
        assert isinstance(thinking, anthropic.types.ThinkingBlock)
        assert isinstance(text, anthropic.types.TextBlock)
        assert (thinking.thinking, text.text) == ("Hm", "Go")
        calls = [call for call in (first, second) if isinstance(call, anthropic.types.ToolUseBlock)]
        assert [(call.name, call.input) for call in calls] == [("f", {"a": 1}), ("g", {})]
        assert answer.stop_reason == "tool_use"
    assert [block.type for block in single.content] == ["thinking", "text", "tool_use"]
    assert [block.type for block in omitted.content] == ["text", "tool_use", "tool_use"]


def test_budget_of_thinking_is_that_of_the_chat(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    own = deepcopy(tokenizers["byte_level"])
    own.add_tokens(["<think>", "</think>"])
    own.chat_template = "{{ messages[-1].content }}<think>\n"
    engine = ScriptedDispatcher(ModelTokenizer(own))
    engine.script = partial(engine.story, words="Hm</think>Go")
    with serving(engine, engine.tokenizer, HttpConfig.model_validate({"reasoning_parser": "qwen3"})) as http:
        answer = ask(http, thinking={"type": "enabled", "budget_tokens": 7}).json()
        assert http.post("/v1/chat/completions", json={"messages": HI, "thinking_token_budget": 7}).status_code == 200
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    ours, theirs = engine.submissions
    assert ours.sampling.grammar == theirs.sampling.grammar is not None


def test_conversation_with_tools_and_thoughts_becomes_a_chat() -> None:
    body = MessagesRequest.of(
        {
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Sys"}],
            "tools": [MOVE],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "messages": [
                {"role": "user", "content": "Go"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm", "signature": ""},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "Going"},
                        {"type": "tool_use", "id": "t1", "name": "move", "input": {"to": 1}},
                        {"type": "tool_use", "id": "t2", "name": "move", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "there"},
                        {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "no"}]},
                        {"type": "text", "text": "And now?"},
                    ],
                },
            ],
        }
    )
    chat = body.chat()
    assert chat.messages == [
        {"role": "system", "content": [{"type": "text", "text": "Sys"}]},
        {"role": "user", "content": "Go"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Going"}],
            "reasoning_content": "Hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "move", "arguments": {"to": 1}}},
                {"id": "t2", "type": "function", "function": {"name": "move", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "there"},
        {"role": "tool", "tool_call_id": "t2", "content": [{"type": "text", "text": "no"}]},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]
    assert chat.tools == [
        {
            "type": "function",
            "function": {"name": "move", "description": "Go", "parameters": MOVE["input_schema"]},
        }
    ]
    assert (chat.tool_choice, chat.chat_template_kwargs) == ("auto", {"enable_thinking": True})


def test_last_message_of_the_assistant_is_continued(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    prefilled = [*HI, {"role": "assistant", "content": "The quick"}]
    assert ask(http, messages=prefilled).status_code == 200
    chat = {"messages": prefilled, "continue_final_message": True}
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    ours, theirs = engine.submissions
    assert ours.prompt_token_ids == theirs.prompt_token_ids


def test_tokens_are_counted_as_the_prompt_has_them(
    claude: anthropic.Anthropic, engine: ScriptedDispatcher, http: httpx.Client
) -> None:
    counted = claude.messages.count_tokens(model="tiny", messages=_TALK, system="Be brief.")  # type: ignore[arg-type]
    ask(http, messages=_TALK, system="Be brief.")
    assert counted.input_tokens == len(engine.submissions[-1].prompt_token_ids)
    long = [{"role": "user", "content": "dog " * 500}]
    many = http.post("/v1/messages/count_tokens", json={"messages": long}).json()["input_tokens"]
    assert many > MAX_MODEL_LEN


WRONG_MESSAGES: list[tuple[Any, str]] = [
    ({"role": "robot", "content": "Hi"}, ".role"),
    ({"role": ["user"], "content": "Hi"}, ".role"),
    ({"role": "user"}, ".content"),
]
WRONG_BLOCKS: list[tuple[str, Any, str]] = [
    ("user", {"type": "image"}, ".content[0].source"),
    ("user", {"type": "text"}, ".content[0].text"),
    ("user", "Hi", ".content[0]"),
    ("user", {"type": "tool_result"}, ".content[0].tool_use_id"),
    ("assistant", {"type": "tool_use", "id": "a", "name": "b"}, ".content[0].input"),
    ("assistant", {"type": "tool_use", "id": "a", "name": "b", "input": {}}, ""),
]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "'max_tokens'"),
        ({"max_tokens": 0}, "'max_tokens'"),
        ({"messages": []}, "'messages'"),
        ({"messages": "Hi"}, "'messages'"),
        *(({"messages": [message]}, f"'messages[0]{place}'") for message, place in WRONG_MESSAGES),
        *(
            ({"messages": [{"role": role, "content": [block]}]}, f"'messages[0]{place}'")
            for role, block, place in WRONG_BLOCKS
        ),
        ({"system": 5}, "'system"),
        ({"system": [{"type": "image"}]}, "'system[0]'"),
        ({"temperature": 3}, "'temperature'"),
        ({"temperature": "hot"}, "'temperature'"),
        ({"top_k": -5}, "'top_k'"),
        ({"stop_sequences": [""]}, "'stop_sequences[0]'"),
        ({"stop_sequences": ["a" * 5000]}, "'stop_sequences[0]'"),
        ({"stop_sequences": ["a" * 4000] * 5}, "'stop_sequences'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'tools[0].type'"),
        ({"tools": [{"name": "f"}]}, "'tools[0].input_schema'"),
        ({"tools": [{"name": 5, "input_schema": {}}]}, "'tools[0].name'"),
        ({"tool_choice": {"type": "any"}}, "'tool_choice'"),
        ({"tool_choice": {"type": "some"}}, "'tool_choice.type'"),
        ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [MOVE]}, "'tool_choice'"),
        ({"thinking": {"type": "deep"}}, "'thinking.type'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "'thinking.budget_tokens'"),
        ({"thinking": {"type": "enabled", "budget_tokens": "9"}}, "'thinking.budget_tokens'"),
        ({"thinking": {"type": "enabled", "budget": 5}}, "Did you mean 'thinking.budget_tokens'?"),
        ({"output_config": {"form": {}}}, "Did you mean 'output_config.format'?"),
        ({"output_config": {"format": {"type": "xml"}}}, "'output_config.format.type'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "'output_config.format.schema'"),
        ({"output_config": {"effort": 7}}, "'output_config.effort'"),
        ({"service_tier": "gold"}, "'service_tier'"),
        ({"container": "c"}, "'container'"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "'cache_control'"),
        ({"cache_control": {"type": "ephemeral", "ttl": ["5m"]}}, "'cache_control'"),
        ({"tools": [{**MOVE, "cache_control": {"type": "lasting"}}]}, "'tools.cache_control'"),
        ({"system": [{"type": "text", "text": "a", "cache_control": 5}]}, "'system.cache_control'"),
        ({"mcp_servers": [{}]}, "'mcp_servers'"),
        ({"speed": "fast"}, "'speed'"),
        ({"stop": ["a"]}, "'stop'. Did you mean 'top_p'?"),
        ({"max_token": 5}, "Did you mean 'max_tokens'?"),
    ],
)
def test_wrong_field_is_named_in_anthropics_shape(
    http: httpx.Client, engine: ScriptedDispatcher, fields: dict[str, Any], named: str
) -> None:
    for stream in (False, True):
        assert named in refused(ask(http, stream=stream, **fields), 400)
    assert not engine.submissions


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_what_a_cache_control_has_written(
    http: httpx.Client, engine: ScriptedDispatcher, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripted replica finds 4 tokens in its cache, a page. A page that is not full is not cached."""
    monkeypatch.setattr(engine, "cache_page_size", 4)
    system = "Answer with a story of several words"
    for control in (None, {"type": "ephemeral"}):
        answer = ask(http, system=system, stream=stream, cache_control=control)
        usage = events(answer)[0]["message"]["usage"] if stream else answer.json()["usage"]
        num_tokens = len(engine.submissions[-1].prompt_token_ids)
        counts = [usage[f"{name}input_tokens"] for name in ("cache_read_", "cache_creation_", "")]
        written = num_tokens // 4 * 4 - 4 if control else 0
        assert written > 0 or not control
        assert counts == [4, written, num_tokens - 4 - written]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/messages", b"{", 400, "invalid_request_error"),
        ("/v1/messages", b"[]", 400, "invalid_request_error"),
        ("/v1/messages/count_tokens", b"5", 400, "invalid_request_error"),
        ("/v1/messages/batches", b"{}", 404, "not_found_error"),
        ("/v1/messages", b" " * 200_000, 413, "invalid_request_error"),
        (
            "/v1/messages",
            b'{"model": "no", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}',
            404,
            "not_found_error",
        ),
    ],
)
def test_every_error_below_the_path_has_anthropics_shape(
    http: httpx.Client, path: str, body: bytes, status: int, kind: str
) -> None:
    refused(http.post(path, content=body, headers={"content-type": "application/json"}), status, kind)
    assert refused(http.get("/v1/messages"), 405)


def test_failure_in_a_stream_is_an_error_event(claude: anthropic.Anthropic, engine: ScriptedDispatcher) -> None:
    def script(submission: Any) -> list[TokenDelta | Exception | float]:
        return [*engine.story(submission)[:3], ReplicaLost("gone")]

    engine.script = script
    with (
        pytest.raises(anthropic.APIStatusError) as failed,
        claude.messages.stream(model="tiny", max_tokens=50, messages=[{"role": "user", "content": "Hi"}]) as stream,
    ):
        for _ in stream:
            pass
    assert isinstance(failed.value.body, dict)
    assert failed.value.body["error"]["type"] == "overloaded_error"


def test_key_comes_by_either_header(serve: Serve) -> None:
    http = serve(api_keys=["k"])
    refused(ask(http), 401, "authentication_error")
    for key, status in (("k", 200), ("other", 401)):
        for headers in ({"x-api-key": key}, {"authorization": f"Bearer {key}"}):
            body = {"messages": HI, "max_tokens": 5}
            assert http.post("/v1/messages", json=body, headers=headers).status_code == status
    wrong = {"x-api-key": "k", "authorization": "Bearer other"}
    assert http.get("/v1/models", headers=wrong).status_code == 401
