"""Every field that OpenAI's client or vLLM defines is honoured, without effect, or refused by name."""

import json
import typing
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import chat_completion_stream_options_param
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from crossdock.cluster.api.body.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from crossdock.cluster.api.body.embedding_body import EmbeddingRequest
from crossdock.cluster.api.body.generation_body import GenerationBody
from crossdock.cluster.api.body.json_body import Body
from crossdock.cluster.api.body.messages_body import CountTokensRequest, MessagesRequest
from crossdock.cluster.api.body.other_fields import NO_EFFECT, REFUSED
from crossdock.cluster.api.body.responses_body import ResponsesRequest
from crossdock.cluster.api.errors import ApiError
from crossdock.workers.schedule.request.submission import Grammar, SamplingParams
from tests.cluster.api.body.field_table import KNOWN, PAGE, honoured, known, written_page
from tests.cluster.api.scripted_api import HI

ENDPOINTS: dict[str, tuple[type[GenerationBody], dict[str, Any]]] = {
    "completions": (CompletionRequest, {"prompt": "Hi"}),
    "chats": (ChatCompletionRequest, {"messages": HI}),
}


def parse(endpoint: str, **fields: Any) -> GenerationBody:
    kind, required = ENDPOINTS[endpoint]
    return kind.parse(json.dumps({**required, **fields}).encode())


def with_field(path: str, value: Any) -> dict[str, Any]:
    """Return the fields of a body in which the field at `path` has `value`."""
    parent, _, name = path.rpartition(".")
    rest = {"regex": "a"} if parent == "structured_outputs" else {}
    return {parent: {**rest, name: value}} if parent else {name: value}


def check(endpoint: str, path: str, value: Any) -> None:
    body = parse(endpoint, **with_field(path, value), **({"stream": True} if path.startswith("stream_options") else {}))
    body.sampling(16, defaults={}, vocab_size=100, max_logprobs=20)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_of_openai_and_vllm_has_one_state(endpoint: str) -> None:
    ours = honoured()[endpoint]
    for name in known(endpoint):
        assert (name in ours) + (name in NO_EFFECT) + (name in REFUSED and name not in ours) == 1, name
    assert not ours & NO_EFFECT.keys()


def test_no_field_is_listed_that_nobody_sends() -> None:
    all_known = known("completions") | known("chats")
    assert (NO_EFFECT.keys() | REFUSED.keys()) <= all_known
    assert honoured()["completions"] | honoured()["chats"] <= all_known


def test_list_has_every_field_of_the_installed_openai_client() -> None:
    """A newer client may bring new fields: then `known_fields.yaml` and the states have to follow."""
    for name, kind in (
        ("chats", chat_create_params.CompletionCreateParamsStreaming),
        ("completions", completion_create_params.CompletionCreateParamsStreaming),
        ("stream_options", chat_completion_stream_options_param.ChatCompletionStreamOptionsParam),
    ):
        assert set(typing.get_type_hints(kind)) <= set(KNOWN["openai"][name])


@pytest.mark.parametrize(
    ("kind", "known_fields"),
    [
        (ResponsesRequest, response_create_params.ResponseCreateParamsStreaming),
        (MessagesRequest, message_create_params.MessageCreateParamsStreaming),
        (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
        (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
    ],
)
def test_every_field_of_the_other_apis_has_one_state(kind: type[Body], known_fields: Any) -> None:
    for name in typing.get_type_hints(known_fields):
        assert (name in kind.model_fields) + (name in kind.no_effect) + (name in kind.refused_fields) == 1, name
    assert not kind.model_fields.keys() & (kind.no_effect.keys() | kind.refused_fields.keys())


def test_page_has_the_fields_of_the_code() -> None:
    assert PAGE.read_text() == written_page(), "run python -m tests.cluster.api.body.field_table"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("path", NO_EFFECT)
def test_field_without_effect_is_accepted_with_any_value(endpoint: str, path: str) -> None:
    for value in ("a", 5, True, {"a": 1}, ["a"], None):
        fields = with_field(path, value)
        rest = {parent: {} for parent in fields if "." in path}
        assert parse(endpoint, **fields) == parse(endpoint, **rest)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("path", REFUSED)
def test_refused_field_is_named_unless_its_value_asks_for_nothing(endpoint: str, path: str) -> None:
    if path in honoured()[endpoint]:
        return
    for neutral in (None, *REFUSED[path].neutral):
        check(endpoint, path, neutral)
    for value in ({"a": 1}, ["a"], "a", 7):
        with pytest.raises(ApiError) as refused:
            check(endpoint, path, value)
        error = refused.value
        assert (error.status, error.param, error.code) == (400, path, "unsupported_parameter")
        assert f"'{path}'" in str(error)
        assert REFUSED[path].reason in str(error)


def test_neutral_number_may_be_written_as_float_but_not_as_boolean() -> None:
    parse("chats", length_penalty=1.0, stream_interval=1)
    with pytest.raises(ApiError):
        parse("chats", length_penalty=True)
    with pytest.raises(ApiError):
        parse("chats", use_beam_search=0)


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"max_token": 5}, "max_token", " Did you mean 'max_tokens'?"),
        ({"temprature": 5}, "temprature", " Did you mean 'temperature'?"),
        ({"qqq": {}}, "qqq", ""),
        ({"": 1}, "", ""),
        ({"stream_options": {"include_usages": 1}, "stream": True}, "stream_options.include_usages", "include_usage'?"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "'structured_outputs.regex'?"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "_schema'?"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}},
            "response_format.json_schema.shema",
            "schema'?",
        ),
    ],
)
def test_unknown_field_is_refused_and_the_nearest_named(fields: dict[str, Any], param: str, hint: str) -> None:
    for endpoint in ENDPOINTS:
        with pytest.raises(ApiError) as refused:
            parse(endpoint, **fields).sampling(16, defaults={}, vocab_size=100, max_logprobs=20)
        assert (refused.value.param, refused.value.code) == (param, "unknown_parameter")
        assert str(refused.value).endswith(hint or ".")


def test_unknown_field_with_a_long_name_is_cut() -> None:
    with pytest.raises(ApiError) as refused:
        parse("chats", **{"max_tokens" * 1000: 1})
    assert len(str(refused.value)) < 300
    assert "Did you mean" not in str(refused.value)


@pytest.mark.parametrize(("kind", "name"), [(TokenizeRequest, "tokenize"), (DetokenizeRequest, "detokenize")])
def test_every_field_of_vllms_tokenize_has_one_state(kind: type[Any], name: str) -> None:
    ours = kind.model_fields.keys()
    for field in KNOWN["vllm"][name]:
        assert (field in ours) + (field in NO_EFFECT) + (field in REFUSED and field not in ours) == 1, field


# Bodies as these clients send them (LangChain 1.x, LiteLLM 1.x, vllm bench serve 0.33.0, lm-eval 0.4), and what of
# them the engine gets, beside its defaults.
SCHEMA = {"type": "object"}
CLIENTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "langchain": (
        "chats",
        {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.7},
        {"temperature": 0.7},
    ),
    "langchain json_schema": (
        "chats",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
            },
            "parallel_tool_calls": False,
            "max_completion_tokens": 5,
        },
        {"grammar": Grammar("json_schema", json.dumps(SCHEMA))},
    ),
    "litellm": ("chats", {"model": "m", "user": "u", "metadata": {"a": "b"}, "store": False, "max_tokens": 5}, {}),
    "vllm bench serve": (
        "completions",
        {
            "model": "m",
            "repetition_penalty": 1.0,
            "max_tokens": 5,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "min_p": 0.0,
            "temperature": 0.0,
        },
        {"temperature": 0.0, "ignore_eos": True},
    ),
    "lm-eval": (
        "completions",
        {"model": "m", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True},
        {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 1},
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_bodies_of_usual_clients_reach_the_engine(client: str) -> None:
    endpoint, fields, wanted = CLIENTS[client]
    sampling = parse(endpoint, **fields).sampling(16, defaults={}, vocab_size=100, max_logprobs=20)
    assert sampling == SamplingParams(max_tokens=16, **{"temperature": 1.0, **wanted})
