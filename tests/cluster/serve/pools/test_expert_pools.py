"""Pools whose ranks hold whole experts, beside a replica of one rank: the tokens of the dequantised model, also when a
rank is killed in the middle of streams, while experts move between ranks.

The experts are packed in groups that slices would divide, so that ranks with slices would not start.
"""

from pathlib import Path
from typing import Any

import httpx
import pytest

from crossdock.cluster.serve.summary import summary
from tests.cluster.serve.pools import served_pools as pools
from tests.cluster.serve.pools.served_pools import Stream, assert_streams_greedy, prompt
from tests.workers.model.weights.test_packed_checkpoints import write_experts
from tests.workers.quantised import CASES

WHOLE = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "rank_timeout_s": 10}
MOVING = {  # experts move between ranks, and have copies, while streams run
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 2, "window_size": 20, "step_interval": 20},
}
POOLS: tuple[dict[str, Any], ...] = (
    {"name": "prefill", **WHOLE},
    {"name": "decode", **WHOLE, **MOVING},
    {"name": "mixed"},
)
SIZES = {"vocab_size": 640, "hidden_size": 128, "max_position_embeddings": 4096}


# In every run, test_expert_choice has ranks that choose, and test_summary the lines.
@pytest.mark.soak
def test_start_without_a_word_on_experts_says_both_ways_and_serves_by_one(
    ray_cluster: None, tmp_path: Path, tokenizers: dict[str, Any]
) -> None:
    oracle = write_experts(tmp_path, CASES["awq"], **SIZES).eval()
    tokenizers["byte_level"].save_pretrained(tmp_path / "plain")
    with pools.deployment(tmp_path / "plain", ({"name": "mixed", "tensor_parallel_size": 2},), {}) as url:
        replicas = httpx.get(f"{url}/v1/replicas", timeout=240).raise_for_status().json()["data"]
        lines = [line for line in summary(replicas) if line.startswith("Experts: ")]
        assert [line.split()[1] for line in lines] == ["slices:", "whole:"]
        assert all(" MiB a rank; measured " in line for line in lines)
        assert sum(line.endswith(": chosen") for line in lines) == 1
        assert_streams_greedy(oracle, [Stream(url, prompt(0, 40))])


# In every run, test_worker_group_experts and test_moving_experts have the tokens, and test_divided_pair a rank that is
# lost.
@pytest.mark.soak
def test_ranks_with_whole_experts_in_pools_have_the_tokens_of_one_rank_when_a_rank_is_killed(
    ray_cluster: None, tmp_path: Path, tokenizers: dict[str, Any]
) -> None:
    oracle = write_experts(tmp_path, CASES["awq"], 96, **SIZES).eval()
    tokenizers["byte_level"].save_pretrained(tmp_path / "packed")
    settings = {"engine.max_num_batched_tokens": 128, "transfer.deadline_s": 30, "router.policy": "round-robin"}
    with pools.deployment(tmp_path / "packed", POOLS, settings) as url:
        streams = [Stream(url, prompt(number, length)) for number, length in enumerate((16, 40, 130, 300))]
        assert_streams_greedy(oracle, streams)
        legs = [leg for stream in streams for leg in stream.timelines() if leg["transfers"]]
        assert any(transfer["num_bytes"] for leg in legs for transfer in leg["transfers"]), "prompts are shipped"
        pools.wait_until_whole(url, 3)
        pools.lose_rank_in_mid_stream(url, oracle)
