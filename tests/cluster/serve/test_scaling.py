"""On a real Ray a pool grows under load and shrinks without load, a role follows the requests, and none fails."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.clients import Clients
from tests.cluster.serve.pools import served_pools as pools
from tests.waiting import eventually

UTILISATION = 0.002  # a step of a dozen streams takes some percent of what their class allows
TOKENS = 30  # of an answer, which has one each fifteenth of a second
# An emulated device takes the seconds of its steps, and no CPU.
POOLS: tuple[dict[str, Any], ...] = ({"name": "mixed", "max_replicas": 2, "emulated": "l4-8b"},)
SETTINGS: dict[str, Any] = {
    "engine.max_num_seqs": 16,
    "model.dtype": "auto",
    "engine.kv_cache_memory": None,
    "scaling": {"interval_s": 0.5, "up_delay_s": 1, "down_delay_s": 2, "utilisation": UTILISATION},
}

FLIPPING = {"flip_roles": True, "interval_s": 0.5, "up_delay_s": 1, "utilisation": 0.1}


def num_up() -> int:
    return len(pools.processes("mixed"))


def wait_until_up(count: int) -> None:
    eventually(lambda: num_up() == count, lambda: f"{num_up()} up, not {count}")


def decisions(url: str) -> list[dict[str, Any]] | None:
    """Return the newest decisions of the scaler that runs; None while none answers."""
    answer = httpx.get(f"{url}/v1/scaling", timeout=240)
    found: list[dict[str, Any]] | None = answer.json()["data"] if answer.status_code == 200 else None
    return found


def keeps_two(holds: Callable[[], bool]) -> bool:
    """Return whether a condition holds. Meanwhile both replicas are up."""
    assert num_up() == 2, "a scaler that has just started knows nothing of the demand yet"
    return holds()


def test_pool_grows_under_load_and_shrinks_without_failing_a_request(ray_cluster: None, small_model_dir: Path) -> None:
    with pools.deployment(small_model_dir, POOLS, SETTINGS) as url:

        def ask(_: int) -> None:
            body = {"model": "smol", "prompt": "The harbour", "max_tokens": TOKENS, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == TOKENS

        with Clients(12, ask) as clients:
            wait_until_up(2)
            decision = (decisions(url) or [])[-1]
            assert (decision["pool"], decision["replicas_before"], decision["replicas"]) == ("mixed", 1, 2)
            assert decision["error"] is None
            assert decision["load"]["demand"] > UTILISATION, "this decided it"
            assert decision["load"]["streams"] > 0
            ((_, scaler),) = pools.processes("scaler").items()
            scaler.kill()
            eventually(partial(keeps_two, lambda: decisions(url) == []))  # none: another scaler has begun
            end = time.monotonic() + 4  # longer than a scaler takes to shrink a pool
            eventually(partial(keeps_two, lambda: time.monotonic() > end))
        wait_until_up(1)
    assert not clients.problems


@pytest.mark.soak  # the test above has the scaler on a real Ray, test_pools a role that changes under load
def test_scaler_assigns_an_idle_decode_replica_to_prefill_under_prompts(
    ray_cluster: None, small_model_dir: Path
) -> None:
    """Prompts without an output keep prefill busy and decode idle. Neither pool may grow."""
    with pools.deployment(small_model_dir, pools.PAIR, {"scaling": FLIPPING}) as url:

        def ask(number: int) -> None:
            body = {"model": "smol", "input": pools.prompt(number, 2000)}
            answer = httpx.post(f"{url}/v1/embeddings", json=body, timeout=240)
            assert answer.status_code == 200, answer.text

        def flips() -> list[dict[str, Any]]:
            return [each for each in decisions(url) or () if each["error"] is None and each.get("role") == "prefill"]

        with Clients(4, ask) as clients:
            flip = eventually(flips, "no role changed")[0]
            before = pools.sample_of(url, "crossdock_prompt_tokens_total", flip["replica"])
            eventually(
                lambda: pools.sample_of(url, "crossdock_prompt_tokens_total", flip["replica"]) > before,
                "the replica computes no prompt in its new role",
            )
        assert flip["replica"] in pools.processes("decode")
        assert flip["role_before"] == "decode"
        assert flip["load"]["replicas"] == 1
        assert flip["load"]["demand"] > FLIPPING["utilisation"], "this decided it"
        assert not clients.problems
