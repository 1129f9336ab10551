"""Every answer and every event has the types of OpenAI's and Anthropic's packages, read strictly: Rust's enums do so.

Only routes that those APIs have are asked. No field is taken out or replaced before it is read.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import anthropic.types
import httpx
import openai.types
import pytest
from openai.types import chat, responses
from pydantic import TypeAdapter

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.scripted_api import HI, ScriptedDispatcher, Serve, events, named_events, serving

CALL = '<tool_call>{"name": "move", "arguments": {"to": "a"}}</tool_call>'
THOUGHTS = f"<think>Where?</think>There.{CALL}"
SCHEMA = {"type": "object", "properties": {"to": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "move", "description": "Go", "parameters": SCHEMA}}
RESPONSE_TOOL = {"type": "function", "name": "move", "parameters": SCHEMA}
MESSAGE_TOOL = {"name": "move", "input_schema": SCHEMA}
TIERS = (None, "auto", "default", "flex", "priority", "interactive", "standard", "batch")


def strictly(type_: Any, value: Any) -> None:
    """Check a value, all of whose fields and enums must be those of the type."""
    _adapter(type_).validate_json(json.dumps(value), strict=True)


@cache
def _adapter(type_: Any) -> TypeAdapter[Any]:
    return TypeAdapter(type_)


@pytest.fixture(params=["", "calls"])
def http(request: pytest.FixtureRequest, tokenizer: ModelTokenizer) -> Any:
    """Yield a client of a server whose model tells a story, or thinks, speaks and calls a tool."""
    engine = ScriptedDispatcher(tokenizer, max_model_len=2000)
    if request.param:
        engine.script = lambda submission: engine.story(submission, THOUGHTS)
    config = HttpConfig(tool_call_parser="hermes", reasoning_parser="qwen3")
    with serving(engine, tokenizer, config) as client:
        yield client


def post(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    answer = http.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer


def test_chats_and_their_events_have_openais_types(http: httpx.Client) -> None:
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    several: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "n": 2}
    tools: dict[str, Any] = {"tools": [TOOL], "tool_choice": "auto"}
    for fields in (several, tools, {**several, **tools}, *({"service_tier": tier} for tier in TIERS)):
        strictly(chat.ChatCompletion, post(http, "/v1/chat/completions", messages=HI, **fields).json())
        for event in events(post(http, "/v1/chat/completions", messages=HI, **fields, **usage)):
            strictly(chat.ChatCompletionChunk, event)


def test_completions_and_their_events_have_openais_types(http: httpx.Client) -> None:
    for fields in ({}, {"logprobs": 2, "n": 2}, {"echo": True, "max_tokens": 2}):
        strictly(openai.types.Completion, post(http, "/v1/completions", prompt="Hi", **fields).json())
        for event in events(post(http, "/v1/completions", prompt="Hi", stream=True, **fields)):
            # OpenAI's package has one type for answers and events; its API sends null before the last event.
            choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in event["choices"]]
            strictly(openai.types.Completion, {**event, "choices": choices})


def test_responses_and_their_events_have_openais_types(http: httpx.Client) -> None:
    logprobs: dict[str, Any] = {"top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    for fields in ({"tools": [RESPONSE_TOOL]}, logprobs, *({"service_tier": tier} for tier in TIERS)):
        made = post(http, "/v1/responses", input="Hi", **fields).json()
        strictly(responses.Response, made)
        strictly(responses.Response, http.get(f"/v1/responses/{made['id']}").json())
        for event in named_events(post(http, "/v1/responses", input="Hi", stream=True, **fields)):
            strictly(responses.ResponseStreamEvent, event)
    strictly(responses.ResponseItemList, http.get(f"/v1/responses/{made['id']}/input_items").json())


def test_response_has_each_field_that_open_responses_requires(http: httpx.Client) -> None:
    """Its schema names fields without a value, too: penalties, keys, the end of a running response."""
    required = {"completed_at", "presence_penalty", "frequency_penalty", "safety_identifier", "prompt_cache_key"}
    fields: dict[str, Any] = {"input": "Hi", "tools": [RESPONSE_TOOL], "presence_penalty": 0.5, "prompt_cache_key": "a"}
    whole = post(http, "/v1/responses", **fields).json()
    begun = named_events(post(http, "/v1/responses", stream=True, **fields))[0]["response"]
    for response in (whole, begun):
        assert required <= response.keys()
        assert (response["presence_penalty"], response["frequency_penalty"]) == (0.5, 0.0)
        assert response["prompt_cache_key"] == "a"
        assert response["tools"] == [{**RESPONSE_TOOL, "description": None, "strict": None}]
    assert begun["completed_at"] is None
    assert whole["completed_at"] >= whole["created_at"]


def test_messages_and_their_events_have_anthropics_types(http: httpx.Client) -> None:
    for tier in ("auto", "standard_only"):
        fields: dict[str, Any] = {"max_tokens": 60, "messages": HI, "tools": [MESSAGE_TOOL], "service_tier": tier}
        strictly(anthropic.types.Message, post(http, "/v1/messages", **fields).json())
        for event in named_events(post(http, "/v1/messages", stream=True, **fields)):
            strictly(anthropic.types.RawMessageStreamEvent, event)
    counted = post(http, "/v1/messages/count_tokens", messages=HI).json()
    strictly(anthropic.types.MessageTokensCount, counted)


def test_models_have_the_types_of_both_packages(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    for model in (*listed["data"], http.get(f"/v1/models/{listed['data'][0]['id']}").json()):
        strictly(openai.types.Model, model)
        strictly(anthropic.types.ModelInfo, model)
    with anthropic.Anthropic(base_url=str(http.base_url), api_key="none", _strict_response_validation=True) as client:
        assert [model.id for model in client.models.list()] == [model["id"] for model in listed["data"]]


def test_files_have_openais_types(serve: Serve, tmp_path: Path) -> None:
    http = serve(batch_folder=str(tmp_path))
    form: dict[str, Any] = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    made = http.post("/v1/files", **form).json()
    strictly(openai.types.FileObject, made)
    strictly(openai.types.FileObject, http.get(f"/v1/files/{made['id']}").json())
    strictly(openai.types.FileDeleted, http.delete(f"/v1/files/{made['id']}").json())


def test_paths_of_openais_clients_that_are_not_served_are_not_found(http: httpx.Client) -> None:
    """A client that probes for a path reads 404 as "not here", and 405 as an error of its own."""
    for path in ("/v1/responses/compact", "/v1/responses/input_tokens"):
        answer = http.post(path, json={"input": "Hi"})
        assert answer.status_code == 404
        assert path in answer.json()["error"]["message"]
