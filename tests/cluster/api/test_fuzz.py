"""Fuzzing every endpoint in front of a real engine: no 5xx, OpenAI's error shape, and no page or request left over."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import response_schema_conformance

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from tests.cluster.api.engine_api import LiveApi, live_api
from tests.cluster.api.one_model import one_model_api
from tests.cluster.small_tokenizers import wordpiece

EXAMPLES = 6  # for each endpoint; `make soak` tries five hundred times as many
QUIET = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
DOCUMENT = one_model_api(Dispatcher("tiny"), ModelTokenizer(wordpiece()), HttpConfig()).openapi()
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
GENERATES = {  # path: the schema of its body
    "/v1/completions": "CompletionRequest",
    "/v1/chat/completions": "ChatCompletionRequest",
    "/v1/responses": "ResponsesRequest",
    "/v1/messages": "MessagesRequest",
}


@pytest.fixture(scope="module")
def api(tokenizer: ModelTokenizer) -> Iterator[LiveApi]:
    """Assert at the end that no page is owned and no request is left."""
    with live_api(tokenizer) as server:
        yield server
        metrics = httpx.get(f"{server.url}/metrics", timeout=240).text
        active = [line for line in metrics.splitlines() if line.startswith("crossdock_requests_active")]
        assert active
        assert {line.rsplit(" ", 1)[1] for line in active} == {"0.0"}
        assert server.call(server.api.owned_pages()) == 0
        assert 'crossdock_ingress_requests{ingress="0"} 0.0' in metrics


def check(status: int, content_type: str, text: str, *, is_anthropic: bool) -> None:
    assert status < 500, text
    assert "Traceback" not in text
    if status >= 400 and content_type:
        error = json.loads(text)["error"]
        assert error.keys() == ({"message", "type"} if is_anthropic else {"message", "type", "param", "code"})


def test_document_names_every_endpoint(api: LiveApi) -> None:
    assert httpx.get(f"{api.url}/openapi.json", timeout=240).json()["paths"].keys() == DOCUMENT["paths"].keys()
    served = {getattr(route, "path", "").replace(":path", "") for route in api.api.app.routes}
    pages = {path for path in served if path.startswith(("/web/", "/dashboard", "/simulator"))}
    assert served - pages - {"/openapi.json", ""} == set(DOCUMENT["paths"])


def attack(api: LiveApi, path: str, method: str) -> None:
    schema = schemathesis.openapi.from_dict(DOCUMENT)
    operation = schema[path][method.upper()]
    modes = schemathesis.GenerationMode
    mixed = st.one_of(operation.as_strategy(generation_mode=mode) for mode in (modes.POSITIVE, modes.NEGATIVE))

    @QUIET
    @given(mixed)
    def attempt(case: Any) -> None:
        if isinstance(case.body, dict) and path in GENERATES:  # valid requests are also short
            case.body = {**case.body, "n": 1} if isinstance(case.body.get("n"), int) else case.body
            if isinstance(case.body.get("max_tokens", 0), int):
                case.body = {**case.body, "max_tokens": 2, "max_completion_tokens": None}
            if path == "/v1/responses":
                del case.body["max_tokens"], case.body["max_completion_tokens"]
                case.body["max_output_tokens"] = 2
        answer = case.call(base_url=api.url, timeout=240)
        content_type = answer.headers.get("content-type", [""])[0]
        check(answer.status_code, content_type, answer.text, is_anthropic=path.startswith("/v1/messages"))
        if answer.status_code >= 400:
            case.validate_response(answer, checks=[response_schema_conformance])

    attempt()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_requests_within_and_beyond_document_are_answered(api: LiveApi, path: str, method: str) -> None:
    attack(api, path, method)


WORDS = st.sampled_from(["role", "content", "type", "text", "json_schema", "schema", "function", "name", "auto", "5"])
TEXTS = WORDS | st.text(max_size=20) | st.just("x" * 3000)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize("path", GENERATES)
def test_known_field_with_any_value_is_answered(api: LiveApi, path: str) -> None:
    """One field of a valid request has any JSON value: deeper than schemas reach."""
    schema = DOCUMENT["components"]["schemas"][GENERATES[path]]
    messages = [{"role": "user", "content": "Hi"}]
    all_right = {"prompt": "Hi", "messages": messages, "input": "Hi", "max_tokens": 2, "max_output_tokens": 2}
    right = {name: value for name, value in all_right.items() if name in schema["properties"]}
    fields = sorted(schema["properties"])

    @settings(QUIET, max_examples=30)
    @given(st.sampled_from(fields), VALUES, st.booleans())
    def attempt(field: str, value: Any, stream: bool) -> None:
        body = json.dumps({**right, "stream": stream, field: value})
        headers = {"content-type": "application/json"}
        answer = http.post(path, content=body.encode("utf-8", "surrogatepass"), headers=headers)
        content_type = answer.headers["content-type"] if answer.status_code >= 400 else ""
        check(answer.status_code, content_type, answer.text, is_anthropic=path == "/v1/messages")
        assert '"type":"server_error"' not in answer.text
        if answer.status_code == 400 and path != "/v1/messages":
            error = answer.json()["error"]
            assert error["param"] or error["code"] == "invalid_json", "it names the field"

    with httpx.Client(base_url=api.url, timeout=240) as http:
        attempt()


PATHS = st.sampled_from([path.replace("{name}", "x") for path in DOCUMENT["paths"]]) | st.text(max_size=30)
METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "BREW"])
NAMES = st.sampled_from(
    ["authorization", "content-type", "content-length", "x-request-id", "x-slo-class", "transfer-encoding", "expect"]
) | st.text("abcdefghij-", min_size=1, max_size=12)


@QUIET
@given(PATHS, METHODS, st.lists(st.tuples(NAMES, st.binary(max_size=30)), max_size=5), st.binary(max_size=200))
def test_any_bytes_are_answered(
    api: LiveApi, path: str, method: str, headers: list[tuple[str, bytes]], body: bytes
) -> None:
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n".encode("utf-8", "replace")
    lines = b"".join(name.encode() + b": " + value + b"\r\n" for name, value in headers)
    with socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2])), 60) as wire:
        wire.sendall(head + lines + b"\r\n" + body)
        wire.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := wire.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    is_other_version = answer.startswith(b"HTTP/1.1 505")  # such bytes may say that they are HTTP/2
    assert is_other_version or not answer.startswith(b"HTTP/1.1 5"), answer
    assert httpx.get(f"{api.url}/health", timeout=240).status_code == 200


@pytest.mark.soak
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_document_at_length(api: LiveApi, path: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "QUIET", settings(QUIET, max_examples=500 * EXAMPLES))
    attack(api, path, method)
