"""Two models on two places of one machine follow the demand, from one model to the other and back; in the soak."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from crossdock.cluster.config_file import load
from tests.cluster.clients import Clients
from tests.cluster.ports import free_port
from tests.cluster.serve.pools.served_pools import deployed, processes
from tests.waiting import eventually

pytestmark = pytest.mark.soak
SCALING = {"interval_s": 0.5, "up_delay_s": 2, "zero_after_s": 60, "utilisation": 0.02, "devices": {"CPU": 2}}
CLIENTS = 6


@pytest.fixture
def url(ray_cluster: None, model_dir: Path) -> Iterator[str]:
    pool = {"name": "mixed", "replicas": 0, "max_replicas": 2, "num_cpus": 1}
    engine = {"kv_cache_memory": "200MiB", "admission": "queue"}
    models = [
        {
            "name": name,
            "model": {"path": str(model_dir)},
            "pools": [pool],
            "engine": {**engine, "max_num_seqs": streams},
        }
        for name, streams in (("day", 16), ("night", 8))
    ]
    http = {"http.port": free_port(), "http.direct": True, "http.metrics_hold_s": 0}
    with deployed(load(None, {"models": models, "scaling": SCALING, **http}), 0) as url:
        yield url


def sizes() -> tuple[int, int]:
    return len(processes("day-mixed")), len(processes("night-mixed"))


def seconds_until(holds: Callable[[], bool]) -> float:
    begun = time.monotonic()
    eventually(holds, lambda: f"sizes are {sizes()}", 280)
    return time.monotonic() - begun


def test_two_models_change_places_by_demand_and_back_without_a_failed_request(url: str) -> None:
    assert sizes() == (0, 0)
    asked = {"model": "day", "prompt": "The harbour", "max_tokens": 60, "ignore_eos": True}

    def ask(_: int) -> None:
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=300)
        assert answer.status_code == 200, answer.text

    with Clients(CLIENTS, ask) as clients:
        for model, wanted in (("day", (2, 0)), ("night", (0, 2)), ("day", (2, 0))):
            asked["model"] = model
            before = clients.num_ok
            answered = seconds_until(lambda before=before: clients.num_ok > before + CLIENTS)  # type: ignore[misc]
            moved = seconds_until(lambda wanted=wanted: sizes() == wanted)  # type: ignore[misc]
            line = f"{model}: answers after {answered:.1f} s, both replicas after {answered + moved:.1f} s\n"
            sys.stdout.write(line)
    for each in httpx.get(f"{url}/v1/scaling", timeout=240).json()["data"]:
        sys.stdout.write(f"{each['pool']}: {each['replicas_before']} to {each['replicas']}, {each['reason']}\n")
    assert not clients.problems, clients.problems[0]
