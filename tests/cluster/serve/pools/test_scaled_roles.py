"""A replica's role follows the mix of requests: the scaler decides, and no request fails."""

import threading
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.serve.pools import served_pools as pools
from tests.waiting import eventually

POOLS: tuple[dict[str, Any], ...] = ({"name": "prefill"}, {"name": "decode", "replicas": 2})
SCALING = {"flip_roles": True, "interval_s": 0.5, "up_delay_s": 1, "utilisation": 0.1}


def test_scaler_assigns_an_idle_decode_replica_to_prefill_under_prompts(
    ray_cluster: None, small_model_dir: Path
) -> None:
    """Prompts without an output keep prefill busy and decode idle. Neither pool may grow."""
    ended, failed = threading.Event(), list[str]()
    with pools.deployment(small_model_dir, POOLS, {"scaling": SCALING}) as url:

        def send(number: int) -> None:
            while not ended.is_set():
                number += 4
                body = {"model": "smol", "input": pools.prompt(number, 2000)}
                answer = httpx.post(f"{url}/v1/embeddings", json=body, timeout=120)
                if answer.status_code != 200:
                    failed.append(answer.text)

        def flips() -> list[dict[str, Any]]:
            decisions: list[dict[str, Any]] = httpx.get(f"{url}/v1/scaling", timeout=30).json()["data"]
            return [each for each in decisions if each["error"] is None and each.get("role") == "prefill"]

        clients = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(4)]
        try:
            for client in clients:
                client.start()
            flip = eventually(flips, "no role changed", 120)[0]
            before = pools.sample_of(url, "crossdock_prompt_tokens_total", flip["replica"])
            eventually(
                lambda: pools.sample_of(url, "crossdock_prompt_tokens_total", flip["replica"]) > before,
                "the replica computes no prompt in its new role",
            )
        finally:
            ended.set()
            for client in clients:
                client.join(120)
        assert flip["replica"] in pools.processes("decode")
        assert flip["role_before"] == "decode"
        assert flip["load"]["replicas"] == 1
        assert flip["load"]["demand"] > SCALING["utilisation"], "this decided it"
        assert not failed
