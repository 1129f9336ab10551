"""Tools and schemas with values of any type: each is served or refused, and a call that the model makes is answered."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from crossdock.cluster.api.body.parser_names import TOOL_PARSERS
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.scripted_api import HI, ScriptedDispatcher, serving
from tests.cluster.api.text.test_message_parsers import CALLS

PARSERS = {family: parser for parser, family in TOOL_PARSERS.items()}
NAMES = st.sampled_from(["type", "properties", "required", "enum", "anyOf", "oneOf", "allOf", "$defs", "$ref", "items"])
WORDS = st.sampled_from(["to", "speed", "string", "integer", "object", "array", "move", ""])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(-1, 9, width=16) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | WORDS, inner, max_size=3),
    max_leaves=6,
)
PARAMETER = st.dictionaries(NAMES, VALUES, max_size=3) | VALUES
SCHEMA = st.fixed_dictionaries(
    {},
    optional={
        "type": st.just("object") | VALUES,
        "properties": st.fixed_dictionaries({}, optional={"to": PARAMETER, "speed": PARAMETER}) | VALUES,
        "required": st.just(["to"]) | VALUES,
        "$defs": VALUES,
    },
)
FUNCTION = st.fixed_dictionaries(
    {"name": st.just("move") | st.just("move") | VALUES},
    optional={"parameters": SCHEMA | VALUES, "description": WORDS | VALUES, "strict": st.booleans() | VALUES},
)
CHOICE = st.sampled_from(["auto", "required", "named"]) | VALUES


def parameter(value: Any) -> dict[str, Any]:
    return {"name": "move", "parameters": {"type": "object", "properties": {"to": value}}}


def bodies(function: dict[str, Any], choice: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the request of each API that offers a function and a choice: `named` is the choice of that function."""
    is_named, name = choice == "named", function["name"]
    in_chat = {"type": "function", "function": {"name": name}} if is_named else choice
    yield (
        "/v1/chat/completions",
        {"messages": HI, "tools": [{"type": "function", "function": function}], "tool_choice": in_chat},
    )
    in_response = {"type": "function", "name": name} if is_named else choice
    tool = {"type": "function", **function}
    yield "/v1/responses", {"input": "Hi", "tools": [tool], "tool_choice": in_response, "store": False}
    in_message = {"type": "tool", "name": name} if is_named else {"type": "any" if choice == "required" else choice}
    tool = {**function, "input_schema": function.get("parameters")}
    yield "/v1/messages", {"messages": HI, "max_tokens": 100, "tools": [tool], "tool_choice": in_message}


@pytest.mark.parametrize("family", sorted(PARSERS))
def test_tool_of_any_types_is_never_an_internal_error(family: str, tokenizer: ModelTokenizer) -> None:
    engine = ScriptedDispatcher(tokenizer, max_model_len=4000)
    engine.script = lambda submission: engine.story(submission, CALLS[family])

    @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @example({"name": ["move"]}, "auto")
    @example({"name": {"a": 1}}, "auto")
    @example({"name": True}, "required")
    @example(parameter({"type": "string", "enum": 5}), "required")
    @example(parameter({"anyOf": 5}), "auto")
    @example(parameter({"enum": 5}), "auto")
    @example({"name": "move", "parameters": {"properties": {"to": {}}, "required": 5}}, "named")
    @example({"name": "move", "parameters": {"properties": {"to": {}}, "required": [["to"]]}}, "named")
    @given(FUNCTION, CHOICE)
    def attempt(function: dict[str, Any], choice: Any) -> None:
        for path, body in bodies(function, choice):
            answer = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            assert answer.status_code < 500, f"{path} {answer.text}"

    with serving(engine, tokenizer, HttpConfig(tool_call_parser=PARSERS[family])) as http:
        attempt()
