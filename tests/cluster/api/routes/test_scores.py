"""/v1/score and /v1/rerank over real engines: cosines and probabilities are those of transformers' own model."""

from functools import cache
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.service_tiers import ServiceTiers
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from tests.cluster.api.engine_api import CLASSES, EngineApi
from tests.cluster.api.one_model import one_model_api
from tests.workers.architectures import build

QUERY, DOCUMENTS = "q", ["z", "xq", "qzqz" * 20]


@cache
def reference() -> PreTrainedModel:
    return build("llama", {})


@torch.inference_mode()
def cosine(tokenizer: ModelTokenizer, left: str, right: str) -> float:
    vectors = []
    for text in (left, right):
        ids = torch.tensor([tokenizer.encode(text)])
        vector = reference().base_model(input_ids=ids, use_cache=False).last_hidden_state[0, -1].double().numpy()
        vectors.append(vector / np.linalg.norm(vector))
    return float(vectors[0] @ vectors[1])


def client(api: EngineApi, tokenizer: ModelTokenizer, **defaults: Any) -> httpx.AsyncClient:
    tiers = ServiceTiers(CLASSES, "standard")
    app = one_model_api(
        api.dispatcher, tokenizer, HttpConfig.model_validate({}), tiers, pooling=EmbeddingDefaults(**defaults)
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def test_scores_at_all_paths_are_transformers_cosines(tokenizer: ModelTokenizer) -> None:
    wanted = [cosine(tokenizer, QUERY, text) for text in DOCUMENTS]
    async with EngineApi(tokenizer, num_replicas=2, max_num_batched_tokens=40, enable_prefix_caching=True) as api:
        for path, names in (("/v1/score", ("text_1", "text_2")), ("/score", ("queries", "documents"))):
            answer = (await api.http.post(path, json={names[0]: QUERY, names[1]: DOCUMENTS})).json()
            np.testing.assert_allclose([each["score"] for each in answer["data"]], wanted, atol=2e-4)
        one = (await api.http.post("/v1/score", json={"text_1": [QUERY] * 3, "text_2": DOCUMENTS})).json()
        np.testing.assert_allclose([each["score"] for each in one["data"]], wanted, atol=2e-4)
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            answer = (await api.http.post(path, json={"query": QUERY, "documents": DOCUMENTS, "top_n": 2})).json()
            results = answer["results"]
            assert [each["index"] for each in results] == sorted(range(3), key=lambda i: -wanted[i])[:2]
            assert results[0]["document"] == {"text": DOCUMENTS[results[0]["index"]]}
            assert results[0]["relevance_score"] == pytest.approx(max(wanted), abs=2e-4)
            assert answer["usage"]["total_tokens"] > 0
        assert await api.owned_pages() == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": [""]}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"], "activation": False}, "activation"),
        ("/classify", {"input": "a"}, "model"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b" * 100_000]}, "input"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "model": "other"}, "model"),
    ],
)
async def test_wrong_request_is_refused_with_its_field(
    tokenizer: ModelTokenizer, path: str, body: Any, param: str
) -> None:
    async with EngineApi(tokenizer, max_num_batched_tokens=40) as api:
        answer = await client(api, tokenizer).post(path, json=body)
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["param"] == param


async def test_truncation_of_a_judged_pair_is_refused(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer) as api:
        body = {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 5}
        answer = await client(api, tokenizer, classifier=("n", "y")).post("/v1/rerank", json=body)
        assert answer.json()["error"]["param"] == "truncate_prompt_tokens"


def test_word_of_several_tokens_is_refused_by_name(tokenizer: ModelTokenizer) -> None:
    defaults = EmbeddingDefaults(classifier=("n", "certainly not"))
    with pytest.raises(ValueError, match="classifier_from_token"):
        one_model_api(Dispatcher("tiny"), tokenizer, HttpConfig.model_validate({}), pooling=defaults)
