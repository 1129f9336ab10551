"""Requests that are refused before they reach an engine: wrong fields, lengths, JSON, content types and paths."""

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
    ScriptedDispatcher,
    complete,
    refused,
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": [0, 620]}, "prompt", "invalid_value"),
        ({"best_of": 2}, "best_of", "unsupported_value"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"model": "gpt-5"}, "model", "model_not_found"),
    ],
)
def test_invalid_field_is_named(
    http: httpx.Client, engine: ScriptedDispatcher, stream: bool, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hi", "stream": stream, **fields})
    status = 404 if param == "model" else 400
    refused(answer, status, param=param, code=code, type="invalid_request_error")
    assert engine.submissions == []


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
