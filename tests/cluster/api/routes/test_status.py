"""The small endpoints: SLO classes, requests by id, models, tokenization, health, metrics; and the cost of a token."""

import re
import sys
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import (
    HI,
    MAX_MODEL_LEN,
    STORY,
    ScriptedDispatcher,
    complete,
    events,
    refused,
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_slo_class_is_chosen_and_reported(http: httpx.Client, engine: ScriptedDispatcher, path: str) -> None:
    def post(**fields: Any) -> httpx.Response:
        headers = {"X-SLO-Class": fields.pop("header")} if "header" in fields else {}
        prompt = {"messages": HI} if "chat" in path else {"prompt": "Hi"}
        return http.post(path, json={**prompt, **fields}, headers=headers)

    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "standard"),
        ({"service_tier": None}, "standard"),
        ({"service_tier": "priority"}, "interactive"),
        ({"service_tier": "batch"}, "batch"),
        ({"header": "batch"}, "batch"),
        ({"header": "interactive", "service_tier": "auto"}, "interactive"),
    ]
    openai_names = {"interactive": "priority", "standard": "default", "batch": "flex"}
    for fields, chosen in cases:
        for answer in (post(**fields), stream := post(**fields, stream=True)):
            assert answer.headers["x-slo-class"] == chosen
        assert post(**fields).json()["service_tier"] == openai_names[chosen]
        assert {chunk["service_tier"] for chunk in events(stream)} == {openai_names[chosen]}
        assert {submission.slo_class for submission in engine.submissions} == {chosen}
        engine.submissions.clear()
    refused(post(service_tier="gold"), 400, param="service_tier", code="invalid_value")
    refused(post(service_tier=5), 400, param="service_tier", code="invalid_value")
    refused(post(header="gold"), 400, param="X-SLO-Class", code="invalid_value")
    refused(post(header="batch", service_tier="priority"), 400, param="service_tier")
    assert not engine.submissions


def test_request_is_found_by_id(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    for client_id in ("mine", "a/b", "50%", "cmpl-it"):
        answer = http.post("/v1/completions", json={"prompt": "Hi", "n": 2}, headers={"x-request-id": client_id})
        for name in (client_id, answer.json()["id"]):
            found = http.get(f"/v1/requests/{quote(name)}")
            assert found.status_code == 200, name
            assert (found.json()["id"], len(found.json()["requests"])) == (client_id, 2)
    assert len(http.get("/v1/requests").json()["data"]) == 8
    refused(http.get("/v1/requests/other"), 404, param="id", code="request_not_found")
    refused(http.get(f"/v1/requests/{'x' * 500}"), 404)
    refused(http.post("/v1/requests"), 405)


def test_ready_without_replica_is_503(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    assert http.get("/ready").status_code == 200
    engine.is_ready = False
    refused(http.get("/ready"), 503, code="not_ready")
    assert http.get("/health").status_code == 200


def test_models_list_name_and_aliases(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    model = client.models.retrieve("tiny")
    assert (model.object, model.created, model.owned_by) == ("model", 1_700_000_000, "crossdock")
    assert http.get("/v1/models/other").json()["max_model_len"] == MAX_MODEL_LEN
    error = refused(http.get("/v1/models/meta-llama/Llama-3"), 404, param="model", code="model_not_found")
    assert error["message"] == "The model 'meta-llama/Llama-3' does not exist; this server has tiny, other."
    assert complete(http, model="other")["model"] == "other"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="Hi")


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client, tokenizer: ModelTokenizer) -> None:
    answer = http.post("/tokenize", json={"model": "tiny", "prompt": STORY, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(STORY)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": STORY}
    chat = http.post("/tokenize", json={"messages": HI}).json()
    assert tokenizer.decode(chat["tokens"]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chat["token_strs"] is None
    assert http.post("/tokenize", json={"prompt": "dog " * 9000}).json()["count"] > MAX_MODEL_LEN
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
    refused(http.post("/tokenize", json={}), 400, param="prompt")
    refused(http.post("/tokenize", json={"prompt": "a", "messages": HI}), 400, param="prompt")
    refused(http.post("/tokenize", json={"prompt": "a", "model": "b"}), 404, param="model")
    refused(http.post("/detokenize", json={"tokens": [999_999]}), 400, param="tokens")
    refused(http.post("/detokenize", json={"tokens": ["a"]}), 400, param="tokens[0]")
    refused(http.post("/detokenize", json={}), 400, param="tokens")


def test_metrics_and_version_are_served(http: httpx.Client) -> None:
    answer = http.get("/metrics")
    assert answer.text == "crossdock_up 1\n"
    assert answer.headers["content-type"].startswith("text/plain")
    assert re.fullmatch(r"\d+\.\d+.*", http.get("/version").json()["version"])


async def test_token_of_a_stream_costs_few_calls(tokenizer: ModelTokenizer) -> None:
    """Without sockets. A call costs the same time wherever it is made, so their number is the ingress's share."""

    async def calls(count: int) -> int:
        words = "the lazy dog jumps over " * count
        engine = ScriptedDispatcher(tokenizer, max_model_len=10_000)
        deltas = [TokenDelta("a", [token]) for token in tokenizer.encode(words)[:count]]
        deltas[-1].finish_reason = FinishReason.LENGTH
        engine.script = lambda submission: deltas
        app = one_model_api(engine, tokenizer, HttpConfig())  # type: ignore[arg-type]
        num_calls = 0

        def count_call(frame: Any, event: str, of: Any) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            sys.setprofile(count_call)
            try:
                answer = await client.post("/v1/chat/completions", json={"messages": HI, "stream": True})
            finally:
                sys.setprofile(None)
        assert len(events(answer)) > count
        return num_calls

    await calls(10)  # fills caches
    few, many = await calls(100), await calls(1100)
    assert (many - few) / 1000 < 150  # 104 today, with the client and the scripted engine


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/openapi.json"])
def test_head_has_the_status_and_headers_of_get_and_no_body(http: httpx.Client, path: str) -> None:
    head, whole = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]
    assert http.get("/health").status_code == 200  # on the same connection
    assert http.head("/v1/chat/completions").status_code == 405


async def test_head_without_a_key_is_refused_where_get_is(
    engine: ScriptedDispatcher, tokenizer: ModelTokenizer
) -> None:
    app = one_model_api(engine, tokenizer, HttpConfig(api_keys=["secret-of-this-test"]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert [(await client.head(path)).status_code for path in ("/health", "/v1/models")] == [200, 401]
