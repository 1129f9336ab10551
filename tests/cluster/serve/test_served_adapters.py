"""Adapters on a real deployment of two ingresses: loaded at one, served by both. In the soak, for its own server."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cluster.serve.pools.served_pools import behind_proxies
from tests.workers.lora_oracle import tuned

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def url(ray_cluster: None, small_model_dir: Path, adapter_folder: Path) -> Iterator[str]:
    settings = {"http.lora_folder": str(adapter_folder), "engine.enable_lora": True}
    with behind_proxies(small_model_dir, settings) as url:
        yield url


def test_adapter_loaded_at_one_ingress_is_served_by_both(url: str, small_model_dir: Path, adapter_folder: Path) -> None:
    """Its tokens are PEFT's, beside a stream of the base model; after the unload both answer 404."""
    module = AutoModelForCausalLM.from_pretrained(small_model_dir, dtype=torch.float32)
    one, prompt = tuned(module, adapter_folder / "one", 1), [5 + i % 90 for i in range(40)]

    def answer(model: str) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "min_tokens": 8, "temperature": 0}
        return httpx.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}, timeout=240)

    assert answer("one").status_code == 404
    loaded = httpx.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "one", "lora_path": "one"}, timeout=240)
    assert loaded.status_code == 200, loaded.text
    wanted = one.greedy(prompt, 8)
    for _ in range(6):  # requests go to both ingresses
        assert answer("one").json()["choices"][0]["token_ids"] == wanted
    assert answer("smol").json()["choices"][0]["token_ids"] != wanted
    assert "crossdock_adapter_loads_total" in httpx.get(f"{url}/metrics", timeout=240).text
    assert httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "one"}, timeout=240).status_code == 200
    assert [answer("one").status_code for _ in range(6)] == [404] * 6
