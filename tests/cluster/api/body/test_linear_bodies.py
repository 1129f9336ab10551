"""Measure parsers of what a client sends: bodies, grammars in each form, stop strings, messages."""

import json
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from crossdock.cluster.api.body.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from crossdock.cluster.api.body.constraints import STRUCTURED_OUTPUTS, response_format, structured_outputs
from crossdock.cluster.api.body.embedding_body import EmbeddingRequest
from crossdock.cluster.api.body.messages import template_messages
from crossdock.cluster.api.body.messages_body import CountTokensRequest, MessagesRequest
from crossdock.cluster.api.body.response_items import chat_messages, input_items
from crossdock.cluster.api.body.responses_body import ResponsesRequest
from crossdock.cluster.api.body.stop_strings import StopStrings, StopTable
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.text.reasoning_grammar import ReasoningGrammar
from crossdock.workers.schedule.request.submission import Grammar
from tests.cluster.api.linear_time import CHARACTERS, LONG, assert_linear

CONVERSATIONS = [ChatCompletionRequest, MessagesRequest, CountTokensRequest, ResponsesRequest]
OTHERS = [CompletionRequest, TokenizeRequest, DetokenizeRequest, EmbeddingRequest]
BODIES = [*CONVERSATIONS, *OTHERS, LoadAdapterRequest, UnloadAdapterRequest]
PAIRS = ["".join(pair) for pair in permutations(["[", "]", "{", "}", '"', ",", ":", "\\", "0", "::=", "/"], 2)]
UNITS = [*CHARACTERS, *PAIRS, "::=", "[],", '{"a":', '"",', "start:", "a ::= ", "/a", '\\"']


def in_schema(text: str) -> Any:
    return response_format({"type": "json_schema", "json_schema": {"schema": {"const": text}}})


def in_stop(text: str) -> None:
    stops = StopStrings(StopTable([text[:100], text[:99] + "b"]))
    for start in range(0, len(text), 40):
        stops.find(text[start : start + 4], ignore=True)


READERS: dict[str, Callable[[str], Any]] = {
    **{
        f"structured_outputs.{kind}": lambda text, kind=kind: structured_outputs(  # type: ignore[misc]
            {kind: [text] if kind == "choice" else text}
        )
        for kind in STRUCTURED_OUTPUTS
    },
    "response_format": in_schema,
    "regex after reasoning": lambda text: ReasoningGrammar(None, 1).around(Grammar("regex", text), has_rules=False),
    "stop": in_stop,
    "messages": lambda text: template_messages(
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}]
    ),
    "input": lambda text: chat_messages(
        None, input_items([{"type": "function_call", "call_id": "c", "name": "f", "arguments": text}]), 1
    ),
    **{f"{body.__name__}": lambda text, body=body: body.parse(text.encode()) for body in BODIES},  # type: ignore[misc]
    **{
        f"{body.__name__} in a field": lambda text, body=body: body.parse(  # type: ignore[misc]
            f'{{"prompt": {text}, "{text}": 1, "messages": {text}'.encode()
        )
        for body in BODIES
    },
    "a text in a body": lambda text: ChatCompletionRequest.parse(
        json.dumps({"messages": [{"content": text}]}).encode()
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_text_of_a_client_takes_time_in_proportion_to_its_length(name: str) -> None:
    for unit in dict.fromkeys(UNITS):
        for before, after in (("", ""), ("", "!"), ('{"a": "', '"}'), ("start: ", "x")):

            def read(length: int, unit: str = unit, before: str = before, after: str = after) -> None:
                text = before + unit * (length // len(unit) + 1) + after
                try:
                    READERS[name](text)
                except (ApiError, ValueError):
                    return

            assert_linear(read, f"{name}: {before!r}, then {unit!r}, then {after!r}", 4 * LONG)
