"""Bounds on what a request may have many of: a 400 that names the field and the bound, and repeats little."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from crossdock.cluster.api import bounds
from crossdock.cluster.api.body.bodies import Body, CompletionRequest, DetokenizeRequest
from crossdock.cluster.api.body.response_items import check_size, input_items
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request.submission import InvalidField
from tests.cluster.api.scripted_api import HI, ScriptedDispatcher, Serve, refused

TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"enum": ["a" * (bounds.GRAMMAR_CHARS - 100)]}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "Hi", "max_tokens": 1, **fields}


def chat(*messages: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": list(messages) or HI, "max_tokens": 1, **fields}


def conversation(*items: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": item} if isinstance(item, str) else item for item in items]
    return "/v1/responses", {"input": messages, "max_output_tokens": 1, **fields}


def call(call_id: str = "c", name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}", **fields}


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


BEYOND = [  # the field, the bound, and a request just beyond it
    ("stop", bounds.STOPS, completion(stop=["a"] * 65)),
    ("stop[0]", bounds.STOP_CHARS, completion(stop="a" * 4097)),
    ("stop", bounds.ALL_STOPS_CHARS, completion(stop=["a" * 4096] * 4 + ["b"])),
    ("logit_bias", bounds.BIASES, completion(logit_bias={str(i): 1 for i in range(1025)})),
    ("stop_token_ids", bounds.STOP_TOKENS, completion(stop_token_ids=[1] * 1025)),
    ("allowed_token_ids", bounds.ALLOWED_TOKENS, completion(allowed_token_ids=[1] * 16_385)),
    ("cache_salt", bounds.CACHE_SALT_CHARS, completion(cache_salt="a" * 1025)),
    ("guided_choice", bounds.GUIDED_CHOICES, completion(guided_choice=["a"] * 1025)),
    ("guided_choice", bounds.GRAMMAR_CHARS, completion(guided_choice=["a" * 65_536])),
    ("guided_regex", bounds.GRAMMAR_CHARS, completion(guided_regex="a" * 65_537)),
    ("guided_grammar", bounds.GRAMMAR_CHARS, completion(guided_grammar="a" * 65_537)),
    ("guided_json", bounds.GRAMMAR_CHARS, completion(guided_json={"enum": ["a" * 65_536]})),
    ("guided_json", bounds.GRAMMAR_CHARS, completion(guided_json=json.dumps({"enum": ["a" * 65_536]}))),
    (
        "response_format.json_schema.schema",
        bounds.GRAMMAR_CHARS,
        completion(response_format={"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 65_536]}}}),
    ),
    ("structured_outputs.regex", bounds.GRAMMAR_CHARS, completion(structured_outputs={"regex": "a" * 65_537})),
    ("structured_outputs.choice", bounds.GUIDED_CHOICES, completion(structured_outputs={"choice": ["a"] * 1025})),
    ("messages[0].role", bounds.ROLE_CHARS, chat({"role": "r" * 65, "content": "a"})),
    ("messages", bounds.MESSAGES, chat(*[{}] * 4097)),
    ("messages", bounds.MESSAGE_PARTS, chat({"role": "user", "content": ["a"] * 4097})),
    ("messages", bounds.MESSAGE_PARTS, chat({"role": "assistant", "tool_calls": [CALL] * 4097})),
    ("tools", bounds.TOOLS, chat(tools=[TOOL] * 129)),
    ("tools", bounds.TOOLS_CHARS, chat(tools=[{**TOOL, "x": "a" * bounds.TOOLS_CHARS}])),
    ("tools", bounds.TOOLS_CHARS, ("/tokenize", {"messages": HI, "tools": [{**TOOL, "x": "a" * bounds.TOOLS_CHARS}]})),
    ("bad_words", bounds.BAD_WORDS, completion(bad_words=["a"] * 129)),
    ("bad_words[0]", bounds.BAD_WORD_CHARS, completion(bad_words=["a" * 1025])),
    ("logprob_token_ids", bounds.LOGPROB_TOKENS, chat(logprobs=True, logprob_token_ids=[1] * 129)),
    ("documents", bounds.DOCUMENTS, chat(documents=[{}] * 1025)),
    ("chat_template", bounds.TEMPLATE_CHARS, chat(chat_template="a" * 131_073)),
    ("chat_template_kwargs", bounds.TEMPLATE_CHARS, chat(chat_template_kwargs={"a": "a" * 131_073})),
    ("tokens", bounds.DETOKENIZED, ("/detokenize", {"tokens": [5] * 131_073})),
    ("prompt", bounds.TRUNCATED_CHARS, ("/tokenize", {"prompt": "🙂" * 262_145})),
    ("prompt", bounds.TRUNCATED_CHARS, completion(prompt="a" * 262_145, truncate_prompt_tokens=5)),
    (
        "logprob_token_ids",
        bounds.MANY_LOGPROBS,
        completion(n=128, max_tokens=100, logprobs=0, logprob_token_ids=list(range(128))),
    ),
    ("input[0].call_id", bounds.ITEM_NAME_CHARS, conversation(call("c" * 1025))),
    ("input[0].name", bounds.ITEM_NAME_CHARS, conversation(call(name="f" * 1025))),
    ("input[0].namespace", bounds.ITEM_NAME_CHARS, conversation(call(namespace="f" * 1025))),
    ("input", bounds.CONVERSATION_CHARS, conversation(*[call("c" * 1024, "f" * 1024, namespace="n" * 1024)] * 1500)),
    ("input", bounds.CONVERSATION_CHARS, conversation("Hi" * (1 << 21) + "!")),
    ("instructions", bounds.CONVERSATION_CHARS, conversation("Hi", instructions="a" * ((1 << 22) + 1))),
    (f"metadata.{'k' * 65}.[key]", bounds.METADATA_KEY_CHARS, conversation("Hi", metadata={"k" * 65: "a"})),
    ("tools", bounds.TOOLS_CHARS, conversation("Hi", tools=[{"type": "function", "name": "f", "x": "a" * 131_073}])),
    ("tool_choice", bounds.TOOLS_CHARS, conversation("Hi", tool_choice={"type": "function", "x": "a" * 131_073})),
    ("text", bounds.TOOLS_CHARS, conversation("Hi", text={"format": {"type": "text", "x": "a" * 131_073}})),
    (None, bounds.BODY_FIELDS, completion(**{f"x{i}": 1 for i in range(1025)})),
    (None, bounds.BODY_PARTS, completion(prompt=[[]] * 65_537)),
    (None, bounds.BODY_VALUES, completion(prompt=[1] * (1 << 19) + [1, 1])),
]


@pytest.mark.parametrize(("param", "bound", "request_"), BEYOND)
def test_request_beyond_a_bound_is_refused_with_field_and_bound(
    wide: httpx.Client, engine: ScriptedDispatcher, param: str | None, bound: int, request_: Any
) -> None:
    path, body = request_
    error = refused(wide.post(path, json=body), 400, param=param)
    assert str(bound) in error["message"]
    assert len(error["message"]) <= 400
    assert engine.submissions == []


@pytest.mark.parametrize(
    "request_",
    [
        completion(stop=["a" * 4096] * 4),
        completion(stop=["a"] * 64),
        completion(logit_bias={str(i % 600): 1 for i in range(600)}),
        completion(stop_token_ids=[1] * 1024, allowed_token_ids=[1] * 16_384),
        completion(guided_choice=["a"] * 1024),
        completion(guided_json=SCHEMA),
        chat({"role": "r" * 64, "content": "a"}),
        chat(tools=[TOOL] * 128, tool_choice="none"),
        completion(**{f"x{i}": None for i in range(1022)}),
        ("/detokenize", {"tokens": [5] * 131_072}),
        ("/tokenize", {"prompt": "a" * 262_144}),
        ("/tokenize", {"messages": [{"role": "user", "content": ["a"] * 4096}]}),
    ],
)
def test_request_at_a_bound_is_served(wide: httpx.Client, engine: ScriptedDispatcher, request_: Any) -> None:
    path, body = request_
    answer = wide.post(path, json=body)
    assert answer.status_code == 200, answer.text


def test_pictures_of_a_conversation_have_a_bound_of_their_own() -> None:
    """One body has no more than that; a conversation over several responses may."""
    part = {"type": "input_image", "image_url": "data:image/png;base64," + "a" * 11_000_000}
    items = input_items([{"role": "user", "content": [part]}])
    check_size(items)
    with pytest.raises(ApiError, match=str(bounds.CONVERSATION_URLS_CHARS)):
        check_size(items * 2)


@pytest.mark.parametrize("key", ["0001", "01", "00", "1" * 5000, "\u0661", "+1", "1_0", " 1", ""])
def test_bias_key_that_is_no_plain_token_id_is_refused(http: httpx.Client, key: str) -> None:
    path, body = completion(logit_bias={"1": 1, key: 2})
    error = refused(http.post(path, json=body), 400, param="logit_bias")
    assert "is not a token id" in error["message"]


@pytest.mark.parametrize("depth", [500, 5000, 100_000])
@pytest.mark.parametrize(
    "make",
    [
        lambda text: ("guided_json", completion(guided_json=text)),
        lambda text: ("structured_outputs.json", completion(structured_outputs={"json": text})),
        lambda text: (  # longer ones have too many lists, which is seen before they are parsed
            "messages" if len(text) > bounds.BODY_PARTS else "messages[0].tool_calls[0].function.arguments",
            chat({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}),
        ),
    ],
)
def test_json_in_text_nested_too_deep_is_refused(wide: httpx.Client, make: Any, depth: int) -> None:
    for text in (nested(depth), "[" * depth):
        param, (path, body) = make(text)
        refused(wide.post(path, json=body), 400, param=param)


LONG = "long" * 25_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        completion(service_tier=LONG),
        completion(model=LONG),
        completion(logit_bias={LONG: 1}),
        completion(logit_bias={LONG: "a"}),
        completion(response_format={"type": LONG}),
        completion(stream_options={LONG: 1}, stream=False),
        chat({"role": LONG, "content": "a"}),
        chat({"role": "user", "content": [{"type": LONG}]}),
        chat({"role": "user", "content": [{LONG: 1}]}),
        chat(tool_choice=LONG),
        chat(chat_template="{{ raise_exception(messages[0].content) }}", messages=[{"role": "user", "content": LONG}]),
        chat(chat_template="{{ " + LONG + "( }}"),
        ("/" + LONG[:30_000], {}),
        ("/v1/completions", {}),
    ],
)
def test_error_repeats_little_of_the_input(wide: httpx.Client, path: str, body: Any) -> None:
    answer = wide.post(path, json=body)
    assert 400 <= answer.status_code < 500
    assert "long" * 60 not in answer.text
    assert len(answer.content) < 1500


def test_refusal_of_engine_repeats_little_of_the_input(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    engine.script = lambda submission: [InvalidField(f"grammar: {LONG}", "grammar")]
    path, body = completion(guided_regex="a")
    assert len(refused(http.post(path, json=body), 400, param="guided_regex")["message"]) <= 200


def test_wrong_header_and_class_are_repeated_in_part(http: httpx.Client) -> None:
    for headers in ({"x-slo-class": LONG[:5000]}, {"content-type": LONG[:5000]}):
        answer = http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
        assert 400 <= answer.status_code < 500
        assert len(answer.content) < 1500


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (CompletionRequest, "stop_token_ids", ["a"] * 100_000),
        (CompletionRequest, "allowed_token_ids", ["a"] * 100_000),
        (CompletionRequest, "logit_bias", {f"x{i}": "y" for i in range(50_000)}),
        (CompletionRequest, "guided_choice", [1] * 100_000),
        (CompletionRequest, "stop", [1] * 100_000),
        (DetokenizeRequest, "tokens", ["a"] * 100_000),
    ],
)
def test_many_wrong_values_cost_one_error(kind: type[Body], name: str, value: Any) -> None:
    """Every error costs about 2 µs and 400 bytes: one is enough to refuse the request."""
    with pytest.raises(ValidationError) as wrong:
        kind.model_validate({"prompt": "a", name: value})
    assert wrong.value.error_count() == 1


def test_text_whose_beginning_is_too_long_is_not_encoded_whole(
    serve: Serve, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = ModelTokenizer.encode

    def counted(self: ModelTokenizer, text: str, **ways: bool) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **ways)

    monkeypatch.setattr(ModelTokenizer, "encode", counted)
    monkeypatch.setattr(tokenizer, "longest_token", 1000)  # as some vocabularies have; the context then admits 200,000
    http = serve()
    answer = http.post("/v1/completions", json={"prompt": "dog " * 40_000})
    error = refused(answer, 400, param="prompt", code="context_length_exceeded")
    assert "more than" in error["message"]
    assert encoded == [1600]


def test_documented_bounds_are_those_of_the_code() -> None:
    text = (Path(__file__).parents[4] / "docs/api.md").read_text()
    section = text.partition("## Bounds of a request")[2]
    documented = {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d|\d", section)}
    numbers = {value for name, value in vars(bounds).items() if name.isupper() and name != "MESSAGE_CHARS"}
    assert numbers <= documented
