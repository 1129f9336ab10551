"""A pool grows under load and shrinks without load, on a real Ray, and no request fails."""

import threading
import time
from pathlib import Path

import httpx
import ray
from ray import serve
from ray.serve.config import ProxyLocation

from crossdock.cluster.config_file import load
from crossdock.cluster.serve.app import build
from tests.cluster.ports import free_port
from tests.waiting import eventually

APP = "elastic"


def num_up(pool: str) -> int:
    prefix = f"SERVE_REPLICA::{APP}#{pool}#"
    actors = ray._private.state.actors().values()
    return sum(actor["Name"].startswith(prefix) and actor["State"] == "ALIVE" for actor in actors)


def kill_scaler() -> None:
    """Kill the scaler's process. Serve starts another."""
    prefix = f"SERVE_REPLICA::{APP}#scaler#"
    actors = ray._private.state.actors().values()
    (name,) = [a["Name"] for a in actors if a["Name"].startswith(prefix) and a["State"] == "ALIVE"]
    ray.kill(ray.get_actor(name, namespace="serve"))


def wait_until_up(pool: str, count: int) -> None:
    eventually(lambda: num_up(pool) == count, lambda: f"{num_up(pool)} up, not {count}", 180)


def test_pool_grows_under_load_and_shrinks_without_failing_a_request(ray_cluster: None, small_model_dir: Path) -> None:
    port = free_port()
    config = load(
        None,
        {
            "model.path": str(small_model_dir),
            "model.served_name": "smol",
            "model.max_model_len": 2048,
            "http.port": port,
            "http.direct": True,
            "engine.kv_cache_memory": "200MiB",
            "engine.max_num_seqs": 16,
            "scaling": {"interval_s": 0.5, "up_delay_s": 1, "down_delay_s": 2, "utilisation": 0.02},
            "pools": [{"name": "mixed", "max_replicas": 2}],
        },
    )
    serve.start(proxy_location=ProxyLocation.Disabled)
    serve.run(build(config), name=APP, external_scaler_enabled=config.is_elastic)
    ended, failed = threading.Event(), []

    def keep_busy() -> None:
        body = {"model": "smol", "prompt": "The harbour", "max_tokens": 100, "ignore_eos": True}
        while not ended.is_set():
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
            if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != 100:
                failed.append(answer.text)

    wait_until_up("mixed", 1)
    clients = [threading.Thread(target=keep_busy, daemon=True) for _ in range(12)]
    try:
        for client in clients:
            client.start()
        wait_until_up("mixed", 2)  # a step of a dozen streams takes some percent of the time that their class allows
        decision = httpx.get(f"http://127.0.0.1:{port}/v1/scaling", timeout=30).json()["data"][-1]
        assert (decision["pool"], decision["replicas_before"], decision["replicas"]) == ("mixed", 1, 2)
        assert decision["error"] is None
        assert decision["load"]["demand"] > config.scaling.utilisation, "this decided it"
        assert decision["load"]["streams"] > 0
        kill_scaler()
        end = time.monotonic() + 8  # longer than a new scaler takes to start, and to shrink a pool
        while time.monotonic() < end:
            assert num_up("mixed") == 2, "a scaler that has just started knows nothing of the demand yet"
            time.sleep(0.1)
        ended.set()
        for client in clients:
            client.join(120)
        wait_until_up("mixed", 1)
    finally:
        ended.set()
        serve.shutdown()
        wait_until_serve_has_ended()
    assert not failed


def wait_until_serve_has_ended() -> None:
    """Wait for the end of Serve's controller, or the next module would deploy to one that is about to end."""

    def has_ended() -> bool:
        try:
            ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        except ValueError:
            return True
        return False

    eventually(has_ended, "Serve does not end")
