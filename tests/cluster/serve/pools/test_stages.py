"""Pools whose replicas are all of two pipeline stages, over HTTP: a mixture of experts has the tokens of transformers,
within one replica and shipped from stages to stages, also when a stage is killed in mid-stream."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.cluster.serve.pools import served_pools as pools
from tests.cluster.serve.pools.served_pools import Stream, assert_streams_greedy, prompt
from tests.workers.architectures import SERVED, build

STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "rank_timeout_s": 10}
POOLS: tuple[dict[str, Any], ...] = tuple({"name": name, **STAGES} for name in ("prefill", "decode", "mixed"))
KINDS = ["qwen3_moe", "gemma3_text", "deepseek_v3"]  # experts; windows, whose pages are other groups; latents
SIZES = {"vocab_size": 640, "hidden_size": 96, "max_position_embeddings": 4096}


# In every run, test_divided_pair has a replica of two stages that loses one, and tests/workers/replica/ranks has the
# tokens of stages.
@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_stages_over_http_have_the_tokens_of_transformers_also_when_a_stage_is_killed(
    ray_cluster: None, tmp_path: Path, tokenizers: dict[str, Any], kind: str
) -> None:
    tokenizers["byte_level"].save_pretrained(tmp_path)
    module = build(kind, SERVED[kind] | SIZES | {"eos_token_id": tokenizers["byte_level"].eos_token_id})
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)  # else streams repeat one token
    module.save_pretrained(tmp_path)
    oracle: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    settings = {"engine.max_num_batched_tokens": 128, "transfer.deadline_s": 30, "router.policy": "round-robin"}
    with pools.deployment(tmp_path, POOLS, settings) as url:
        replicas = httpx.get(f"{url}/v1/replicas", timeout=240).raise_for_status().json()["data"]
        assert [each["profile"]["pipeline_parallel_size"] for each in replicas] == [2, 2, 2]
        prompts = [prompt(number, length) for number, length in enumerate((1, 16, 40, 130, 300, 513))]
        for _ in range(2):  # each prompt comes to the pair and to the mixed replica, or finds cached pages there
            streams = [Stream(url, tokens) for tokens in prompts]
            assert_streams_greedy(oracle, streams)
        legs = [leg for stream in streams for leg in stream.timelines()]
        assert any(transfer["num_bytes"] for leg in legs for transfer in leg["transfers"]), "prompts are shipped"
        assert any(not leg["transfers"] for leg in legs), "prompts stay on the mixed replica"
        pools.wait_until_whole(url, 3)
        pools.lose_rank_in_mid_stream(url, oracle)
        pools.wait_until_whole(url, 3)
