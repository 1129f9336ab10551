"""POST /v1/embeddings over real engines: every form of input, the encodings, the refusals, and losses on the way."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from crossdock.cluster.api.body.embedding_body import EmbeddingRequest
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults, PoolerConfig
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.router.fleet import RouterConfig
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.cluster.api.engine_api import EngineApi
from tests.cluster.api.one_model import one_model_api
from tests.cluster.dispatch.in_process import InProcess, ready
from tests.workers.architectures import build

Vector = NDArray[np.float64]
PROMPTS = [[5, 9, 60], [7] * 40, [3 + i % 90 for i in range(150)]]


@cache
def reference() -> PreTrainedModel:
    return build("llama", {})


@torch.inference_mode()
def expected(prompt: list[int], pooling: str = "last", *, normalizes: bool = True) -> Vector:
    """Return the vector of one forward pass of transformers' own model."""
    hidden = reference().base_model(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
    vector: Vector = (hidden[-1] if pooling == "last" else hidden.mean(0)).double().numpy()
    return vector / np.linalg.norm(vector) if normalizes else vector


def close(found: Any, wanted: Vector) -> None:
    np.testing.assert_allclose(np.array(found), wanted, atol=2e-4, rtol=2e-3)


@asynccontextmanager
async def serving(tokenizer: ModelTokenizer, **options: Any) -> AsyncIterator[EngineApi]:
    async with EngineApi(tokenizer, max_num_batched_tokens=40, **options) as api:
        yield api
        assert await api.owned_pages() == 0


async def ask(api: EngineApi, **body: Any) -> httpx.Response:
    return await api.http.post("/v1/embeddings", json=body)


async def test_vectors_of_all_forms_of_input_equal_transformers(tokenizer: ModelTokenizer) -> None:
    async with serving(tokenizer) as api:
        texts = ["#q", "Zx%{&}~Q"]
        ids = [tokenizer.encode(text) for text in texts]
        assert max(map(max, ids)) < 128, "the tiny model has no more tokens"
        for given, prompts in ((texts[0], ids[:1]), (texts, ids), (PROMPTS[0], PROMPTS[:1]), (PROMPTS, PROMPTS)):
            for pooling in ("last", "mean"):
                answer = (await ask(api, input=given, pooling=pooling)).json()
                assert [one["index"] for one in answer["data"]] == list(range(len(prompts)))
                for one, prompt in zip(answer["data"], prompts, strict=True):
                    close(one["embedding"], expected(prompt, pooling))
                num_tokens = sum(map(len, prompts))
                assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens
                assert (answer["object"], answer["data"][0]["object"], answer["model"]) == ("list", "embedding", "tiny")


async def test_vectors_beside_streams_equal_those_alone(tokenizer: ModelTokenizer) -> None:
    async with serving(tokenizer, admission="queue") as api:
        alone = (await api.ask("standard", 30, max_tokens=60, seed=7)).json()["choices"][0]["text"]
        stream = asyncio.create_task(api.ask("standard", 30, max_tokens=60, seed=7))
        answers = await asyncio.gather(*(ask(api, input=PROMPTS, pooling=kind) for kind in ("last", "mean") * 3))
        for answer, kind in zip(answers, ("last", "mean") * 3, strict=True):
            for one, prompt in zip(answer.json()["data"], PROMPTS, strict=True):
                close(one["embedding"], expected(prompt, kind))
        assert (await stream).json()["choices"][0]["text"] == alone


async def test_base64_has_the_same_numbers_in_float32(tokenizer: ModelTokenizer) -> None:
    async with serving(tokenizer) as api:
        for more in ({}, {"use_activation": False}, {"normalize": False}):
            numbers, text = [
                (await ask(api, input=PROMPTS[2], encoding_format=form, **more)).json()["data"][0]["embedding"]
                for form in ("float", "base64")
            ]
            assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == numbers
            close(numbers, expected(PROMPTS[2], normalizes=not more))


async def test_cut_texts_have_the_vectors_of_what_is_left(tokenizer: ModelTokenizer) -> None:
    async with serving(tokenizer) as api:
        long = [3 + i % 90 for i in range(400)]  # more than the model takes
        for keep, side, left in ((20, "left", long[-20:]), (20, "right", long[:20]), (-1, "left", long[-255:])):
            answer = await ask(api, input=long, truncate_prompt_tokens=keep, truncation_side=side)
            close(answer.json()["data"][0]["embedding"], expected(left))


@pytest.mark.usefixtures("stopped_minute")
async def test_class_key_and_limits_hold_as_for_completions(tokenizer: ModelTokenizer) -> None:
    keys = [{"key": "few", "classes": ["standard"], "tokens_per_minute": 100}]
    async with serving(tokenizer, keys=keys) as api:

        async def as_key(**body: Any) -> httpx.Response:
            return await api.http.post("/v1/embeddings", json=body, headers={"authorization": "Bearer few"})

        assert (await ask(api, input=[5])).status_code == 401
        answer = await as_key(input=[5] * 60, service_tier="standard")
        assert (answer.status_code, answer.headers["x-slo-class"]) == (200, "standard")
        assert (await as_key(input=[5], service_tier="urgent")).status_code in (400, 403)
        assert (await as_key(input=[5] * 60)).status_code == 429, "a key's tokens are counted"


async def test_lost_replica_changes_no_vector(tokenizer: ModelTokenizer) -> None:
    """The replica dies while it computes; the client sees one answer, with the same vectors."""

    async with EngineApi(tokenizer, max_num_batched_tokens=18, num_replicas=2, admission="queue") as api:
        asked = [asyncio.create_task(ask(api, input=PROMPTS[2:] * 4, pooling=kind)) for kind in ("last", "mean")]
        while not any(replica.engine_thread.engine.scheduler.table.requests() for replica in api.replicas[:1]):
            await asyncio.sleep(0.001)
        api.replicas[0].is_killed = True
        for kind, asking in zip(("last", "mean"), asked, strict=True):
            answer = await asking
            assert answer.status_code == 200, answer.text
            for one in answer.json()["data"]:
                close(one["embedding"], expected(PROMPTS[2], kind))
        assert "crossdock_ingress_placed_again_total 0.0" not in api.dispatcher.metrics.text()


async def test_pools_compute_vectors_on_prefill_replicas_without_a_transfer(tokenizer: ModelTokenizer) -> None:
    async with serving(tokenizer, router=RouterConfig(shipping="always")) as api:
        prefill, decode = InProcess(role="prefill"), InProcess(role="decode")
        api.dispatcher.join("prefill", prefill, prefill.profile)
        api.dispatcher.join("decode", decode, decode.profile)
        await ready(api.dispatcher, 3)
        api.dispatcher.leave("r0")
        before = [replica.engine_thread.engine.scheduler.table.prefilled.tokens for replica in (prefill, decode)]
        for kind in ("last", "mean"):
            answer = await ask(api, input=PROMPTS, pooling=kind)
            for one, prompt in zip(answer.json()["data"], PROMPTS, strict=True):
                close(one["embedding"], expected(prompt, kind))
        after = [replica.engine_thread.engine.scheduler.table.prefilled.tokens for replica in (prefill, decode)]
        assert [late - early for late, early in zip(after, before, strict=True)] == [2 * sum(map(len, PROMPTS)), 0]
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        deltas = [delta async for delta in api.dispatcher.generate(Submission("pair", [7] * 40, params))]
        assert sum(len(delta.token_ids) for delta in deltas) == 3, "the pair still serves streams"
        for replica in (prefill, decode):
            await replica.engine_thread.close()


async def test_openai_client_reads_the_vectors(tokenizer: ModelTokenizer) -> None:
    async with serving(tokenizer) as api:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=api.http)
        answer = await client.embeddings.create(model="tiny", input=PROMPTS)  # as base64, which the client decodes
        for one, prompt in zip(answer.data, PROMPTS, strict=True):
            close(one.embedding, expected(prompt))
        assert answer.usage.total_tokens == sum(map(len, PROMPTS))


# -- what a model's directory says -------------------------------------------------------------------------------------


def directory(folder: Path, *modules: str, shape: dict[str, Any] | None = None, **modes: bool) -> Path:
    (folder / "config.json").write_text(json.dumps(shape or {}))
    if modules:
        listed = [
            {"path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        for one in listed:
            (folder / one["path"]).mkdir()
            (folder / one["path"] / "config.json").write_text(json.dumps(modes))
    return folder


def test_directory_without_a_pooling_has_last_and_a_length_of_1(tmp_path: Path) -> None:
    assert EmbeddingDefaults.read(directory(tmp_path)) == EmbeddingDefaults("last", True)


def test_directory_of_sentence_transformers_is_followed_and_config_wins(tmp_path: Path) -> None:
    folder = directory(tmp_path, "Transformer", "Pooling", pooling_mode_mean_tokens=True, pooling_mode_cls_token=False)
    assert EmbeddingDefaults.read(folder) == EmbeddingDefaults("mean", False)
    config = PoolerConfig(pooling_type="LAST", use_activation=True)
    assert EmbeddingDefaults.read(folder, config) == EmbeddingDefaults("last", True)


@pytest.mark.parametrize(
    ("modules", "modes", "reason"),
    [
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
        (("Transformer", "Pooling", "LayerNorm", "Normalize"), {"pooling_mode_lasttoken": True}, "LayerNorm"),
        (("Transformer", "Pooling", "Normalize", "Dense"), {"pooling_mode_lasttoken": True}, "another order"),
    ],
)
def test_pooling_that_is_not_served_is_refused_until_another_is_named(
    tmp_path: Path, modules: tuple[str, ...], modes: dict[str, bool], reason: str
) -> None:
    folder = directory(tmp_path, *modules, **modes)
    defaults = EmbeddingDefaults.read(folder)
    with pytest.raises(ApiError, match=reason):
        EmbeddingRequest(input="a").completion(defaults)
    assert EmbeddingRequest(input="a", pooling="mean").completion(defaults).pooling == "mean"
    assert not EmbeddingDefaults.read(folder, PoolerConfig(pooling_type="MEAN")).refusal


def test_first_token_of_a_decoder_is_no_vector(tmp_path: Path) -> None:
    """A text encoder's is one, see tests/cluster/offline/test_text_encoders.py."""
    with pytest.raises(ApiError, match="'cls' is for text encoders") as refusal:
        EmbeddingRequest(input="a", pooling="cls").completion(EmbeddingDefaults.read(directory(tmp_path)))
    assert refusal.value.param == "pooling"
    with pytest.raises(ValueError, match="pooling_type CLS is for text encoders"):
        EmbeddingDefaults.read(tmp_path, PoolerConfig(pooling_type="CLS"))


def test_matryoshka_sizes_are_those_of_the_model_or_the_config(tmp_path: Path) -> None:
    listed = EmbeddingDefaults.read(
        directory(tmp_path, shape={"is_matryoshka": True, "matryoshka_dimensions": [8, 16]})
    )
    listed.check_size(16)
    any_size = EmbeddingDefaults.read(directory(tmp_path, shape={"is_matryoshka": True}))
    any_size.check_size(5)
    for defaults, size in ((listed, 5), (EmbeddingDefaults(), 8)):
        with pytest.raises(ApiError, match="dimensions"):
            defaults.check_size(size)
    EmbeddingDefaults.read(tmp_path, PoolerConfig(matryoshka_dimensions=(12,))).check_size(12)


async def test_shorter_vector_is_cut_and_then_has_a_length_of_1(tokenizer: ModelTokenizer) -> None:
    async with serving(tokenizer) as api:
        app = one_model_api(
            api.dispatcher,
            tokenizer,
            HttpConfig.model_validate({}),
            pooling=EmbeddingDefaults("mean", has_any_size=True),
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            answer = await http.post("/v1/embeddings", json={"input": PROMPTS[1], "dimensions": 16})
            whole = expected(PROMPTS[1], "mean", normalizes=False)[:16]
            close(answer.json()["data"][0]["embedding"], whole / np.linalg.norm(whole))
            refused = await http.post("/v1/embeddings", json={"input": PROMPTS[1], "dimensions": 49})
            assert refused.json()["error"]["param"] == "dimensions"
            assert "48 numbers" in refused.json()["error"]["message"]
