"""A deployment of two replicas of a text encoder: vectors over HTTP, and none is lost with a replica."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

from crossdock.cluster.config_file import load
from crossdock.cluster.serve.preparation import prepare
from crossdock.cluster.serve.summary import summary
from tests.cluster.serve.pools import served_pools as pools
from tests.cluster.serve.pools.served_pools import metric, processes
from tests.cluster.watch.terminal import run
from tests.waiting import eventually
from tests.workers.text_encoders import POSITIONS, TEXTS, hidden_of, saved

REPLICAS = 2
AGAIN = "crossdock_ingress_placed_again_total"
_OWN = {"model.max_model_len": None, "engine.kv_cache_memory": None, "engine.max_num_batched_tokens": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoder")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return saved(folder, "bert", pooling="cls_token")


@pytest.fixture(scope="module")
def url(ray_cluster: None, model: Any, folder: Path) -> Iterator[str]:
    with pools.deployment(folder, ({"name": "mixed", "replicas": REPLICAS},), _OWN) as address:
        yield address


def embed(url: str, given: Any, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/embeddings", json={"input": given, "model": "smol", **fields}, timeout=240)


def unit(model: Any, token_ids: list[int]) -> np.ndarray[Any, Any]:
    vector = hidden_of(model, token_ids)[0].numpy()
    found: np.ndarray[Any, Any] = vector / np.linalg.norm(vector)
    return found


def test_vectors_over_http_are_those_of_transformers_and_chats_are_refused(url: str, model: Any, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = embed(url, TEXTS, encoding_format="base64").json()["data"]
    for text, each in zip(TEXTS, data, strict=True):
        found = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
        np.testing.assert_allclose(found, unit(model, tokenizer(text)["input_ids"]), atol=5e-5)
    body = {"model": "smol", "messages": [{"role": "user", "content": "a"}]}
    for path, fields in (("/v1/chat/completions", body), ("/v1/completions", {"model": "smol", "prompt": "a"})):
        answer = httpx.post(f"{url}{path}", json=fields, timeout=240)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "model"
        assert "use /v1/embeddings" in answer.json()["error"]["message"]
    (card,) = httpx.get(f"{url}/v1/models", timeout=240).json()["data"]
    assert card["max_model_len"] == POSITIONS
    replicas = httpx.get(f"{url}/v1/replicas", timeout=240).json()["data"]
    assert [each["profile"]["generates"] for each in replicas] == [False] * REPLICAS
    texts = [line for line in summary(replicas) if line.startswith("Texts: ")]
    assert texts == [line for line in texts if f"up to {POSITIONS} tokens each" in line and "no KV pages" in line]
    assert len(texts) == 1


def test_texts_of_a_killed_replica_are_computed_by_another(url: str, model: Any) -> None:
    texts = [[4 + (7 * i + place) % 120 for place in range(POSITIONS)] for i in range(512)]

    def was_lost() -> bool:
        """Whether texts were at the killed replica. On a fast machine all may have been computed before."""
        before = metric(url, AGAIN, may_be_absent=True)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(embed, url, texts)
            owned = 'crossdock_pages{state="owned"'
            eventually(lambda: asked.done() or any(pools.samples(url, owned).values()))
            next(iter(processes("mixed").values())).kill()
            answer = asked.result()
        assert answer.status_code == 200, answer.text[:1000]
        data = answer.json()["data"]
        assert [each["index"] for each in data] == list(range(len(texts)))
        for i in range(0, len(texts), 97):
            np.testing.assert_allclose(data[i]["embedding"], unit(model, texts[i]), atol=5e-5)
        pools.wait_until_whole(url, REPLICAS)
        return metric(url, AGAIN, may_be_absent=True) > before

    eventually(was_lost, "no text was at the killed replica", 240)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"http.rollouts": True}, "http.rollouts: the weights of a text encoder"),
        ({"pools": [{"name": "a", "tensor_parallel_size": 2}]}, "tensor_parallel_size must be 1"),
        ({"pools": [{"name": "prefill"}, {"name": "decode"}]}, "role must be mixed"),
        ({"pools": [{"name": "a", "emulated": "h100-8b"}]}, "emulated must be null"),
        ({"engine.quantization": "fp8"}, "engine.quantization must be null"),
        (
            {"engine.max_num_batched_tokens": 90, "engine.max_num_seqs": 4},
            r"max_num_batched_tokens \(90\) must be 0 or",
        ),
        ({"model.max_model_len": 200}, r"max_model_len \(200\) is more than the model's own 96 positions"),
        ({"model.pooler_config": {"classifier_from_token": ["no", "yes"]}}, "for models that generate text"),
    ],
)
def test_start_refuses_by_name_what_an_encoder_cannot_have(
    settings: dict[str, Any], reason: str, model: Any, folder: Path
) -> None:
    config = load(None, {"model.path": str(folder), **settings})
    with pytest.raises(ValueError, match=reason):
        prepare(config, has_gpus=False)
    assert prepare(load(None, {"model.path": str(folder)}), has_gpus=False)


def test_tune_refuses_a_model_without_streams(model: Any, folder: Path) -> None:
    result = run("tune", str(folder))
    assert result.exit_code == 2
    assert "a text encoder has no streams" in result.stderr
