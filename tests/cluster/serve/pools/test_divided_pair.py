"""A prefill and a decode replica of two ranks each, divided in different ways, served as one deployment."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from ray import serve
from ray.serve.config import ProxyLocation
from transformers import AutoModelForCausalLM

from crossdock.cluster.config_file import load
from crossdock.cluster.serve.app import build
from tests.cluster.ports import free_port
from tests.cluster.serve.pools.served_pools import (
    Stream,
    assert_greedy,
    prompt,
    samples,
    wait_until_up,
    wait_until_whole,
)
from tests.waiting import eventually

CHUNK = 128  # tokens of a step at most
PAGE_BYTES = 10 * 2 * 2 * 96 * 16 * 4  # of all ranks: layers, heads, keys and values, their size, tokens, bytes of one


@pytest.fixture(scope="module")
def url(ray_cluster: None, small_model_dir: Path) -> Iterator[str]:
    """Deploy `--pools prefill=1xtp2,decode=1xpp2`, and yield the URL of the API."""
    port = free_port()
    config = load(
        None,
        {
            "model.path": str(small_model_dir),
            "model.served_name": "smol",
            "model.dtype": "float32",
            "http.port": port,
            "http.direct": True,
            "engine.kv_cache_memory": "150MiB",
            "engine.max_num_batched_tokens": CHUNK,
            "engine.admission": "queue",
            "router.shipping": "always",
            "transfer.transport": os.environ.get("CROSSDOCK_TEST_TRANSPORT", "auto"),
            "pools": [
                {"name": "prefill", "tensor_parallel_size": 2},
                {"name": "decode", "pipeline_parallel_size": 2},
            ],
        },
    )
    serve.start(proxy_location=ProxyLocation.Disabled)
    serve.run(build(config), name="divided")
    address = f"http://127.0.0.1:{port}"
    wait_until_up(address, 2)
    yield address
    serve.shutdown()


def test_prompts_shipped_between_divided_replicas_have_the_tokens_of_one_rank(url: str, small_model_dir: Path) -> None:
    """Prompts of less than a page to several chunks, twice, so that either side also begins with cached pages."""
    oracle = AutoModelForCausalLM.from_pretrained(small_model_dir, dtype=torch.float32)
    prompts = [prompt(number, length) for number, length in enumerate((1, 16, 40, 130, 300, 513))]
    for _ in range(2):
        with ThreadPoolExecutor(len(prompts)) as threads:
            streams = list(threads.map(lambda tokens: Stream(url, tokens), prompts))
        for asked, stream in zip(prompts, streams, strict=True):
            assert_greedy(oracle, asked, stream.result(), 24)
    wait_until_whole(url, 2)
    for replica in httpx.get(f"{url}/v1/replicas", timeout=30).json()["data"]:
        assert replica["profile"]["page_bytes"] == PAGE_BYTES
    moved = 0
    for stream in streams:
        for leg in stream.timelines():
            for transfer in leg["transfers"]:
                assert transfer["outcome"] in ("shipped", "arrived")
                assert transfer["num_bytes"] == transfer["num_pages"] * PAGE_BYTES
                moved += transfer["num_bytes"]
    assert moved > 0
    assert transferred(url, "sent") == transferred(url, "received") > moved / 2


def transferred(url: str, direction: str) -> float:
    """Return the bytes that the one replica with such transfers counts. A scrape omits a replica that is too busy."""
    (counted,) = eventually(lambda: samples(url, f'crossdock_transfer_bytes_total{{direction="{direction}"')).values()
    return counted
