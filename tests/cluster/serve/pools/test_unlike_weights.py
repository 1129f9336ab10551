"""A fleet with weights in two formats on a real deployment: plain ones and FP8.

Each stream has the tokens of one format alone, by transformers' models of both: also where its replica is killed, and
where an upgrade replaces one format with the other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from transformers import PreTrainedModel

from crossdock.cluster.serve.app import application
from tests.cluster.serve.pools import served_pools as pools
from tests.cluster.serve.pools.served_pools import Stream, assert_greedy, prompt
from tests.waiting import eventually
from tests.workers.architectures import build
from tests.workers.quantised import CASES, pack

SIZES = {"vocab_size": 640, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
SETTINGS = {"engine.kv_cache_memory": "100MiB", "router.policy": "round-robin", "router.shipping": "auto"}
LENGTH = 300  # tokens of an output: a stream lives while replicas come and go


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory, tokenizers: dict[str, Any]) -> dict[str, Any]:
    """Write a model as it is and in FP8. Return both folders, and transformers' models of both, by name."""
    plain, fp8 = (tmp_path_factory.mktemp(name) for name in ("plain", "fp8"))
    sizes = SIZES | {"max_position_embeddings": 4096}
    module = build("llama", sizes)
    module.save_pretrained(plain)
    oracle = pack(fp8, CASES["compressed-tensors fp8"], build("llama", sizes))
    for folder in (plain, fp8):
        tokenizers["byte_level"].save_pretrained(folder)
    return {"plain": module, "fp8": oracle, "folders": (plain, fp8)}


@pytest.fixture(scope="module")
def url(ray_cluster: None, oracles: dict[str, Any]) -> Iterator[str]:
    plain, fp8 = oracles["folders"]
    with pools.deployment(plain, two_formats(fp8), SETTINGS) as url:
        yield url


def two_formats(fp8: Path) -> tuple[dict[str, Any], ...]:
    return ({"name": "plain", "replicas": 2}, {"name": "fp8", "replicas": 2, "checkpoint": str(fp8)})


def began(url: str, count: int, first: int) -> list[tuple[list[int], Stream]]:
    """Return so many prompts and their streams, each of which has some tokens."""
    prompts = [prompt(first + number, 40 + number) for number in range(count)]
    streams = [Stream(url, tokens, LENGTH) for tokens in prompts]
    eventually(lambda: all(len(stream.tokens) > 5 for stream in streams), lambda: [each.error for each in streams])
    return list(zip(prompts, streams, strict=True))


def format_of(oracles: dict[str, Any], asked: list[int], tokens: list[int]) -> str:
    """Return the format that made all tokens of an output. AssertionError: neither did."""
    found = []
    for name in ("plain", "fp8"):
        oracle: PreTrainedModel = oracles[name]
        try:
            assert_greedy(oracle, asked, tokens, LENGTH)
        except AssertionError:
            continue
        found.append(name)
    assert len(found) == 1, found
    return found[0]


# In every run, tests/router/test_unlike_weights has the choice of a replica, and test_losses a stream that waits for a
# replica of its own weights.
@pytest.mark.soak
def test_stream_of_a_killed_replica_goes_on_with_its_own_weights(url: str, oracles: dict[str, Any]) -> None:
    running = began(url, 9, 0)
    (name, victim), *_ = pools.processes("fp8").items()
    assert pools.sample_of(url, "crossdock_output_tokens_total", name) > 0
    victim.kill()
    formats = [format_of(oracles, asked, stream.result()) for asked, stream in running]
    assert set(formats) == {"plain", "fp8"}
    pools.wait_until_whole(url, 4)
    replicas = httpx.get(f"{url}/v1/replicas", timeout=240).json()["data"]
    weights = {(each["pool"], each["profile"]["weights"]) for each in replicas}
    assert len(weights) == len({name for _, name in weights}) == 2, "equal in a pool, and unlike in two"


@pytest.mark.soak  # test_upgrade has the upgrade, the test above streams that keep their format
def test_upgrade_to_another_format_changes_no_running_stream(url: str, oracles: dict[str, Any]) -> None:
    """The plain pool becomes FP8 while streams run; each ends in the format in which it began."""
    _, fp8 = oracles["folders"]
    running = began(url, 6, 20)
    port = int(url.rpartition(":")[2])
    config = pools.config_of(fp8, port, two_formats(fp8), SETTINGS)
    serve.run(application(config), name=pools.APP, external_scaler_enabled=True)
    formats = [format_of(oracles, asked, stream.result()) for asked, stream in running]
    assert "plain" in formats
    pools.wait_until_whole(url, 4)
    after = [format_of(oracles, asked, stream.result()) for asked, stream in began(url, 3, 40)]
    assert after == ["fp8"] * 3
