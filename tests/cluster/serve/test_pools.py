"""Prompts on one replica, tokens on others, in processes of their own: the same tokens, whoever is killed when.

Pages travel by NIXL where it is installed; CROSSDOCK_TEST_TRANSPORT=tcp runs all of it over plain TCP.
"""

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ByteSize
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.config import ProxyLocation

from crossdock.cluster.config import load
from crossdock.cluster.serve.app import build
from crossdock.workers.model.model import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine import Engine
from crossdock.workers.schedule.request import SamplingParams, Submission
from tests.cluster.deploy.test_manifests import expressions
from tests.cluster.ports import free_port

APP = "pools"
DECODES = 2


@pytest.fixture(scope="module")
def url(ray_cluster: None, model_dir: Path) -> Iterator[str]:
    port = free_port()
    config = load(
        None,
        {
            "model.path": str(model_dir),
            "model.served_name": "smol",
            "model.max_model_len": 4096,
            "http.port": port,
            "http.direct": True,
            "engine.kv_cache_memory": "300MiB",
            "engine.max_num_batched_tokens": 256,
            "engine.admission": "queue",
            "router.shipping": "always",  # else what is better here and now: what is tested is that it is invisible
            "transfer.transport": os.environ.get("CROSSDOCK_TEST_TRANSPORT", "auto"),
            "transfer.deadline_s": 4,
            "transfer.grace_s": 0.2,
            "pools": [{"name": "prefill"}, {"name": "decode", "replicas": DECODES}],
        },
    )
    serve.start(proxy_location=ProxyLocation.Disabled)
    serve.run(build(config), name=APP, external_scaler_enabled=True)
    address = f"http://127.0.0.1:{port}"
    wait_until_whole(address)
    yield address
    serve.shutdown()  # not the application alone: the next module starts Serve with a proxy


@pytest.fixture(scope="module")
def local(model_dir: Path) -> Engine:
    """The oracle: the same model on one engine, which the other tests compare with transformers' own generate."""
    config = EngineConfig(kv_cache_memory=ByteSize(300 << 20), admission="queue", enable_prefix_caching=False)
    return Engine(load_model(ModelSpec(str(model_dir), max_model_len=4096)), config)


def expected(engine: Engine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(ignore_eos=True, **({"temperature": 0.0, "max_tokens": 24} | params))
        engine.add(Submission(f"{number}", prompt, sampling))
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return [tokens[f"{number}"] for number in range(len(prompts))]


def prompt(number: int, num_tokens: int) -> list[int]:
    return [(number * 977 + 31 * place * place + 7 * place) % 40_000 + 100 for place in range(num_tokens)]


class Stream(threading.Thread):
    """One streaming request; `tokens` grows as they come."""

    def __init__(self, url: str, prompt: list[int], max_tokens: int = 24, name: str = "", **params: Any) -> None:
        super().__init__(daemon=True)
        self.body = {"model": "smol", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self.body |= {"temperature": 0, "return_token_ids": True, "logprobs": 0} | params
        self.url, self.request_id = url, name or os.urandom(8).hex()
        self.tokens: list[int] = []
        self.error: str | None = None
        self.start()

    def run(self) -> None:
        headers = {"X-Request-Id": self.request_id}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=self.body, headers=headers, timeout=120) as answer:
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if not data.startswith("{"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    self.error = event["error"]["message"]
                for choice in event.get("choices", ()):
                    self.tokens += choice.get("token_ids") or ()

    def result(self) -> list[int]:
        self.join(120)
        assert not self.is_alive(), "the stream hangs"
        assert self.error is None, self.error
        return self.tokens

    def timelines(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/v1/requests/{self.request_id}", timeout=30)
        found: list[dict[str, Any]] = answer.json()["requests"] if answer.status_code == 200 else []
        return found


def samples(url: str, name: str) -> dict[str, float]:
    """A metric's value at each replica."""
    found = {}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        if line.startswith(name) and 'replica="' in line:
            found[line.split('replica="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
    return found


def sample_of(url: str, name: str, replica: str) -> float:
    """A metric's value at one replica, which a scrape may leave out while it is too busy to answer in time."""
    deadline = time.monotonic() + 60
    while (found := samples(url, name).get(replica)) is None:
        assert time.monotonic() < deadline, f"{replica} does not answer"
    return found


def ingress_sample(url: str, name: str) -> float:
    (line,) = (it for it in httpx.get(f"{url}/metrics", timeout=30).text.splitlines() if it.startswith(name + "{"))
    return float(line.rsplit(" ", 1)[1])


def wait_until_whole(url: str) -> None:
    """All replicas are up, and nobody owns a page."""
    deadline = time.monotonic() + 180
    while True:
        try:
            owned = samples(url, 'crossdock_pages{state="owned"')
            quarantined = samples(url, 'crossdock_pages{state="quarantined"')
        except httpx.TransportError:
            owned = quarantined = {}
        if len(owned) == 1 + DECODES and not sum(owned.values()) and not sum(quarantined.values()):
            return
        assert time.monotonic() < deadline, f"owned {owned}, quarantined {quarantined}"
        time.sleep(0.2)


def processes(pool: str) -> dict[str, psutil.Process]:
    """The replicas of a pool that are alive, by name."""
    prefix = f"SERVE_REPLICA::{APP}#{pool}#"
    actors = ray._private.state.actors().values()
    alive = [actor for actor in actors if actor["Name"].startswith(prefix) and actor["State"] == "ALIVE"]
    return {actor["Name"].removeprefix(prefix): psutil.Process(actor["Pid"]) for actor in alive}


def until_arriving(stream: Stream) -> tuple[str, int]:
    """The decode replica that has some of the stream's prompt but not all, and how much, in tokens."""
    decodes = processes("decode")
    while True:
        for timeline in stream.timelines():
            if timeline["replica"] in decodes and 0 < timeline["num_computed_tokens"] < timeline["num_prompt_tokens"]:
                return timeline["replica"], timeline["num_computed_tokens"]
        assert stream.is_alive(), "it ended before it was caught on the way"


def scale(pool: str, replicas: int) -> None:
    """Sets how many replicas a pool has, and waits until those that are too many have drained and ended."""
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(pool, APP), replicas))
    deadline = time.monotonic() + 120
    while len(processes(pool)) != replicas:
        assert time.monotonic() < deadline, f"{pool} still has {list(processes(pool))}"
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def _whole_before_and_after(url: str) -> Iterator[None]:
    yield
    wait_until_whole(url)


def test_placement_is_invisible(url: str, local: Engine) -> None:
    """50 prompts of a token to some 1,200, half of them twice, so that both sides find pages cached; greedy."""
    lengths = [1, 15, 16, 17, 40, 100, 255, 256, 257, 300, 500, 700, 1200]
    prompts = [prompt(number, lengths[number % 13] + number // 13) for number in range(50)]
    wanted = expected(local, prompts)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda it: Stream(url, it).result(), prompts)) == wanted
        assert list(pool.map(lambda it: Stream(url, it).result(), prompts[::2])) == wanted[::2]
    everyone = [*processes("prefill"), *processes("decode")]
    assert len(everyone) == 1 + DECODES
    assert all(sample_of(url, "crossdock_output_tokens_total", name) > 0 for name in everyone)


def test_sampling_is_the_same_by_either_way(url: str, local: Engine) -> None:
    prompts = [prompt(number, 300) for number in range(6)]
    params = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1}
    assert [Stream(url, it, **params).result() for it in prompts] == expected(local, prompts, **params)


@pytest.mark.parametrize("stage", ["at once", "on the way", "decoding"])
def test_a_client_that_leaves(url: str, stage: str) -> None:
    for number in range(4):
        body = {"model": "smol", "prompt": prompt(100 + number, 1500), "max_tokens": 500, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=60) as answer:
            if stage == "decoding":
                lines = answer.iter_lines()
                for _ in range(6):
                    next(lines)
            elif stage == "on the way":
                time.sleep(0.4 + 0.3 * number)
    wait_until_whole(url)


def test_the_prefill_replica_is_killed_on_the_way(url: str, local: Engine) -> None:
    """Decode goes on from its frontier: what had arrived is not computed again."""
    asked = prompt(61, 2500)  # of which nobody has a page
    (wanted,) = expected(local, [asked])
    before = {name: sample_of(url, "crossdock_prompt_tokens_total", name) for name in processes("decode")}
    stream = Stream(url, asked)
    replica, arrived = until_arriving(stream)
    (victim,) = processes("prefill").values()
    victim.kill()
    assert stream.result() == wanted
    computed = sample_of(url, "crossdock_prompt_tokens_total", replica) - before[replica]
    assert 0 < computed <= len(asked) - arrived


@pytest.mark.parametrize("stage", ["before the first token", "in mid-stream"])
def test_a_decode_replica_is_killed(url: str, local: Engine, stage: str) -> None:
    """Another takes over, from the pages that prefill still has; nothing is repeated, nothing changed."""
    asked = prompt(62 + len(stage), 1500)
    (wanted,) = expected(local, [asked], max_tokens=120)
    everyone = [*processes("prefill"), *processes("decode")]
    before = {name: sample_of(url, "crossdock_prompt_tokens_total", name) for name in everyone}
    stream = Stream(url, asked, 120)
    replica, _ = until_arriving(stream)
    if stage == "in mid-stream":
        while len(stream.tokens) < 20:
            time.sleep(0.005)
            assert stream.is_alive()
    processes("decode")[replica].kill()
    assert stream.result() == wanted
    left = [name for name in everyone if name != replica]
    computed = sum(sample_of(url, "crossdock_prompt_tokens_total", name) - before[name] for name in left)
    assert computed < len(asked) + 120 + 2 * 256, json.dumps(stream.timelines(), indent=1)  # not twice


def test_a_hung_prefill_replica(url: str, local: Engine) -> None:
    """SIGSTOP: nobody knows that it will not go on. After the deadline decode does without; when the other wakes up,
    what it still writes hits quarantined pages."""
    asked = prompt(65, 2500)
    (wanted,) = expected(local, [asked])
    stream = Stream(url, asked)
    until_arriving(stream)
    (victim,) = processes("prefill").values()
    victim.send_signal(signal.SIGSTOP)
    try:
        assert stream.result() == wanted
        assert sum(samples(url, 'crossdock_pages{state="quarantined"').values()) > 0
    finally:
        victim.send_signal(signal.SIGCONT)


def test_a_role_flips_without_a_restart(url: str, local: Engine) -> None:
    """A decode replica computes prompts for the other one, then decodes again; the tokens stay the same."""
    prompts = [prompt(80 + number, 400) for number in range(8)]
    wanted = expected(local, prompts)
    name = min(processes("decode"))
    handle = serve.get_deployment_handle("decode", APP)
    handle._init()
    sent = 'crossdock_transfers_total{direction="sent",outcome="shipped"'
    for role, does_send in (("prefill", True), ("decode", False)):
        deadline = time.monotonic() + 10
        while True:  # the handle has to hear of its replicas first
            try:
                handle.options(session_id=name).assign_role.remote(role).result()
                break
            except RuntimeError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        before = samples(url, sent).get(name, 0.0)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda it: Stream(url, it).result(), prompts)) == wanted
        assert (samples(url, sent).get(name, 0.0) > before) is does_send


def test_a_decode_replica_drains(url: str, local: Engine) -> None:
    """It takes nothing new, and ends when the streams it has are done; none of them is moved or computed twice."""
    prompts = [prompt(70 + number, 600) for number in range(4)]
    wanted = expected(local, prompts, max_tokens=150)
    placed_again = ingress_sample(url, "crossdock_ingress_placed_again_total")
    streams = [Stream(url, asked, 150) for asked in prompts]
    while not all(stream.tokens for stream in streams):
        time.sleep(0.01)
    try:
        scale("decode", 1)
        late = Stream(url, prompts[0], 150)
        assert [stream.result() for stream in streams] == wanted
        assert late.result() == wanted[0]
        assert ingress_sample(url, "crossdock_ingress_placed_again_total") == placed_again
    finally:
        scale("decode", DECODES)


def test_the_prefill_replica_drains(url: str, local: Engine) -> None:
    """It ships what it has begun before it ends; what comes meanwhile is prefilled where it decodes."""
    asked, later = prompt(66, 2500), prompt(67, 300)
    wanted = expected(local, [asked, later])
    before = sum(sample_of(url, "crossdock_prompt_tokens_total", name) for name in processes("decode"))
    stream = Stream(url, asked)
    until_arriving(stream)
    try:
        scale("prefill", 0)
        assert stream.result() == wanted[0]
        computed = sum(sample_of(url, "crossdock_prompt_tokens_total", name) for name in processes("decode")) - before
        assert computed == 0
        assert Stream(url, later).result() == wanted[1]
    finally:
        scale("prefill", 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_soak(url: str, local: Engine) -> None:
    """2,000 requests, a fifth of which leave at a random moment, while every few seconds a replica is killed: no wrong
    token, nothing hangs, no page is leaked or quarantined for good."""
    rng = random.Random(1)
    prompts = [prompt(number, rng.choice([5, 40, 300, 900])) for number in range(25)]
    wanted = expected(local, prompts)
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
        stream.join(180)
        assert not stream.is_alive(), "a stream hangs"
        # Where nobody was left to go on with it the client was told, and what it had was right.
        told = stream.error is not None or len(stream.tokens) < len(wanted[which])
        assert stream.tokens == wanted[which][: len(stream.tokens) if told else None], (
            f"{time.monotonic() - started:.0f} s: {stream.error}, {stream.tokens}, wanted {wanted[which]}, "
            f"{json.dumps(stream.timelines())}"
        )
        outcomes["told" if told else "served"] += 1
        if told:
            print(f"{time.monotonic() - started:.0f} s: {stream.error}", flush=True)  # noqa: T201

    def killer() -> None:
        while not ended.wait(rng.uniform(4, 8)):
            victims = [*processes("prefill").values(), *processes("decode").values()]
            if len(victims) == 1 + DECODES:  # one at a time: somebody must be left to go on
                rng.choice(victims).kill()
                outcomes["killed"] += 1
                print(f"{time.monotonic() - started:.0f} s: {dict(outcomes)}", flush=True)  # noqa: T201  # for pytest -s

    killing = threading.Thread(target=killer, daemon=True)
    killing.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(request, range(total)))
    finally:
        ended.set()
        killing.join()
    assert outcomes["killed"] > 0, outcomes
    assert outcomes["served"] > 10 * outcomes["told"], outcomes
    wait_until_whole(url)


def test_dashboards_and_alerts_ask_for_what_a_scrape_has(url: str) -> None:
    """Every metric and label in Grafana's dashboard and Prometheus' rules, after a few requests over both pools."""
    for number in range(3):
        assert Stream(url, prompt(number, 600)).result()
    families = list(text_string_to_metric_families(httpx.get(f"{url}/metrics").text))
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    # A family without a sample yet (nothing was refused) still has its name; counters' samples end in _total.
    known = {*labels, *(family.name for family in families), *(f"{family.name}_total" for family in families)}
    histograms = {family.name for family in families if family.type == "histogram"}
    known |= {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    asked = list(expressions("alerts.yaml")) + list(expressions("grafana-dashboard.json"))
    names = {name for expression in asked for name in re.findall(r"\bcrossdock_\w+", expression)}
    assert len(names) > 30
    assert names - known == set()
    for expression in asked:
        for name, matchers in re.findall(r"\b(crossdock_\w+)\{([^}]*)\}", expression):
            wanted = set(re.findall(r"(\w+)[=!]", matchers)) - {"service"}  # that one the scrape's configuration adds
            assert wanted <= labels.get(name, wanted), f"{name} has no {wanted - labels[name]}: {expression}"
    scraped = {name for name in labels if name.startswith("crossdock_") and not name.endswith("_created")}
    shown = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in names}
    missing = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in scraped} - shown
    assert missing <= {  # what no panel shows: `crossdock top` does, or another panel says it better
        "crossdock_step_cost_seconds",
        "crossdock_step_outliers_total",
        "crossdock_time_to_first_token_seconds",
        "crossdock_time_per_output_token_seconds",
        "crossdock_requests_refused_total",
    }
