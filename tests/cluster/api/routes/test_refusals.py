"""Requests that are refused before they reach an engine: wrong fields, lengths, JSON, types, paths; and no others."""

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from crossdock.cluster.api.routes.absent_paths import ABSENT
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.scripted_api import (
    HI,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    ScriptedDispatcher,
    complete,
    refused,
)

LEGS = {"type": "namespace", "name": "legs", "tools": [{"type": "function", "name": "move"}]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORBIDDEN = [{"role": "forbidden", "content": ""}]  # by the template
WRONG_ITEMS: list[tuple[Any, str]] = [
    (5, ""),
    ({"role": "robot", "content": "Hi"}, ".role"),
    ({"role": {}, "content": "Hi"}, ".role"),
    ({"role": "user"}, ".content"),
    ({"role": "user", "content": [{"type": "input_image"}]}, ".content[0].image_url"),
    ({"role": "user", "content": [{"type": "input_text"}]}, ".content[0].text"),
    ({"type": "web_search_call", "id": "w"}, ".type"),
    ({"type": ["message"]}, ".type"),
    ({"type": "computer_call", "id": "a"}, ".type"),
    ({"type": "function_call", "name": "f", "arguments": "{}"}, ".call_id"),
    ({"type": "function_call_output", "call_id": "c"}, ".output"),
    ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}, ".arguments"),
    ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "[" * 5000 + "]" * 5000}, ".arguments"),
    ({"type": "function_call_output", "call_id": "c", "output": [{"type": "text"}]}, ".output[0].text"),
]
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "Hi"}),
    "chats": ("/v1/chat/completions", {"messages": HI}),
    "responses": ("/v1/responses", {"input": "Hi"}),
    "embeddings": ("/v1/embeddings", {"input": "Hi"}),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 9}),
}
WRONG: dict[str, list[Any]] = {  # fields beside those of `APIS`, the field that is named, and perhaps the code
    "completions": [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": [0, 620]}, "prompt", "invalid_value"),
        ({"best_of": 2}, "best_of", "unsupported_value"),
        ({"prompt_cache_retention": "7d"}, "prompt_cache_retention"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"model": "gpt-5"}, "model", "model_not_found"),
    ],
    "chats": [
        ({"messages": FORBIDDEN}, "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"documents": [1]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template": "{% if"}, "messages"),
        ({"chat_template": "{{ 1 / 0 }}"}, "messages"),
        ({"chat_template": "{{ '' }}"}, "messages[0].content"),
        ({"chat_template": "{{ '' }}", "messages": [{"role": "user", "content": " "}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [VOCAB_SIZE], "logprobs": True}, "logprob_token_ids"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"documents": [{"text": 5}]}, "documents[0].text"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": "required", "guided_json": {}}, "tools"),
    ],
    "responses": [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": {"role": "user"}}, "input"),
        *(({"input": [item]}, f"input[0]{place}") for item, place in WRONG_ITEMS),
        ({"input": [{"role": "user"}] * 4097}, "input"),
        ({"input": "dog " * 300}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": "much"}, "top_p"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"include": ["everything"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "loud"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"depth": 3}}, "reasoning.depth"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"a": "b" * 99_000}}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": 5}], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": ["f"]}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.mode"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
            "tool_choice.tools[0]",
        ),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"moderation": {}}, "moderation"),
        ({"messages": []}, "messages"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"n": 2}, "n"),
        ({"tools": [LEGS, *LEGS["tools"]]}, "tools"),
        ({"tools": [{**LEGS, "name": 5}]}, "tools[0].name"),
        ({"tools": [{**LEGS, "tools": {}}]}, "tools[0].tools"),
        ({"tools": [{**LEGS, "tools": [{"type": "custom", "name": "say"}]}]}, "tools[0].tools[0].type"),
    ],
    "embeddings": [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [[5], []]}, "input"),
        ({"input": [VOCAB_SIZE]}, "input"),
        ({"input": [[5]] * 2049}, "input"),
        ({"input": [5] * 300}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 16}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"pooling": "cls"}, "pooling"),
        ({"normalize": True, "use_activation": False}, "normalize"),
        ({"messages": HI}, "messages"),
        ({"endianness": "big"}, "endianness"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"service_tier": "none such"}, "service_tier"),
    ],
}


@pytest.mark.parametrize(("api", "row"), [(api, row) for api, rows in WRONG.items() for row in rows])
def test_wrong_field_is_named(http: httpx.Client, engine: ScriptedDispatcher, api: str, row: Any) -> None:
    (path, body), (fields, param, *code) = APIS[api], row
    for stream in ({}, {"stream": True})[: 1 + (api != "embeddings")]:
        answer = http.post(path, json={**body, **stream, **fields})
        error = refused(answer, 404 if param == "model" else 400, param=param, type="invalid_request_error")
        assert [error["code"]] == (code or [error["code"]])
        assert "'messages'" not in error["message"] or "messages" in body or param == "messages"
    assert not engine.submissions


SHORT = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}
TALK = [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": SHORT}]}]
WITHOUT_EFFECT: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt_cache_key": "k", "prompt_cache_retention": "in_memory"}),
    ("chats", {"prompt_cache_key": "k", "prompt_cache_retention": "24h"}),
    ("responses", {"user": "u", "safety_identifier": "s", "prompt_cache_options": {}, "prompt_cache_key": "k"}),
    ("responses", {"max_tool_calls": 3, "stream_options": {"include_obfuscation": False}}),
    ("responses", {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": None, "summary": "auto"}}),
    ("responses", {"text": {"verbosity": "medium", "format": {"type": "text"}}, "truncation": "disabled"}),
    ("responses", {"context_management": [], "store": False}),
    ("messages", {"metadata": {"user_id": "u"}, "context_management": {"edits": []}, "speed": "standard"}),
    ("messages", {"service_tier": "standard_only", "mcp_servers": [], "output_config": {"effort": "low"}}),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    ("messages", {"cache_control": SHORT}),
    ("messages", {"messages": TALK, "system": [{"type": "text", "text": "Be brief", "cache_control": LONG}]}),
]


@pytest.mark.parametrize(("api", "fields"), WITHOUT_EFFECT)
def test_field_without_effect_is_accepted(http: httpx.Client, api: str, fields: dict[str, Any]) -> None:
    path, body = APIS[api]
    answer = http.post(path, json={**body, **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "hint"),
    [
        ("/v1/completions", {"messages": HI}, "Chats have it: /v1/chat/completions."),
        ("/v1/chat/completions", {"prompt": "Hi"}, "Completions have it: /v1/completions."),
        ("/v1/chat/completions", {"messages": HI, "extra_body": {"top_k": 1}}, "Write its fields into the body itself"),
        ("/v1/embeddings", {"prompt": "Hi"}, "'prompt'."),
    ],
)
def test_field_of_another_place_is_refused_with_that_place(
    http: httpx.Client, path: str, body: dict[str, Any], hint: str
) -> None:
    error = refused(http.post(path, json=body), 400, code="unknown_parameter")
    assert hint in error["message"]


def test_stream_options_without_stream_are_refused(http: httpx.Client) -> None:
    body = {"prompt": "Hi", "stream_options": {"include_usage": True}}
    refused(http.post("/v1/completions", json=body), 400, param="stream_options")


@pytest.mark.parametrize("prompt", ["dog " * 250, [5] * 300, "d" * 50_000])
def test_prompt_beyond_context_is_refused(
    http: httpx.Client, engine: ScriptedDispatcher, tokenizer: ModelTokenizer, prompt: Any
) -> None:
    answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 10})
    message = refused(answer, 400, param="prompt", code="context_length_exceeded")["message"]
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in message
    if len(prompt) < 10_000:
        count = len(prompt) if isinstance(prompt, list) else len(tokenizer.encode(prompt))
        assert f"{count + 10} tokens ({count} in the prompt, 10 in the completion)" in message
    else:
        assert "at least" in message  # refused before it is encoded
    assert engine.submissions == []


def test_prompt_and_output_may_fill_context(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    complete(http, [5] * 190, max_tokens=10)
    refused(http.post("/v1/completions", json={"prompt": [5] * 191, "max_tokens": 10}), 400, param="prompt")
    complete(http, [5] * 191)  # the default of 16 gives way
    assert engine.submissions[-1].sampling.max_tokens == 9
    refused(http.post("/v1/completions", json={"prompt": [5] * 200}), 400, code="context_length_exceeded")
    many = [{"role": "user", "content": "dog " * 250}]
    answer = http.post("/v1/chat/completions", json={"messages": many})
    assert "messages" in refused(answer, 400, param="messages", code="context_length_exceeded")["message"]
    answer = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 500})
    refused(answer, 400, param="messages", code="context_length_exceeded")


def test_truncated_prompt_keeps_its_end(
    http: httpx.Client, engine: ScriptedDispatcher, tokenizer: ModelTokenizer
) -> None:
    complete(http, "dog " * 5000, truncate_prompt_tokens=4)
    assert len(engine.submissions[-1].prompt_token_ids) == 4
    answer = complete(http, "The dog", truncate_prompt_tokens=1, echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == tokenizer.decode(tokenizer.encode("The dog")[-1:])
    refused(http.post("/v1/completions", json={"prompt": [5], "truncate_prompt_tokens": 0}), 400, param="prompt")


def test_request_with_1024_outputs_is_served_and_one_more_is_refused(
    http: httpx.Client, engine: ScriptedDispatcher
) -> None:
    """However prompts and `n` share them, before a replica hears of any."""
    choices = complete(http, ["Hi"] * 512, n=2, max_tokens=1)["choices"]
    assert [choice["index"] for choice in choices] == list(range(1024))
    engine.submissions.clear()
    for num_prompts, n in ((205, 5), (1025, 1), (9, 128)):
        answer = http.post("/v1/completions", json={"prompt": ["Hi"] * num_prompts, "n": n})
        assert "1024" in refused(answer, 400)["message"]
    assert not engine.submissions


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_invalid_json_is_refused(http: httpx.Client, path: str) -> None:
    wrong = [b"", b"{", b"[]", b"5", b"null", b'"a"', b"{'a': 1}", b"\xff\xfe", b"[" * 9999]
    for body in (*wrong, b'{"prompt": "\\ud800"}', b'{"prompt": NaN}'):
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        refused(answer, 400, code="invalid_json", type="invalid_request_error")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_other_content_type_is_refused(http: httpx.Client, content_type: str) -> None:
    body = json.dumps({"prompt": "Hi"})
    answer = http.post("/v1/completions", content=body, headers={"content-type": content_type})
    refused(answer, 415, code="unsupported_media_type")
    accepted = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post("/v1/completions", content=body, headers=accepted).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", "/v1/files"])
def test_compressed_body_is_refused_with_the_name_of_its_coding(http: httpx.Client, path: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = http.post(path, content=gzip.compress(b'{"prompt": "Hi"}'), headers=headers)
    assert answer.status_code == 415
    assert "'gzip'" in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "identity"
    plain = {"content-type": "application/json", "content-encoding": "identity"}
    assert http.post("/v1/completions", content=b'{"prompt": "Hi"}', headers=plain).status_code == 200


def test_prompt_that_fills_the_context_is_refused_without_a_contradiction(http: httpx.Client) -> None:
    body = {"prompt": [5] * 200, "max_tokens": 0, "echo": True, "logprobs": 1}
    message = refused(http.post("/v1/completions", json=body), 400, code="context_length_exceeded")["message"]
    assert "requested 200" not in message
    assert "where 'max_tokens' is 0" in message


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/v1/responses/resp_1/steer", "Responses are created, fetched, continued, cancelled and deleted here"),
        ("/v1/images/generations", "not pictures."),
        ("/v1/filesystem", "POST /v1/filesystem"),
    ],
)
def test_path_of_other_servers_is_refused_with_what_to_use_instead(http: httpx.Client, path: str, reason: str) -> None:
    answer = http.post(path, json={})
    refused(answer, 404)
    message = answer.json()["error"]["message"]
    assert reason in message
    assert "stored" not in message


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/openai/v1/embeddings/", "/v1/embeddings"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/healthz", "/health"),
    ],
)
def test_path_that_resembles_a_served_one_is_refused_with_it(http: httpx.Client, path: str, meant: str) -> None:
    answer = http.post(path, json={})
    refused(answer, 404)
    assert answer.json()["error"]["message"] == f"Not Found: POST {path}. Did you mean {meant}?"


def test_no_absent_path_is_served(http: httpx.Client) -> None:
    served = {path for path in http.get("/openapi.json").json()["paths"] if "{" not in path}
    assert not served & (ABSENT.keys() - {"/v1/responses", "/v1/messages"})


def test_documentation_lists_every_absent_path_with_its_reason() -> None:
    text = (Path(__file__).parents[4] / "docs/migrating.md").read_text()
    assert [row for row in rows_of_absent_paths() if row not in text] == []


def rows_of_absent_paths() -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for path, reason in ABSENT.items():
        by_reason.setdefault(reason, []).append(f"`{path}`")
    return [f"| {', '.join(paths)} | {reason} |" for reason, paths in by_reason.items()]


def test_unknown_path_and_wrong_method_are_refused(http: httpx.Client) -> None:
    for path in ("/", "/v1", "/v1/", "/v1/embedding", "/docs", "/v1/completions/"):
        refused(http.post(path, json={}), 404, type="invalid_request_error")
        refused(http.get(path), 404)
    answer = http.get("/v1/completions")
    refused(answer, 405, type="invalid_request_error")
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["message"] == "Method Not Allowed: GET /v1/completions. Use POST."
    refused(http.delete("/v1/models"), 405)
    refused(http.post("/health"), 405)
