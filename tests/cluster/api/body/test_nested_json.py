"""JSON in strings of a body counts before it is parsed, all such strings of a request together."""

import json
from typing import Any

import httpx
import pytest

from crossdock.cluster.api.body import response_items
from crossdock.cluster.api.bounds import ARGUMENTS_CHARS, BODY_PARTS
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.scripted_api import HI, ScriptedDispatcher, refused, serving


def chat(*arguments: str) -> dict[str, Any]:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": text}} for text in arguments]
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": calls}, *HI]}


def response(*arguments: str) -> dict[str, Any]:
    calls = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": text} for text in arguments]
    return {"input": [*calls, {"role": "user", "content": "Hi"}]}


BODIES = [
    ("/v1/chat/completions", chat, "messages"),
    ("/tokenize", chat, "messages"),
    ("/v1/responses", response, "input"),
]
HALF = '{"a": [' + "[]," * (BODY_PARTS // 2) + "0]}"


@pytest.mark.parametrize(("path", "body", "param"), BODIES)
def test_json_in_strings_is_refused_by_its_parts_and_characters_together(
    path: str, body: Any, param: str, tokenizer: ModelTokenizer
) -> None:
    engine = ScriptedDispatcher(tokenizer)
    with serving(engine, tokenizer, HttpConfig()) as http:

        def post(*arguments: str) -> httpx.Response:
            content = json.dumps(body(*arguments))
            return http.post(path, content=content, headers={"content-type": "application/json"})

        error = refused(post(HALF, HALF), 400, param=param, code="invalid_json")
        assert f"more than {BODY_PARTS} strings, lists and objects" in error["message"]
        error = refused(post('{"a": "' + "x" * ARGUMENTS_CHARS + '"}'), 400, param=param, code="invalid_value")
        assert str(ARGUMENTS_CHARS) in error["message"]
        assert post('{"a": [[], 1, "[[["]}').status_code == 200
        # Not JSON: the parser refuses the first such text, whatever it hides in the next one from the count.
        assert post('{"a": "', HALF, HALF).status_code == 400
        assert post("[" * 1000).status_code == 400


def test_arguments_of_a_response_count_before_any_is_parsed(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def read(text: str, **options: Any) -> Any:
        parsed.append(text)
        return json.loads(text)

    monkeypatch.setattr(response_items, "from_json", read)
    with serving(ScriptedDispatcher(tokenizer), tokenizer, HttpConfig()) as http:
        refused(http.post("/v1/responses", json=response(HALF, HALF)), 400, param="input", code="invalid_json")
        assert parsed == []
        assert http.post("/v1/responses", json=response("[]")).status_code == 200
        assert parsed == ["[]"]


def test_responses_of_a_conversation_count_together(tokenizer: ModelTokenizer) -> None:
    engine = ScriptedDispatcher(tokenizer)
    engine.max_model_len = 1 << 20
    with serving(engine, tokenizer, HttpConfig()) as http:
        first = http.post("/v1/responses", json=response(HALF))
        assert first.status_code == 200, first.text
        again = {**response(HALF), "previous_response_id": first.json()["id"]}
        refused(http.post("/v1/responses", json=again), 400, param="input", code="invalid_json")
