"""The context of real servers, a pair of pools and `crossdock serve`: longer by `hf_overrides`, or what memory holds.

A yarn scaling lengthens it 16 times. Tokens are those of transformers with the same scaling."""

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.cluster.serve.pools import served_pools as pools
from tests.cluster.serve.pools.served_pools import Stream, assert_greedy, prompt
from tests.cluster.serve.served_command import serving
from tests.sweeps import SOAK
from tests.workers.architectures import build

POSITIONS = 256  # of the model itself
LENGTHS = (40, 300, 900)  # of prompts; the second and the third are longer than the model's own context
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": POSITIONS}
SIZES = {"vocab_size": 640, "hidden_size": 128, "num_hidden_layers": 2, "head_dim": 64}
TOKEN_BYTES = 2 * 2 * 2 * 64 * 4  # keys and values of two layers, two KV heads, in float32
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizers: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("model") / "smol"
    build("llama", SIZES | {"max_position_embeddings": POSITIONS, "rope_theta": 5e5}).save_pretrained(folder)
    tokenizers["byte_level"].save_pretrained(folder)
    return folder


def oracle(model: Path, *, is_scaled: bool) -> PreTrainedModel:
    """Return transformers' model, with the scaling or as its own config.json has it."""
    config = AutoConfig.from_pretrained(model)
    if is_scaled:
        config.rope_parameters = {**config.rope_parameters, **YARN}
    module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, config=config, attn_implementation="eager")
    return module.eval()


def assert_scaled(url: str, model: Path) -> None:
    """Assert that a server takes the longer context, and that its tokens are those of the scaled model alone."""
    [card] = httpx.get(f"{url}/v1/models", timeout=240).json()["data"]
    assert card["max_model_len"] == POSITIONS * 16
    prompts = [prompt(number, length) for number, length in enumerate(LENGTHS)]
    streams = [Stream(url, tokens, NUM_TOKENS) for tokens in prompts]
    found = [stream.result() for stream in streams]
    scaled, plain = (oracle(model, is_scaled=is_scaled) for is_scaled in (True, False))
    for asked, tokens in zip(prompts, found, strict=True):
        assert_greedy(scaled, asked, tokens, NUM_TOKENS)
    with pytest.raises(AssertionError):
        assert_greedy(plain, prompts[-1], found[-1], NUM_TOKENS)
    too_long = {"model": "smol", "prompt": [5] * 5000, "max_tokens": 1}
    refused = httpx.post(f"{url}/v1/completions", json=too_long, timeout=240)
    assert refused.status_code == 400
    assert str(POSITIONS * 16) in refused.json()["error"]["message"]


def test_pair_of_pools_has_the_tokens_of_transformers_with_the_same_overrides(ray_cluster: None, model: Path) -> None:
    pair = ({"name": "prefill"}, {"name": "decode"})
    with pools.deployment(model, pair, {"model.hf_overrides": {"rope_scaling": YARN}}) as url:
        assert_scaled(url, model)
        replicas = httpx.get(f"{url}/v1/replicas", timeout=240).json()["data"]
        assert len({each["profile"]["weights"] for each in replicas}) == 1, "equal values: pages may travel"
        assert pools.metric(url, 'crossdock_transfers_total{direction="sent",outcome="shipped"') == len(LENGTHS)


def test_context_that_fits_is_that_of_the_replica_with_least_memory(ray_cluster: None, model: Path) -> None:
    """The prefill replica has memory for the whole context, the decode replica for 1,600 tokens."""
    small = {"kv_cache_memory": 1600 * TOKEN_BYTES, "max_num_batched_tokens": 256, "max_num_seqs": 4}
    pair = ({"name": "prefill"}, {"name": "decode", "engine": small | {"admission": "queue"}})
    settings = {"model.max_model_len": "auto", "model.hf_overrides": {"rope_scaling": YARN}}
    with pools.deployment(model, pair, settings) as url:
        replicas = httpx.get(f"{url}/v1/replicas", timeout=240).json()["data"]
        assert sorted(each["profile"]["max_model_len"] for each in replicas) == [1600, POSITIONS * 16]
        [card] = httpx.get(f"{url}/v1/models", timeout=240).json()["data"]
        assert card["max_model_len"] == 1600
        asked = prompt(7, 1500)
        assert_greedy(oracle(model, is_scaled=True), asked, Stream(url, asked, 100).result(), 100)
        body = {"model": "smol", "prompt": asked, "max_tokens": 101}
        refused = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
        assert refused.status_code == 400
        assert "maximum context length is 1600 tokens" in refused.json()["error"]["message"]


@SOAK
def test_crossdock_serve_has_the_tokens_of_transformers_with_the_same_overrides(model: Path, tmp_path: Path) -> None:
    flags = ("--hf-overrides", json.dumps({"rope_scaling": YARN}), "--kv-cache-memory", "64MiB", "--dtype", "float32")
    with serving(tmp_path / "log", str(model), *flags) as (server, url):
        assert_scaled(url, model)
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=240) == 0
        assert "In place of values of its config.json" in (tmp_path / "log").read_text()
