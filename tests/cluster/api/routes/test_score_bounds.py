"""The largest bodies for scores: texts are encoded once, prompts are counted as they are made, others are served."""

import asyncio
from typing import Any, TypeAlias

import httpx
import numpy as np
import pytest

from crossdock.cluster.api.body.classifier_head import ClassifierHead
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults
from crossdock.cluster.api.bounds import INPUTS
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import ScriptedDispatcher

CONTEXT = 2000
WORDS = "dog "  # a token or two
Model: TypeAlias = tuple[str, ScriptedDispatcher, Any]
KINDS = ("vectors", "judge", "head")


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The characters of each text that is encoded."""
    counts: list[int] = []
    encode = ModelTokenizer.encode

    def counted(self: ModelTokenizer, text: str, **ways: Any) -> list[int]:
        counts.append(len(text))
        return encode(self, text, **ways)

    monkeypatch.setattr(ModelTokenizer, "encode", counted)
    return counts


@pytest.fixture(params=KINDS)
def model(tokenizer: ModelTokenizer, request: pytest.FixtureRequest) -> Model:
    """A kind of model, its dispatcher, and the function that serves it with an amount of memory for requests."""
    engine = ScriptedDispatcher(tokenizer, CONTEXT)
    defaults: dict[str, Any] = {
        "vectors": {},
        "judge": {"classifier": ("n", "y")},
        "head": {"head": ClassifierHead(np.ones((1, 8), "<f4"), ("good",), "sigmoid")},
    }

    def served(memory: int = 1 << 31) -> httpx.AsyncClient:
        http = HttpConfig.model_validate({"request_memory_bytes": memory})
        app = one_model_api(engine, tokenizer, http, pooling=EmbeddingDefaults(**defaults[request.param]))  # type: ignore[arg-type]
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")

    return request.param, engine, served


def bodies(query: str, num: int = INPUTS) -> list[tuple[str, dict[str, Any]]]:
    documents = [f"a {i}" for i in range(num)]
    return [
        ("/v1/rerank", {"query": query, "documents": documents}),
        ("/v1/score", {"text_1": query, "text_2": documents}),
        ("/v1/score", {"text_1": [query] * num, "text_2": documents}),
    ]


async def test_query_beyond_the_context_is_refused_before_any_document_is_read(
    model: Model, encoded: list[int]
) -> None:
    _, engine, served = model
    query = WORDS * 30_000
    async with served() as http:
        for path, body in [*bodies(query)[:2], bodies(query, 100)[2]]:
            encoded.clear()
            answer = await http.post(path, json=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert len(encoded) <= 3
            assert sum(encoded) <= 2 * len(query)
    assert not engine.submissions


async def test_query_is_encoded_once_for_all_of_its_documents(model: Model, encoded: list[int]) -> None:
    _, engine, served = model
    query = WORDS * 300
    num = 200
    async with served() as http:
        for path, body in bodies(query, num):
            encoded.clear()
            await http.post(path, json=body)
            assert sum(encoded) <= 2 * len(query) + 200 * num
            assert len(engine.submissions) >= num
            engine.submissions.clear()


@pytest.mark.parametrize("model", ["judge", "head"], indirect=True)
async def test_prompts_are_counted_while_they_are_made(model: Model, encoded: list[int]) -> None:
    """The prompts of the largest body would hold 140 MB, and 8 are there."""
    _, engine, served = model
    async with served(8 << 20) as http:
        for path, body in bodies(WORDS * 800)[:2]:
            encoded.clear()
            answer = await http.post(path, json=body)
            assert answer.status_code == 429, answer.text
            assert answer.json()["error"]["code"] == "request_memory"
            assert len(encoded) < INPUTS / 8
            assert not engine.submissions


async def test_other_requests_are_served_while_prompts_are_made(model: Model) -> None:
    _, engine, served = model
    async with served() as http:
        asked = asyncio.create_task(http.post("/v1/rerank", json=bodies(WORDS * 400)[0][1]))
        for _ in range(3):
            assert (await http.get("/health")).status_code == 200
            assert not engine.submissions
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
