"""Bodies of requests: refusals that name the field, prompts and tools, sampling, constraints on the output."""

import json
from typing import Any

import pytest

from crossdock.cluster.api.body.bodies import ChatCompletionRequest, CompletionRequest
from crossdock.cluster.api.body.generation_body import GenerationBody
from crossdock.cluster.api.errors import ApiError
from crossdock.workers.schedule.request.submission import Grammar, SamplingParams

VOCAB = 1000


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.parse(json.dumps({"prompt": "Hi", **fields}).encode())


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.parse(json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields}).encode())


def sampling(asked: GenerationBody, max_tokens: int = 16, **defaults: Any) -> SamplingParams:
    return asked.sampling(max_tokens, defaults=defaults, vocab_size=VOCAB, max_logprobs=20)


# -- refusals ----------------------------------------------------------------------------------------------------------

WRONG: dict[str, list[Any]] = {  # out of range, or of another type
    "temperature": [-0.1, 2.1, "hot", True, "0.5"],
    "top_p": [0, 1.01, [1]],
    "top_k": [-2, 2**31],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0],
    "presence_penalty": [2.5],
    "frequency_penalty": [-2.5],
    "n": [0, 129, 1.5, "2", True],
    "max_tokens": [-1, "16"],
    "min_tokens": [-1],
    "seed": [2**63, 1.5],
    "prompt_logprobs": [-2],
    "logprob_token_ids": [[], [-1]],
    "bad_words": [[""], ["a" * 1025], ["a"] * 129],
    "priority": [2**63],
    "request_id": ["a b", "a" * 129],
    "truncation_side": ["middle"],
    "truncate_prompt_tokens": [-2],
    "stop": [[""], ["a"] * 65, 5, [5], {"a": 1}],
    "stop_token_ids": [[-1], 5, ["a"]],
    "allowed_token_ids": [[]],
    "logit_bias": [{"5": 101}, [1], {"5": "a"}],
    "stream": ["yes", 1],
    "model": [5],
    "stream_options": [1],
    "ignore_eos": ["no"],
    "response_format": ["json"],
    "guided_choice": ["a"],
    "structured_outputs": [[]],
    "cache_salt": [1],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]])
def test_invalid_field_is_named(field: str, value: Any) -> None:
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
        (completion, "logprobs", -2),
        (completion, "echo", "yes"),
        (completion, "best_of", 0),
        (chat, "logprobs", 5),
        (chat, "top_logprobs", -2),
        (chat, "max_tokens", 0),
        (chat, "max_completion_tokens", 0),
        (chat, "messages", []),
        (chat, "messages", "Hi"),
        (chat, "messages", ["Hi"]),
        (chat, "tools", {}),
        (chat, "tools", ["a"]),
        (chat, "chat_template_kwargs", "a"),
        (chat, "thinking_token_budget", -2),
    ],
)
def test_invalid_field_of_one_endpoint_is_named(parse: Any, field: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        parse(**{field: value})
    assert str(refused.value.param).startswith(field)


def test_missing_field_is_named() -> None:
    for kind, param in ((CompletionRequest, "prompt"), (ChatCompletionRequest, "messages")):
        with pytest.raises(ApiError) as refused:
            kind.parse(b"{}")
        assert (refused.value.param, refused.value.code) == (param, "missing_required_parameter")


def test_null_means_not_given() -> None:
    nulls = dict.fromkeys(CompletionRequest.model_fields.keys() - {"prompt"})
    assert completion(**nulls) == completion()
    assert completion(stream_options={"include_usage": None}, suffix=None, whatever=None) == completion(
        stream_options={}
    )


# -- prompts and tools -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt", [[], 5, {"a": 1}, [1, "a"], [True], [[]], [[1], []], [[1], "a"], [1.5], [["a"]], True]
)
def test_prompt_of_other_form_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as refused:
        completion(prompt=prompt).prompts()
    assert refused.value.param == "prompt"


def test_tools_reach_template_unless_choice_is_none() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert chat().template_tools() is None
    assert chat(tools=[]).template_tools() is None
    assert chat(tools=[tool]).template_tools() == [tool]
    assert chat(tools=[tool], tool_choice="auto").template_tools() == [tool]
    assert chat(tools=[tool], tool_choice="none").template_tools() is None
    assert chat(tools=[tool], tool_choice="required").template_tools() == [tool]
    for wrong in ({}, {"type": "function"}, {"type": "web", "function": {"name": "f"}}):
        with pytest.raises(ApiError) as refused:
            chat(tools=[tool, wrong]).template_tools()
        assert refused.value.param == "tools[1]"


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_sampling_without_fields_is_the_default() -> None:
    assert sampling(completion()) == SamplingParams()
    assert sampling(chat(), 50) == SamplingParams(max_tokens=50)


def test_every_sampling_field_reaches_engine() -> None:
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


def test_model_defaults_apply_unless_given() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert sampling(completion(), **defaults) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert sampling(completion(temperature=0, top_k=0), **defaults) == SamplingParams(temperature=0.0, top_p=0.95)


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
        ({"guided_grammar": 'start: "::="'}, Grammar("lark", 'start: "::="')),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"json_object": False, "regex": None}}, None),
    ],
)
def test_constraint_in_any_form_becomes_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert sampling(completion(**fields)).grammar == grammar
    assert sampling(chat(**fields)).grammar == grammar


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
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
        ({"structured_outputs": {"grammar": 'a: "a"\n  root ::= a'}}, "structured_outputs.grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_contradictory_field_or_constraint_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        sampling(completion(**fields))
    assert refused.value.param == param
    assert refused.value.code is not None


def test_refusal_of_two_constraints_names_the_field_of_each() -> None:
    with pytest.raises(ApiError, match=r"not 'guided_regex' and 'structured_outputs\.choice'"):
        sampling(completion(guided_regex="a", structured_outputs={"choice": ["a"]}))
