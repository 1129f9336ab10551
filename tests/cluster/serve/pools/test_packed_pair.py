"""A checkpoint in AWQ on a real deployment: a prefill replica of two ranks and a decode replica of one.

Their tokens are those of transformers' model of the dequantised weights."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.serve.pools import served_pools as pools
from tests.cluster.serve.pools.served_pools import Stream, assert_streams_greedy, prompt
from tests.workers.architectures import build
from tests.workers.quantised import CASES, pack

POOLS: tuple[dict[str, Any], ...] = ({"name": "prefill", "tensor_parallel_size": 2}, {"name": "decode"})
SIZES = {"vocab_size": 640, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 96}


@pytest.mark.soak  # test_packed_checkpoints has packed weights on ranks, test_divided_pair pools
def test_packed_weights_on_pools_and_ranks_give_the_tokens_of_the_dequantised_model(
    ray_cluster: None, tmp_path: Path, tokenizers: dict[str, Any]
) -> None:
    tokenizers["byte_level"].save_pretrained(tmp_path)
    oracle = pack(tmp_path, CASES["awq"], build("llama", SIZES | {"max_position_embeddings": 4096}))
    settings = {"engine.kv_cache_memory": "150MiB", "engine.max_num_batched_tokens": 128, "transfer.deadline_s": 30}
    with pools.deployment(tmp_path, POOLS, settings) as url:
        streams = [Stream(url, prompt(number, length)) for number, length in enumerate((16, 130, 300))]
        assert_streams_greedy(oracle, streams)
        replicas = httpx.get(f"{url}/v1/replicas", timeout=240).json()["data"]
    plain = sum(parameter.nbytes for parameter in oracle.parameters())
    held = sorted(replica["machine"]["weights"] for replica in replicas)
    assert held[0] < held[1] < 0.4 * plain, "packed, and divided among ranks"
