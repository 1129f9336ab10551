"""Settings that change what clients get: a gateway's path, other origins, usage, variables of the template."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from crossdock.cluster.api.http.gateways import GatewayPath
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.listener import listen
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.scripted_api import HI, ScriptedDispatcher, Serve, events
from tests.cluster.ports import free_port

CHAT = {"messages": HI, "max_tokens": 3}


def test_api_under_a_gateways_path_answers_with_and_without_it(serve: Serve) -> None:
    """Gateways cut the path off, or pass it on. The description names the server that clients must call."""
    http = serve(root_path="/llm/v2", api_keys=["k"])
    for prefix in ("", "/llm/v2"):
        assert http.get(f"{prefix}/health").status_code == 200
        assert http.get(f"{prefix}/v1/models").status_code == 401, "the path opens no closed door"
        answer = http.post(f"{prefix}/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer k"})
        assert answer.status_code == 200
        assert http.get(f"{prefix}/dashboard").status_code == 200
        assert http.get(f"{prefix}/web/style.css").status_code == 200
        assert http.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/llm/v2"}]
    assert http.get("/other/health").status_code in (401, 404)


@pytest.mark.parametrize("sent", ["/second/v1/models", "/second/llm/v1/models"])
async def test_gateways_path_stands_before_the_route_of_serves_proxy(sent: str) -> None:
    """Clients see both: the gateway cuts its path off, or the route contains it, and the proxy names its route."""
    seen: list[Scope] = []

    async def api(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    scope = {"type": "http", "path": sent, "root_path": "/second"}
    await GatewayPath(api, "/llm")(scope, None, None)  # type: ignore[arg-type]
    assert seen == [{"type": "http", "root_path": "/llm/second", "path": "/llm/second/v1/models"}]


@pytest.mark.parametrize("page", ["/dashboard", "/simulator"])
def test_page_links_by_relative_paths(serve: Serve, page: str) -> None:
    """So the page works under every path."""
    http = serve()
    text = http.get(page).text
    assert 'src="/' not in text
    assert 'href="/' not in text


@pytest.mark.parametrize("path", ["llm", "/llm/", "/a b", "/llm?x", "//"])
def test_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="root_path"):
        HttpConfig(root_path=path)


def test_mode_of_logprobs_reaches_the_engine_from_every_endpoint(serve: Serve, engine: ScriptedDispatcher) -> None:
    http = serve(logprobs_mode="processed_logits")
    http.post("/v1/completions", json={"prompt": "a", "logprobs": 1})
    http.post("/v1/chat/completions", json=CHAT | {"logprobs": True})
    http.post("/v1/responses", json={"input": "a"})
    assert [each.sampling.logprobs_mode for each in engine.submissions] == ["processed_logits"] * 3
    with pytest.raises(ValueError, match="logprobs_mode"):
        HttpConfig.model_validate({"logprobs_mode": "logits"})


def test_pages_of_allowed_origins_may_call_the_api(serve: Serve) -> None:
    """A browser asks with OPTIONS first, without a key, and needs the header in the answer, also in an error."""
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    http = serve(allowed_origins=["https://chat.example"], api_keys=["k"])
    for origin, is_allowed in (("https://chat.example", True), ("https://evil.example", False)):
        asked = http.options("/v1/chat/completions", headers={"origin": origin} | asks)
        answers = [
            asked,
            http.post("/v1/chat/completions", json=CHAT, headers={"origin": origin, "authorization": "Bearer k"}),
            http.post("/v1/chat/completions", json=CHAT, headers={"origin": origin}),
        ]
        assert [answer.headers.get("access-control-allow-origin") == origin for answer in answers] == [is_allowed] * 3
        assert (asked.status_code == 200) == is_allowed
        assert [answer.status_code for answer in answers[1:]] == [200, 401]


def test_no_origin_is_allowed_by_default(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json=CHAT, headers={"origin": "https://chat.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_forced_usage_is_in_every_event_of_every_stream(serve: Serve, path: str) -> None:
    body: dict[str, Any] = CHAT if "chat" in path else {"prompt": "Hi", "max_tokens": 3}
    http = serve(force_include_usage=True)
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": {"include_usage": True}}):
        streamed = events(http.post(path, json=body | {"stream": True} | options))
        counts = [event["usage"]["completion_tokens"] for event in streamed]
        assert (counts, counts[-1]) == (sorted(counts), 3)
    assert http.post(path, json=body).json()["usage"]["completion_tokens"] == 3


def test_template_variables_of_the_server_hold_where_a_request_names_none(
    serve: Serve, engine: ScriptedDispatcher, tokenizer: ModelTokenizer
) -> None:
    template = "{{ messages[0].content }}{% if thinks %} think{% else %} fast{% endif %}"

    def prompt(http: httpx.Client, **fields: Any) -> str:
        assert http.post("/v1/chat/completions", json=CHAT | {"chat_template": template} | fields).status_code == 200
        return tokenizer.decode(engine.submissions[-1].prompt_token_ids)

    http = serve(default_chat_template_kwargs={"thinks": True}, trust_request_chat_template=True)
    assert prompt(http) == "Hi think"
    assert prompt(http, chat_template_kwargs={"thinks": False}) == "Hi fast"
    assert prompt(http, chat_template_kwargs={"other": 1}) == "Hi think"


async def test_connections_are_kept_as_long_as_the_setting_says() -> None:
    """A server with one second ends an idle connection, while another keeps it for its next request."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    ports = {1: free_port(), 75: free_port()}
    servers = {seconds: await listen(app, "127.0.0.1", port, keep_alive_s=seconds) for seconds, port in ports.items()}
    try:
        wires = {seconds: await asyncio.open_connection("127.0.0.1", port) for seconds, port in ports.items()}
        for reader, writer in wires.values():
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            await reader.readuntil(b"ok")
        assert await wires[1][0].read() == b"", "the connection has ended"
        reader, writer = wires[75]
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        for _, writer in wires.values():
            writer.close()
    finally:
        for server in servers.values():
            await server.close(1)
