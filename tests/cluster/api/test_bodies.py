"""What requests may say and mean to the engine, and the shapes of answers, checked against OpenAI's own models."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.api import answers, bodies
from crossdock.cluster.api.answers import AnswerEvents
from crossdock.cluster.api.bodies import ChatCompletionRequest, CompletionRequest
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.messages import template_messages
from crossdock.cluster.api.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request import Grammar, SamplingParams, TokenLogprobs

VOCAB = 1000


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.parse(json.dumps({"prompt": "Hi", **fields}).encode())


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.parse(json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode())


def sampling(asked: bodies.GenerationBody, max_tokens: int = 16, **defaults: Any) -> SamplingParams:
    return asked.sampling(max_tokens, defaults=defaults, vocab_size=VOCAB, max_logprobs=20)


# -- refusals ----------------------------------------------------------------------------------------------------------

OUT_OF_RANGE = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("n", 0),
    ("n", 129),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("seed", 2**63),
    ("prompt_logprobs", -1),
    ("truncate_prompt_tokens", -2),
    ("stop", [""]),
    ("stop", ["a"] * 65),
    ("stop_token_ids", [-1]),
    ("allowed_token_ids", []),
    ("logit_bias", {"5": 101}),
]
WRONG_TYPE = [
    ("temperature", "hot"),
    ("temperature", True),
    ("temperature", "0.5"),
    ("top_p", [1]),
    ("n", 1.5),
    ("n", "2"),
    ("n", True),
    ("max_tokens", "16"),
    ("stream", "yes"),
    ("stream", 1),
    ("stop", 5),
    ("stop", [5]),
    ("stop", {"a": 1}),
    ("stop_token_ids", 5),
    ("stop_token_ids", ["a"]),
    ("logit_bias", [1]),
    ("logit_bias", {"5": "a"}),
    ("seed", 1.5),
    ("model", 5),
    ("stream_options", 1),
    ("ignore_eos", "no"),
    ("response_format", "json"),
    ("guided_choice", "a"),
    ("structured_outputs", []),
    ("cache_salt", 1),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE + WRONG_TYPE)
def test_the_field_at_fault_is_named(field: str, value: Any) -> None:
    for parse in (completion, chat):
        with pytest.raises(ApiError) as refused:
            parse(**{field: value})
        error = refused.value
        assert (error.status, error.kind, error.code) == (400, "invalid_request_error", "invalid_value")
        assert error.param is not None
        assert error.param.startswith(field)
        assert field in str(error)
        assert "pydantic" not in str(error)


@pytest.mark.parametrize(
    ("parse", "field", "value"),
    [
        (completion, "logprobs", True),
        (completion, "logprobs", -1),
        (completion, "echo", "yes"),
        (completion, "best_of", 0),
        (chat, "logprobs", 5),
        (chat, "top_logprobs", -1),
        (chat, "max_tokens", 0),
        (chat, "max_completion_tokens", 0),
        (chat, "messages", []),
        (chat, "messages", "Hi"),
        (chat, "messages", ["Hi"]),
        (chat, "tools", {}),
        (chat, "tools", ["a"]),
        (chat, "chat_template_kwargs", "a"),
    ],
)
def test_fields_of_one_endpoint(parse: Any, field: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        parse(**{field: value})
    assert str(refused.value.param).startswith(field)


def test_a_missing_field_is_named() -> None:
    for kind, param in ((CompletionRequest, "prompt"), (ChatCompletionRequest, "messages")):
        with pytest.raises(ApiError) as refused:
            kind.parse(b"{}")
        assert (refused.value.param, refused.value.code) == (param, "missing_required_parameter")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b"{'a': 1}",
        b'{"prompt": NaN}',
        b"\xff",
        b'{"prompt": "\\ud800"}',
        b"[" * 9999,
    ],
)
def test_a_body_that_is_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        CompletionRequest.parse(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_null_means_not_given_and_unknown_fields_are_ignored() -> None:
    nulls = dict.fromkeys(CompletionRequest.model_fields.keys() - {"prompt"})
    assert completion(**nulls) == completion()
    assert completion(user="me", priority=3, metadata={"a": 1}, store=False, whatever=[]) == completion()


# -- prompts and messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]), ("", [""])],
)
def test_four_ways_to_say_a_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize(
    "prompt", [[], 5, {"a": 1}, [1, "a"], [True], [[]], [[1], []], [[1], "a"], [1.5], [["a"]], True]
)
def test_no_prompt(prompt: Any) -> None:
    with pytest.raises(ApiError) as refused:
        completion(prompt=prompt).prompts()
    assert refused.value.param == "prompt"


def test_messages_reach_the_template_as_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "system", "content": "S", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    seen = template_messages(messages)
    assert seen[0] == messages[0]
    assert seen[1]["content"] == "a\nb"
    assert seen[2]["content"] == ""
    assert seen[2]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert seen[3]["tool_call_id"] == "1"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "a"}, "messages[0].role"),
        ({"role": 5, "content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "assistant", "tool_calls": 5}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_messages_that_are_none(message: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        template_messages([message])
    assert refused.value.param == param


def test_tools_and_tool_choice() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert chat().template_tools() is None
    assert chat(tools=[]).template_tools() is None
    assert chat(tools=[tool]).template_tools() == [tool]
    assert chat(tools=[tool], tool_choice="auto").template_tools() == [tool]
    assert chat(tools=[tool], tool_choice="none").template_tools() is None
    for choice in ("required", {"type": "function", "function": {"name": "f"}}, 5, "sometimes"):
        with pytest.raises(ApiError) as refused:
            chat(tools=[tool], tool_choice=choice).template_tools()
        assert refused.value.param == "tool_choice"
    for wrong in ({}, {"type": "function"}, {"type": "web", "function": {"name": "f"}}):
        with pytest.raises(ApiError) as refused:
            chat(tools=[tool, wrong]).template_tools()
        assert refused.value.param == "tools[1]"


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_sampling_without_a_word() -> None:
    assert sampling(completion()) == SamplingParams()
    assert sampling(chat(), 50) == SamplingParams(max_tokens=50)


def test_every_sampling_field_arrives() -> None:
    fields = {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {"7": -100, "8": 5},
        "allowed_token_ids": [1, 2],
        "prompt_logprobs": 2,
        "stop_token_ids": [3],
        "min_tokens": 4,
        "ignore_eos": True,
        "guided_regex": "a+",
    }
    expected = SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias=((7, -100.0), (8, 5.0)),
        allowed_token_ids=(1, 2),
        logprobs=3,
        prompt_logprobs=2,
        stop_token_ids=(3,),
        min_tokens=4,
        ignore_eos=True,
        grammar=Grammar("regex", "a+"),
    )
    assert sampling(completion(**fields, logprobs=3), 9) == expected
    assert sampling(chat(**fields, logprobs=True, top_logprobs=3), 9) == expected
    assert sampling(completion(top_k=-1)).top_k == 0
    assert sampling(completion(logprobs=0)).logprobs == 0
    assert sampling(chat(logprobs=True)).logprobs == 0


def test_a_models_defaults_fill_in_for_what_is_not_given() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert sampling(completion(), **defaults) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert sampling(completion(temperature=0, top_k=0), **defaults) == SamplingParams(temperature=0.0, top_p=0.95)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
    ],
)
def test_fields_that_contradict_each_other_or_the_model(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        sampling(completion(**fields))
    assert refused.value.param == param


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
                }
            },
            Grammar("json_schema", json.dumps(SCHEMA)),
        ),
        ({"guided_json": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"guided_regex": "a|b"}, Grammar("regex", "a|b")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a", "b"]')),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"json_object": False, "regex": None}}, None),
    ],
)
def test_every_way_to_constrain_the_output(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert sampling(completion(**fields)).grammar == grammar
    assert sampling(chat(**fields)).grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "5"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_constraints_that_are_none(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        sampling(completion(**fields))
    assert refused.value.param == param


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tokenizers: dict[str, PreTrainedTokenizerFast]) -> ModelTokenizer:
    return ModelTokenizer(tokenizers["byte_level"])


def half_a_smile(text: ModelTokenizer) -> int:
    return next(token for token in range(600) if text.token_bytes(token) == b"\xf0")


def test_usage_is_openais() -> None:
    numbers = CompletionUsage.model_validate(answers.usage(10, 5, 8))
    assert numbers.total_tokens == 15
    assert numbers.prompt_tokens_details is not None
    assert numbers.prompt_tokens_details.cached_tokens == 8


def test_completion_logprobs(text: ModelTokenizer) -> None:
    the, dog = text.encode(" the")[0], text.encode(" dog")[0]
    half = half_a_smile(text)
    positions = [
        (the, None),
        (dog, TokenLogprobs(dog, -0.5, 1, ((dog, -0.5), (the, -1.5)))),
        (half, TokenLogprobs(half, float("-inf"), 9, ((the, -0.1),))),
    ]
    shape = answers.completion_logprobs(text, positions, [0, 4, 8])
    # The client's model does not know that the first prompt token has none, though OpenAI sends it so.
    parsed = Logprobs.model_validate({name: values[1:] for name, values in shape.items()})
    assert parsed.text_offset == [4, 8]
    assert shape["token_logprobs"] == [None, -0.5, -9999.0]
    names = text.token_bytes(the).decode(), text.token_bytes(dog).decode()
    assert shape["tokens"] == [*names, "bytes:\\xf0"]
    # The token itself is always among the likeliest, so that a reader can compare them.
    assert shape["top_logprobs"] == [None, {names[1]: -0.5, names[0]: -1.5}, {names[0]: -0.1, "bytes:\\xf0": -9999.0}]
    json.dumps(shape, allow_nan=False)


def test_chat_logprobs(text: ModelTokenizer) -> None:
    the = text.encode(" the")[0]
    half = half_a_smile(text)
    positions = [TokenLogprobs(half, -3.0, 3, ((the, -0.1), (5, -2.0))), TokenLogprobs(the, -0.1, 1, ((the, -0.1),))]
    shape = answers.chat_logprobs(text, positions, 2)
    parsed = ChoiceLogprobs.model_validate(shape)
    assert parsed.content is not None
    first, second = parsed.content
    assert (first.token, first.bytes, first.logprob) == ("\ufffd", [0xF0], -3.0)
    assert [top.logprob for top in first.top_logprobs] == [-0.1, -2.0]  # the two likeliest, which it is not among
    assert bytes(second.bytes or []).decode() == second.token
    assert [top.token for top in second.top_logprobs] == [second.token]
    assert answers.chat_logprobs(text, positions, 0)["content"][0]["top_logprobs"] == []


def test_prompt_logprobs_are_vllms(text: ModelTokenizer) -> None:
    the, dog = text.encode(" the")[0], text.encode(" dog")[0]
    shape = answers.prompt_logprobs(text, [None, TokenLogprobs(dog, -2.0, 7, ((the, -0.1),))])
    assert shape == [
        None,
        {
            str(the): {"logprob": -0.1, "rank": 1, "decoded_token": text.token_bytes(the).decode()},
            str(dog): {"logprob": -2.0, "rank": 7, "decoded_token": text.token_bytes(dog).decode()},
        },
    ]


def parsed_event(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    return json.loads(event[6:])


@given(st.text(st.characters(codec="utf-8")), st.integers(0, 3))
def test_a_chunk_is_what_json_would_have_written(piece: str, index: int) -> None:
    head = {"id": "x-1", "created": 1, "model": 'a"b'}
    for is_chat, kind in ((True, "chat.completion.chunk"), (False, "text_completion")):
        chunks = AnswerEvents({**head, "object": kind}, is_chat=is_chat, include_usage=False)
        body = {"delta": {"content": piece}} if is_chat else {"text": piece}
        choice = {"index": index, **body, "logprobs": None, "finish_reason": None}
        for event in (chunks.text(index, piece), chunks.choice(choice)):
            assert parsed_event(event) == {**head, "object": kind, "choices": [choice]}


def test_chunks_are_openais() -> None:
    head = {"id": "x-1", "created": 1, "model": "m"}
    chunks = AnswerEvents({**head, "object": "chat.completion.chunk"}, is_chat=True, include_usage=True)
    one = ChatCompletionChunk.model_validate(parsed_event(chunks.text(1, "a\nb")))
    assert (one.choices[0].index, one.choices[0].delta.content, one.usage) == (1, "a\nb", None)
    assert parsed_event(chunks.text(0, "a"))["usage"] is None
    last = ChatCompletionChunk.model_validate(parsed_event(chunks.usage(answers.usage(1, 2, 0))))
    assert last.choices == []
    assert last.usage is not None
    older = AnswerEvents({**head, "object": "text_completion"}, is_chat=False, include_usage=False)
    event = parsed_event(older.choice({"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}))
    assert Completion.model_validate(event).choices[0].finish_reason == "stop"
    assert "usage" not in event


def test_an_error_has_openais_shape() -> None:
    error = ApiError("No.", param="prompt", code="c")
    expected = {"error": {"message": "No.", "type": "invalid_request_error", "param": "prompt", "code": "c"}}
    assert json.loads(error.body()) == expected
    assert parsed_event(answers.error_event(error)) == expected
    assert ChatCompletion.model_fields  # the shapes above are the client's own
