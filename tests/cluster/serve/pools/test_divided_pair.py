"""A prefill and a decode replica of two ranks each, divided in different ways, beside a replica of one rank: the tokens
of one rank, and a rank's death or hang ends its replica alone."""

import copy
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from crossdock.cluster.serve.rollouts import push_weights
from tests.cluster.serve.pools import served_pools as pools
from tests.cluster.serve.pools.served_pools import Stream, actors, assert_greedy, assert_streams_greedy, prompt, samples
from tests.sweeps import rest_in_soak
from tests.waiting import eventually

POOLS: tuple[dict[str, Any], ...] = (
    {"name": "prefill", "tensor_parallel_size": 2},
    {"name": "decode", "pipeline_parallel_size": 2, "rank_timeout_s": 10},
    {"name": "mixed"},
)
PAGE_BYTES = 4 * 2 * 2 * 64 * 16 * 4  # of all ranks: layers, heads, keys and values, their size, tokens, bytes of one


@pytest.fixture(scope="module")
def url(ray_cluster: None, small_model_dir: Path) -> Iterator[str]:
    settings = {
        "engine.kv_cache_memory": "150MiB",
        "engine.max_num_batched_tokens": 128,
        "transfer.deadline_s": 30,
        "http.rollouts": True,
        "router.policy": "round-robin",  # by predicted time the replica of one rank, faster here, would get all
    }
    with pools.deployment(small_model_dir, POOLS, settings) as address:
        yield address


@pytest.fixture(scope="module")
def oracle(small_model_dir: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(small_model_dir, dtype=torch.float32)
    return model


def test_prompts_shipped_between_divided_replicas_have_the_tokens_of_one_rank(
    url: str, oracle: PreTrainedModel
) -> None:
    """Prompts of less than a page to several chunks, twice, so that either side also begins with cached pages."""
    prompts = [prompt(number, length) for number, length in enumerate((1, 16, 40, 130, 300, 513))]
    streams: list[list[Stream]] = []
    for _ in range(4):  # about two of them come to the pair
        streams.append([Stream(url, tokens) for tokens in prompts])
        assert_streams_greedy(oracle, streams[-1])
    pools.wait_until_whole(url)
    for replica in httpx.get(f"{url}/v1/replicas", timeout=240).json()["data"]:
        assert replica["profile"]["page_bytes"] == PAGE_BYTES
    legs = [leg for turn in streams for stream in turn for leg in stream.timelines() if leg["transfers"]]
    assert any(leg["num_cached_tokens"] for leg in legs), "the pair begins with cached pages"
    transfers = [transfer for leg in legs for transfer in leg["transfers"]]
    for transfer in transfers:
        assert transfer["outcome"] in ("shipped", "arrived")
        assert transfer["num_bytes"] == transfer["num_pages"] * PAGE_BYTES
    moved = sum(transfer["num_bytes"] for transfer in transfers)
    assert transferred(url, "sent") == transferred(url, "received") >= moved / 2 > 0


def transferred(url: str, direction: str) -> float:
    """Return the bytes that replicas with such transfers count. A scrape omits a replica that is too busy."""
    name = f'crossdock_transfer_bytes_total{{direction="{direction}"'
    return eventually(lambda: sum(samples(url, name).values()))


@pytest.mark.parametrize("harm", rest_in_soak([signal.SIGKILL, signal.SIGSTOP], signal.SIGSTOP))
def test_rank_lost_under_load_ends_its_replica_alone(url: str, oracle: PreTrainedModel, harm: signal.Signals) -> None:
    """By kill -9, and by a hang. Its requests go on elsewhere, token for token; a new replica comes up whole; no
    process is left behind."""
    prompts = [prompt(number + 40 * (harm is signal.SIGSTOP), 100 + 20 * number) for number in range(12)]
    (replica, driver), (rank, follower) = pools.driver_and_follower("decode")
    followers = actors("Rank").keys()
    (name,) = pools.processes("decode")
    streams = [Stream(url, tokens, 200) for tokens in prompts]
    eventually(lambda: sum(len(stream.tokens) > 5 for stream in streams) >= 10)
    assert pools.sample_of(url, "crossdock_output_tokens_total", name) > 0
    follower.send_signal(harm)
    assert_streams_greedy(oracle, streams)
    assert any(len(stream.timelines()) > 0 for stream in streams)
    _, alive = psutil.wait_procs([driver, follower], timeout=240)
    assert not alive, json.dumps([process.cmdline() for process in alive])
    eventually(lambda: len(actors("Rank")) == 2 and pools.processes("decode"))
    pools.wait_until_whole(url)
    assert followers - actors("Rank").keys() == {rank}, "the ranks of the other replica go on"
    assert replica not in actors("SERVE_REPLICA")
    assert_streams_greedy(oracle, [Stream(url, prompt(99, 50), 50) for _ in range(4)])


def test_pushed_weights_are_those_of_all_ranks_and_those_of_a_rank_that_was_lost(
    url: str, oracle: PreTrainedModel
) -> None:
    """Each rank reads its part from Ray's object store. A replica that loses a rank restarts with the weights of the
    start, and gets no request until the next push."""
    before = {name: tensor.clone() for name, tensor in oracle.named_parameters()}
    other = copy.deepcopy(oracle)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    asked = prompt(200, 60)

    def answers(count: int) -> list[list[int]]:
        return [stream.result() for stream in [Stream(url, asked) for _ in range(count)]]

    [old] = answers(1)
    assert push_weights(other.named_parameters(), "other", app_name=pools.APP) == "other"
    for tokens in answers(6):
        assert tokens != old
        assert_greedy(other, asked, tokens, 24)
    (name,) = pools.processes("decode")
    (_, driver), (_, follower) = pools.driver_and_follower("decode")
    follower.kill()
    psutil.wait_procs([driver], timeout=240)
    for tokens in answers(6):
        assert_greedy(other, asked, tokens, 24)

    def versions() -> dict[str, float] | None:
        """Return the number of each replica's weights, once all three answer."""
        found = samples(url, "crossdock_weight_version")
        return found if len(found) == 3 and name not in found else None

    assert sorted(eventually(versions).values()) == [0, 1, 1]
    assert push_weights(before.items(), "before", app_name=pools.APP) == "before"
    assert set(eventually(versions).values()) == {2}
    for tokens in answers(6):
        assert_greedy(oracle, asked, tokens, 24)
