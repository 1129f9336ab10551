"""The paths that answer without a key are those that the documentation names, and no others."""

import re
from pathlib import Path
from typing import Any

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.routes.web_assets import web_assets
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import ScriptedDispatcher, serving

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def test_paths_that_answer_without_a_key_are_the_documented_ones(
    engine: ScriptedDispatcher, tokenizer: ModelTokenizer
) -> None:
    """Every route, by every method, and paths that are none. With a key, no route asks for one."""
    text = " ".join((Path(__file__).parents[4] / "docs/security.md").read_text().split())
    sentence = re.search(r"Without a key only (.+?) and the web pages answer", text)
    assert sentence is not None
    documented = {*re.findall(r"`([^`]+)`", sentence[1]), *web_assets()}
    config = HttpConfig(api_keys=("k",))
    app = one_model_api(engine, tokenizer, config)  # type: ignore[arg-type]
    paths = {route.path.replace("{name:path}", "tiny") for route in app.routes}  # type: ignore[attr-defined]
    assert documented < paths
    with serving(engine, tokenizer, config) as http:
        asked = [*paths, "/", "/docs", "/v1", "/v1/models/", "//health", "/health/", "/HEALTH", "/web/"]
        open_ = {
            path
            for path in asked
            for method in METHODS
            if http.request(method, path, json={"prompt": "Hi"}).status_code != 401
        }
        assert open_ == documented
        for path in paths - {"/v1/replicas"}:  # which the scripted dispatcher lacks
            answer = http.get(path, headers={"authorization": "Bearer k"})
            assert answer.status_code in (200, 404, 405), path
    assert not engine.submissions


async def test_web_socket_is_refused(engine: ScriptedDispatcher, tokenizer: ModelTokenizer) -> None:
    """There is none behind the guard, which looks at HTTP alone."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    app = one_model_api(engine, tokenizer, HttpConfig(api_keys=("k",)))  # type: ignore[arg-type]
    for path in ("/v1/completions", "/metrics", "/v1/requests"):
        scope = {"type": "websocket", "path": path, "headers": [], "query_string": b"", "subprotocols": []}
        await app(scope, receive, send)
    assert set(sent) == {"websocket.close"}
