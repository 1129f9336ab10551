"""Schemas on their way from a request to the engine's grammar, through every field that may hold one."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.model.grammar.matcher import to_llguidance
from crossdock.workers.schedule.request.submission import Grammar
from tests.cluster.api.scripted_api import HI, ScriptedDispatcher, refused, serving

BYTES = LLTokenizer("byte")
SHORT = {"chat_template": "{{ messages[0].content }}{# <tool_call> #}", "messages": HI}
PLAIN = {"chat_template": "{{ messages[0].content }}", "messages": HI}


def chat_tool(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}


def response_tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "name": "f", "parameters": schema}


# For each field: the path, the body with a schema, and the answer with a JSON text.
CHAT = "/v1/chat/completions"
NAMED = {"type": "function", "function": {"name": "f"}}
FORCED, HERMES = '{"name": "f", "arguments": %s}', '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
FIELDS: dict[str, Any] = {
    "response_format": (
        CHAT,
        lambda schema: {
            **SHORT,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        },
        "%s",
    ),
    "response_format of a completion": (
        "/v1/completions",
        lambda schema: {
            "prompt": "Hi",
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        },
        "%s",
    ),
    "structured_outputs.json": (CHAT, lambda schema: {**SHORT, "structured_outputs": {"json": schema}}, "%s"),
    "structured_outputs.json as text": (
        CHAT,
        lambda schema: {**SHORT, "structured_outputs": {"json": json.dumps(schema)}},
        "%s",
    ),
    "guided_json": (CHAT, lambda schema: {**SHORT, "guided_json": schema}, "%s"),
    "required": (CHAT, lambda schema: {**PLAIN, "tools": [chat_tool(schema)], "tool_choice": "required"}, FORCED),
    "named": (CHAT, lambda schema: {**PLAIN, "tools": [chat_tool(schema)], "tool_choice": NAMED}, FORCED),
    "text.format": (
        "/v1/responses",
        lambda schema: {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
        "%s",
    ),
    "required in Responses": (
        "/v1/responses",
        lambda schema: {
            "input": "Hi",
            "tools": [response_tool(schema)],
            "tool_choice": "required",
            "text": {"format": {"type": "json_object"}},  # which a call leaves aside
        },
        FORCED,
    ),
    "output_config.format": (
        "/v1/messages",
        lambda schema: {
            "messages": HI,
            "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
        "%s",
    ),
    "any in Messages": (
        "/v1/messages",
        lambda schema: {
            "messages": HI,
            "max_tokens": 9,
            "tools": [{"name": "f", "input_schema": schema}],
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        },
        FORCED,
    ),
}


@pytest.fixture(scope="module")
def engine(tokenizer: ModelTokenizer) -> ScriptedDispatcher:
    """Return an engine whose context has a place for tools as JSON."""
    engine = ScriptedDispatcher(tokenizer, max_model_len=10_000)
    engine.script = partial(engine.story, words="x")
    return engine


@pytest.fixture(scope="module")
def http(engine: ScriptedDispatcher, tokenizer: ModelTokenizer) -> Iterator[httpx.Client]:
    with serving(engine, tokenizer, HttpConfig(trust_request_chat_template=True)) as http:
        yield http


def accepts(grammar: Grammar | None, *texts: str) -> list[bool]:
    assert grammar is not None
    compiled = to_llguidance(grammar)
    matchers = [LLMatcher(BYTES, compiled, log_level=0) for _ in texts]
    assert not any(matcher.get_error() for matcher in matchers)
    pairs = [(matcher, [*text.encode()]) for matcher, text in zip(matchers, texts, strict=True)]
    return [matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting() for matcher, ids in pairs]


def grammar_of(http: httpx.Client, engine: ScriptedDispatcher, path: str, body: Any) -> Grammar | None:
    """Return the grammar of a request, which must succeed."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return engine.submissions[-1].sampling.grammar


@pytest.mark.parametrize("field", FIELDS)
@settings(max_examples=5, deadline=None)
@given(st.integers(10**16, 10**30), st.integers(-(10**30), -(10**16)))
def test_integers_of_up_to_30_digits_reach_the_engine_as_they_are(
    http: httpx.Client, engine: ScriptedDispatcher, field: str, listed: int, low: int
) -> None:
    path, body, form = FIELDS[field]
    properties = {"id": {"enum": [listed, "x"]}, "n": {"type": "integer", "minimum": low}}
    schema = {"type": "object", "properties": properties, "required": ["id", "n"], "title": str(listed)}
    values = [(listed, low), (listed, 0), (listed + 1, low), (listed, low - 1), (listed + 2, low - 3)]
    texts = [form % json.dumps({"id": number, "n": bound}) for number, bound in values]
    grammar = grammar_of(http, engine, path, body(schema))
    assert accepts(grammar, *texts) == [True, True, False, False, False]


@pytest.mark.parametrize("field", FIELDS)
def test_undeclared_properties_are_generated_only_where_the_schema_asks(
    http: httpx.Client, engine: ScriptedDispatcher, field: str
) -> None:
    path, body, form = FIELDS[field]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    texts = [form % '{"city": "Paris"}', form % '{"city": "Paris", "weather": "fine"}']
    assert accepts(grammar_of(http, engine, path, body(schema)), *texts) == [True, False]
    schema |= {"additionalProperties": True}
    assert accepts(grammar_of(http, engine, path, body(schema)), *texts) == [True, True]


@pytest.mark.parametrize("field", [field for field in FIELDS if FIELDS[field][2] == FORCED])
@pytest.mark.parametrize(
    "schema", [{}, {"type": "object"}, {"type": "object", "properties": {}}, {"description": "none"}]
)
def test_forced_call_of_a_tool_without_input_has_no_arguments(
    http: httpx.Client, engine: ScriptedDispatcher, field: str, schema: dict[str, Any]
) -> None:
    path, body, form = FIELDS[field]
    grammar = grammar_of(http, engine, path, body(schema))
    assert accepts(grammar, form % "{}", form % '{"a": 1}', form % '"text"', form % "null") == [True] + [False] * 3


@pytest.mark.parametrize("field", [field for field in FIELDS if FIELDS[field][2] == FORCED])
def test_arguments_of_a_forced_call_are_an_object_whatever_the_schema_leaves_out(
    http: httpx.Client, engine: ScriptedDispatcher, field: str
) -> None:
    path, body, form = FIELDS[field]
    number = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    shared = {"$defs": {"n": number}}
    for schema in (
        number,
        {"type": ["object", "null"], **number},
        {"$ref": "#/$defs/n", **shared},
        {"anyOf": [number]},
    ):
        grammar = grammar_of(http, engine, path, body(schema))
        texts = (form % '{"a": 1}', form % '"text"', form % "null", form % '{"b": 1}')
        assert accepts(grammar, *texts) == [True, False, False, False]
    answer = http.post(path, json=body({"type": "string"}))
    assert answer.status_code == 400
    assert "an object" in answer.text


def test_schema_of_a_strict_function_is_exact_and_closed(engine: ScriptedDispatcher, tokenizer: ModelTokenizer) -> None:
    number = 175_928_847_299_117_063
    schema = {"type": "object", "properties": {"id": {"const": number}}}
    tools = [chat_tool(schema, strict=True)]
    config = HttpConfig(trust_request_chat_template=True, tool_call_parser="hermes")
    with serving(engine, tokenizer, config) as http:
        grammar = grammar_of(http, engine, CHAT, {**PLAIN, "tools": tools})
    texts = [
        HERMES % json.dumps(arguments) for arguments in ({"id": number}, {"id": number - 7}, {"id": number, "b": 1})
    ]
    assert accepts(grammar, *texts, "Sure.") == [True, False, False, True]


def test_malformed_response_format_is_refused_beside_a_forced_call(http: httpx.Client) -> None:
    body = {**PLAIN, "tools": [chat_tool({})], "tool_choice": "required", "response_format": {"type": "xml"}}
    refused(http.post(CHAT, json=body), 400, param="response_format.type")
