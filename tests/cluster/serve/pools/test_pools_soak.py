"""Prefill and decode pools under load for many minutes, while replicas are killed. Run by `make soak`."""

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.cluster.serve.pools import served_pools as pools
from tests.cluster.serve.pools.served_pools import Stream, expected, processes, prompt

KV_MEMORY = 600 << 20  # bytes


@pytest.fixture(scope="module")
def url(ray_cluster: None, model_dir: Path) -> Iterator[str]:
    with pools.deployment(model_dir, settings={"engine.kv_cache_memory": KV_MEMORY}) as address:
        yield address


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_pools_under_load_with_killed_replicas_serve_right_tokens_and_leak_no_page(url: str, model_dir: Path) -> None:
    """2,000 requests, a fifth of which leave at a random moment, while every few seconds a replica is killed: no wrong
    token, no stream hangs, no page is leaked or quarantined for good."""
    rng = random.Random(1)
    prompts = [prompt(number, rng.choice([5, 40, 300, 900])) for number in range(25)]
    wanted = expected(pools.local_engine(model_dir, KV_MEMORY), prompts)
    total = int(os.environ.get("CROSSDOCK_SOAK_REQUESTS", "2000"))
    ended, started = threading.Event(), time.monotonic()
    outcomes: Counter[str] = Counter()

    def request(number: int) -> None:
        which = number % len(prompts)
        if random.Random(number).random() < 0.2:
            body = {"model": "smol", "prompt": prompts[which], "max_tokens": 24, "stream": True, "ignore_eos": True}
            with suppress(httpx.HTTPError):
                httpx.post(f"{url}/v1/completions", json=body, timeout=random.Random(-number).uniform(0.01, 1.5))
            outcomes["left"] += 1  # or had its answer already
            return
        stream = Stream(url, prompts[which])
        stream.join(240)
        assert not stream.is_alive(), "a stream hangs"
        # Where no replica was left to continue, the client got an error, and the tokens until then were right.
        failed = stream.error is not None or len(stream.tokens) < len(wanted[which])
        assert stream.tokens == wanted[which][: len(stream.tokens) if failed else None], (
            f"{time.monotonic() - started:.0f} s: {stream.error}, {stream.tokens}, wanted {wanted[which]}, "
            f"{json.dumps(stream.timelines())}"
        )
        outcomes["failed" if failed else "served"] += 1
        if failed:
            print(f"{time.monotonic() - started:.0f} s: {stream.error}", flush=True)  # noqa: T201

    def kill_replicas() -> None:
        while not ended.wait(rng.uniform(4, 8)):
            victims = [*processes("prefill").values(), *processes("decode").values()]
            if len(victims) == 1 + pools.DECODES:  # one at a time: a replica must be left to continue
                rng.choice(victims).kill()
                outcomes["killed"] += 1
                print(f"{time.monotonic() - started:.0f} s: {dict(outcomes)}", flush=True)  # noqa: T201  # for pytest -s

    killing = threading.Thread(target=kill_replicas, daemon=True)
    killing.start()
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(request, range(total)))
    finally:
        ended.set()
        killing.join()
    assert outcomes["killed"] > 0, outcomes
    assert outcomes["served"] > 10 * outcomes["failed"], outcomes
    pools.wait_until_whole(url)
