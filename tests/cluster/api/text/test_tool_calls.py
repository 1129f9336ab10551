"""Forced tool calls: the grammar of one call, and the call as OpenAI's client reads it, whole and streamed."""

import json
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from crossdock.cluster.api.body.tool_calls import ForcedCall, forced_call
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.text.forced_call import ForcedCallText, plain_openings
from crossdock.cluster.api.text.message_parser import ChatMessage
from tests.cluster.api.scripted_api import HI, ScriptedDispatcher, refused
from tests.cluster.api.text.parsed_messages import whole_message

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
MOVE = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/Point"}},
    "required": ["to"],
    "$defs": {"Point": POINT},
}
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": MOVE, "strict": True}},
    {"type": "function", "function": {"name": 'say "stop"'}},
]
NAMED = {"type": "function", "function": {"name": "move"}}
SHORT = {"chat_template": "{{ messages[0].content }}"}  # the scripted model's context has no place for the tools
WRITTEN = '{"name": "move", "arguments": {"to": {"x": 3}}}'


def forced(choice: Any) -> ForcedCall:
    call = forced_call(TOOLS, choice)
    assert call is not None
    return call


@pytest.mark.parametrize(
    ("text", "required", "named"),
    [
        (WRITTEN, True, True),
        ('{"name": "say \\"stop\\"", "arguments": {}}', True, False),
        ('{"name": "move", "arguments": {}}', False, False),
        ('{"name": "jump", "arguments": {}}', False, False),
        ('{"name": "move", "arguments":  {"to": {"x": 3}}}', False, False),
        ("move", False, False),
    ],
)
def test_grammar_of_forced_call_allows_calls_of_these_functions_alone(text: str, required: bool, named: bool) -> None:
    for choice, is_allowed in (("required", required), (NAMED, named)):
        grammar = forced(choice).grammar()
        assert grammar.kind == "lark"
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar.source))
        assert not matcher.get_error()
        taken = matcher.try_consume_tokens([*text.encode()])
        assert (taken == len(text.encode()) and matcher.is_accepting()) == is_allowed


def test_choice_that_leaves_it_to_the_model_forces_nothing() -> None:
    assert [forced_call(TOOLS, choice) for choice in (None, "auto", "none")] == [None] * 3


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([], "required", "tool_choice"),
        (TOOLS, "sometimes", "tool_choice"),
        (TOOLS, 5, "tool_choice"),
        (TOOLS, {"type": "allowed_tools"}, "tool_choice"),
        (TOOLS, {"type": "function"}, "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "jump"}}, "tool_choice"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": 5}}],
            "required",
            "tools[0].function.parameters",
        ),
    ],
)
def test_choice_without_a_tool_to_call_is_refused(tools: list[dict[str, Any]], choice: Any, param: str) -> None:
    with pytest.raises(ApiError) as error:
        forced_call(tools, choice)
    assert error.value.param == param


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("end", ["stop", "length"])
def test_arguments_of_call_in_pieces_of_any_size_are_whole(size: int, end: str) -> None:
    """With `length` the limit was reached at the last brace: the call is whole all the same."""
    message = ChatMessage(ForcedCallText(plain_openings(forced(NAMED))))
    pieces = [WRITTEN[start : start + size] for start in range(0, len(WRITTEN), size)]
    ends = [None] * (len(pieces) - 1) + [end]
    calls = [
        call
        for piece, reason in zip(pieces, ends, strict=True)
        for call in message.delta([piece], reason).get("tool_calls", ())
    ]
    assert [call["function"].get("name") for call in calls] == ["move"] + [None] * (len(calls) - 1)
    assert "".join(call["function"]["arguments"] for call in calls) == '{"to": {"x": 3}}'
    assert {call["index"] for call in calls} == {0}


def test_call_cut_by_its_limit_keeps_what_was_written() -> None:
    cut = ChatMessage(ForcedCallText(plain_openings(forced(NAMED))))
    assert cut.delta(['{"name": "mo'], "length") == {"content": '{"name": "mo'}
    cut = ChatMessage(ForcedCallText(plain_openings(forced(NAMED))))
    [call] = whole_message(cut, '{"name": "move", "arguments": {"to": {"x": 3}', reason="length")["tool_calls"]
    assert call["function"]["arguments"] == '{"to": {"x": 3}'


@pytest.fixture
def calling(engine: ScriptedDispatcher) -> ScriptedDispatcher:
    """The engine, which writes a call."""
    engine.script = partial(engine.story, words=WRITTEN)
    return engine


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"n": 2}])
def test_forced_call_is_a_tool_call_for_openais_client(
    client: openai.OpenAI, calling: ScriptedDispatcher, choice: Any, reason: str, more: dict[str, Any]
) -> None:
    fields: Any = {"model": "tiny", "messages": HI, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**fields, **more, extra_body=SHORT).choices
    with client.chat.completions.stream(**fields, **more, extra_body=SHORT) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices
    assert len(whole) == len(streamed) == more.get("n", 1)
    for answered in (*whole, *streamed):
        assert answered.finish_reason == reason
        [call] = answered.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("move", {"to": {"x": 3}})
        assert call.id
        assert bool(answered.logprobs) == ("logprobs" in more)
    assert all(answered.message.content is None for answered in whole)
    assert {submission.sampling.grammar for submission in calling.submissions} == {forced(choice).grammar()}


def allowed(mode: Any, *names: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_like_a_request_with_these_tools_alone(
    http: httpx.Client, calling: ScriptedDispatcher, mode: str
) -> None:
    shown = {"chat_template": "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"}
    for tools, choice in ((TOOLS, allowed(mode, "move")), (TOOLS[:1], mode)):
        body = {"messages": HI, "tools": tools, "tool_choice": choice, **shown}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
    first, second = calling.submissions
    assert first.prompt_token_ids == second.prompt_token_ids == calling.tokenizer.encode("move Hi")
    assert first.sampling.grammar == second.sampling.grammar
    assert (first.sampling.grammar is None) == (mode == "auto")


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (allowed("none", "move"), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, "tool_choice.allowed_tools.tools"),
        (allowed("auto", "move", "jump"), "tool_choice.allowed_tools.tools[1]"),
        (allowed("auto", 5), "tool_choice.allowed_tools.tools[0]"),
        (allowed("required"), "tool_choice"),
    ],
)
def test_allowed_tools_of_another_form_are_refused(http: httpx.Client, choice: Any, param: str) -> None:
    body = {"messages": HI, "tools": TOOLS, "tool_choice": choice, **SHORT}
    refused(http.post("/v1/chat/completions", json=body), 400, param=param)
    tools = [*TOOLS, {"type": "function"}]
    body |= {"tools": tools, "tool_choice": allowed("auto", "move")}
    refused(http.post("/v1/chat/completions", json=body), 400, param="tools[2]")
