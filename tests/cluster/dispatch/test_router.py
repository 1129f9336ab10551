"""Two ingresses and several replicas, in processes of their own: both ingresses find a cached prefix, and no request is
lost while replicas come, die and are drained."""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from pydantic import ByteSize
from ray import serve
from ray._private.state import actors
from ray.serve._private.common import DeploymentID
from ray.serve.config import ProxyLocation
from ray.serve.context import _get_global_client

from crossdock.cluster.config_file import load
from crossdock.cluster.serve.app import build
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.submission import SamplingParams, Submission
from tests.cluster.ports import free_port
from tests.cluster.scraping import scrape
from tests.cluster.serve.pools.served_pools import DTYPE, Stream

APP = "router"
POISON = [499, 3, 499, 3, 498]  # tokens that end every replica that gets them


@pytest.fixture(scope="module")
def url(ray_cluster: None, small_model_dir: Path) -> Iterator[str]:
    port = free_port()
    config = load(
        None,
        {
            "model.path": str(small_model_dir),
            "model.served_name": "smol",
            "model.dtype": DTYPE,
            "model.max_model_len": 2048,
            "http.port": port,
            "http.direct": True,
            "http.replicas": 2,
            "engine.kv_cache_memory": "300MiB",
            "engine.admission": "queue",
            "engine.fault_token_ids": POISON,
            "pools.mixed.replicas": 2,
            "pools.mixed.num_cpus": 1,
        },
    )
    serve.start(proxy_location=ProxyLocation.Disabled)
    with pytest.MonkeyPatch.context() as patch:  # Serve looks for dead replicas every 10 s, by default
        patch.setattr(serve, "deployment", partial(serve.deployment, health_check_period_s=1.0))
        app = build(config)
    serve.run(app, name=APP, external_scaler_enabled=True)
    address = f"http://127.0.0.1:{port}"
    wait_for(lambda: len(replicas(address)) == 2)
    yield address
    serve.shutdown()


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def replicas(url: str) -> set[str]:
    """Return the replicas that an ingress, whichever answers, serves requests on."""
    try:
        text = scrape(url)
    except httpx.TransportError:
        return set()
    return {line.split('replica="')[1].split('"')[0] for line in text.splitlines() if 'replica="' in line}


def metric(url: str, name: str) -> float:
    """Return the sum of a metric over all ingresses."""
    lines = scrape(url).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def processes() -> list[psutil.Process]:
    """Return the processes of the replicas. Ray may list one that has just ended as alive."""
    prefix = f"SERVE_REPLICA::{APP}#mixed#"
    alive = [actor for actor in actors().values() if actor["Name"].startswith(prefix) and actor["State"] == "ALIVE"]
    return [psutil.Process(actor["Pid"]) for actor in alive if psutil.pid_exists(actor["Pid"])]


def num_running() -> int:
    """Return how many replicas Serve takes to be running: for a moment, one that has died is among them."""
    states = serve.status().applications[APP].deployments["mixed"].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


def scale(count: int) -> None:
    controller = _get_global_client()._controller
    ray.get(controller.update_deployment_replicas.remote(DeploymentID("mixed", APP), count))


def complete(url: str, prompt: list[int], max_tokens: int = 8, name: str = "", **more: Any) -> dict[str, Any]:
    """Send one request on a connection of its own, so that any ingress may get it."""
    body = {"model": "smol", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"X-Request-Id": name or os.urandom(8).hex()}
    answer = httpx.post(
        f"{url}/v1/completions", json=body | {"return_token_ids": True} | more, headers=headers, timeout=120
    )
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def served_by(url: str, name: str) -> dict[str, Any]:
    (found,) = httpx.get(f"{url}/v1/requests/{name}", timeout=30).json()["requests"]
    timeline: dict[str, Any] = found
    return timeline


def prompt(number: int, num_tokens: int) -> list[int]:
    return [(number * 977 + 31 * place * place + 7 * place) % 500 + 100 for place in range(num_tokens)]


def test_prefix_is_found_by_either_ingress(url: str) -> None:
    """Cached pages are reported to both; predicted seconds decide, also at the ingress that did not place the first."""
    homes = {}
    for number in range(4):
        complete(url, prompt(number, 600), name=f"first-{number}")
        homes[number] = served_by(url, f"first-{number}")["replica"]
    time.sleep(0.5)
    cached = metric(url, 'crossdock_router_decisions_total{reason="local cached"')
    for number in range(4):
        for again in range(4):
            name = f"again-{number}-{again}"
            complete(url, [*prompt(number, 600), again], name=name)
            timeline = served_by(url, name)
            assert timeline["replica"] == homes[number]
            assert timeline["num_cached_tokens"] == 592
    assert metric(url, 'crossdock_router_decisions_total{reason="local cached"') == cached + 16


def test_prefix_of_another_tenant_is_not_found(url: str) -> None:
    complete(url, prompt(50, 600), cache_salt="one")
    time.sleep(0.5)
    before = metric(url, 'crossdock_router_decisions_total{reason="local cached"')
    complete(url, prompt(50, 600), name="salted", cache_salt="two")
    assert served_by(url, "salted")["num_cached_tokens"] == 0
    assert metric(url, 'crossdock_router_decisions_total{reason="local cached"') == before


def test_requests_at_once_are_spread_over_replicas(url: str) -> None:
    threads = [
        threading.Thread(target=complete, args=(url, prompt(100 + number, 500)), kwargs={"name": f"spread-{number}"})
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count = Counter(served_by(url, f"spread-{number}")["replica"] for number in range(8))
    assert len(count) == 2
    assert min(count.values()) >= 2, count


def test_prediction_error_of_each_request_is_measured(url: str) -> None:
    before = metric(url, "crossdock_router_ttft_relative_error_count")
    for number in range(3):
        complete(url, prompt(200 + number, 300))
    assert metric(url, "crossdock_router_ttft_relative_error_count") == before + 3


def expected(model_dir: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the output tokens of one engine for each prompt."""
    config = EngineConfig(kv_cache_memory=ByteSize(300 << 20), admission="queue")
    oracle = Engine(load_model(ModelSpec(str(model_dir), DTYPE, max_model_len=2048)), config)
    for number, asked in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        oracle.add(Submission(f"{number}", asked, params))
    tokens: dict[str, list[int]] = {}
    while oracle.has_work:
        for delta in oracle.step().deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return [tokens[f"{number}"] for number in range(len(prompts))]


def test_poison_is_refused_after_two_replicas_and_streams_beside_it_go_on(url: str, small_model_dir: Path) -> None:
    """Two of three replicas die, the third survives. The answer asks clients not to send the request again."""
    prompts = [prompt(700 + number, 50) for number in range(4)]
    wanted = expected(small_model_dir, prompts, 300)
    scale(3)
    wait_for(lambda: len(replicas(url)) == 3)
    before = {process.pid for process in processes()}
    streams = [Stream(url, asked, 300) for asked in prompts]
    wait_for(lambda: all(len(stream.tokens) > 4 for stream in streams))
    body = {"model": "smol", "prompt": [7, 8, *POISON, 9], "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert [stream.result() for stream in streams] == wanted
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "suspect_request"
    assert answer.headers["x-should-retry"] == "false"
    wait_for(lambda: len({process.pid for process in processes()} - before) == 2)
    assert len({process.pid for process in processes()} & before) == 1
    wait_for(lambda: num_running() == 3)
    scale(2)
    wait_for(lambda: len(processes()) == len(replicas(url)) == 2)


def test_no_request_is_lost_while_replicas_come_and_go(url: str, small_model_dir: Path) -> None:
    """Under load one is added, one is killed, one is drained."""
    prompts = [prompt(300 + number, length) for number, length in enumerate([5, 40, 200, 500])]
    wanted = expected(small_model_dir, prompts, 40)
    ended = threading.Event()
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []

    def client(number: int) -> None:
        turn = number
        while not ended.is_set():
            turn += 1
            which = turn % len(prompts)
            try:
                answer = complete(url, prompts[which], 40)
            except (AssertionError, httpx.HTTPError) as error:
                wrong.append(f"{type(error).__name__}: {error}")
                continue
            got = answer["choices"][0]["token_ids"]
            if got != wanted[which]:
                wrong.append(json.dumps({"which": which, "got": got}))
            outcomes["served"] += 1

    clients = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(4)]
    for thread in clients:
        thread.start()
    try:
        for count in (3, 2, 1):
            if count == 2:
                processes()[0].kill()
                wait_for(lambda: num_running() == 2)  # else Serve may stop a live replica, and start one for the dead
            scale(count)
            served = outcomes["served"]
            wait_for(lambda count=count: len(processes()) == count)  # type: ignore[misc]
            wait_for(lambda count=count: len(replicas(url)) == count)  # type: ignore[misc]
            wait_for(lambda served=served: outcomes["served"] >= served + 8)  # type: ignore[misc]
    finally:
        ended.set()
        for thread in clients:
            thread.join(120)
    assert not wrong, wrong[:3]
    assert not any(thread.is_alive() for thread in clients), "a request hangs"
    assert outcomes["served"] >= 32
