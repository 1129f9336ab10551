"""A deployment with a prefill and a decode pool: streams of tokens, metrics and processes, for tests to disturb.

Pages travel by NIXL where it is installed; CROSSDOCK_TEST_TRANSPORT=tcp selects plain TCP.
"""

import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil
import ray
import torch
from pydantic import ByteSize
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.config import HTTPOptions, ProxyLocation
from transformers import PreTrainedModel

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.config_file import load
from crossdock.cluster.serve.app import APP_NAME, application
from crossdock.cluster.serve.application import Application
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.cluster.ports import free_port
from tests.waiting import SCRAPE_PAUSE_S, eventually

APP = "pools"
DECODES = 2
CHUNK = 256  # tokens of a step at most
DTYPE = "float32"  # by default CPUs with bfloat16 compute in it; then the size of a batch decides between close tokens
PAIR: tuple[dict[str, Any], ...] = ({"name": "prefill"}, {"name": "decode", "replicas": DECODES})
KV_MEMORY = 150 << 20  # bytes of a replica: 38,000 tokens of `small_model_dir`. To take a GiB costs 3 s of a core
_MAX_MODEL_LEN = 4096
_UNSEEN = itertools.count(400)  # numbers of prompts of which no page is cached


def config_of(
    model: Path, port: int, pools: tuple[dict[str, Any], ...], settings: dict[str, Any] | None = None
) -> ClusterConfig:
    """Return the configuration of a deployment. `settings`: further ones, dotted."""
    return load(
        None,
        {
            "model.path": str(model),
            "model.served_name": "smol",
            "model.dtype": DTYPE,
            "model.max_model_len": _MAX_MODEL_LEN,
            "http.port": port,
            "http.direct": True,
            "http.vllm_metrics": True,
            "http.metrics_hold_s": 0,
            "engine.kv_cache_memory": KV_MEMORY,
            "engine.max_num_batched_tokens": CHUNK,
            "engine.max_num_seqs": 8,  # a replica that starts measures steps of up to so many streams
            "engine.admission": "queue",
            "router.shipping": "always",  # by default the router ships only where that is predicted to be faster
            "transfer.transport": os.environ.get("CROSSDOCK_TEST_TRANSPORT", "auto"),
            "transfer.deadline_s": 8,  # sooner than the router gives up a silent replica
            "transfer.grace_s": 0.2,
            "pools": [{"num_cpus": 1, **pool} for pool in pools],  # one thread, as the oracle has
            **(settings or {}),
        },
    )


@contextmanager
def deployment(
    model: Path, pools: tuple[dict[str, Any], ...] = PAIR, settings: dict[str, Any] | None = None
) -> Iterator[str]:
    """Deploy replicas of `model`, and yield the URL of the API once all are up. `settings`: further ones, dotted."""
    config = config_of(model, free_port(), pools, settings)
    with deployed(config, sum(pool.get("replicas", 1) for pool in pools)) as url:
        yield url


@contextmanager
def deployed(config: ClusterConfig, replicas: int) -> Iterator[str]:
    """Deploy a configuration, and yield the URL of the API once so many replicas are up."""
    serve.start(proxy_location=ProxyLocation.Disabled)
    # Serve notices that a replica was killed when it checks its health: after a second, instead of up to ten.
    with patch.object(serve, "deployment", partial(serve.deployment, health_check_period_s=1.0)):
        app = application(config)
    try:
        serve.run(app, name=APP, external_scaler_enabled=True)
        url = f"http://127.0.0.1:{config.http.port}"
        wait_until_whole(url, replicas)
        yield url
    finally:
        serve.shutdown()  # not the application alone: the next module starts Serve with a proxy
        eventually(_has_ended, "Serve does not end")  # else the next module would deploy to its old controller


@contextmanager
def behind_proxies(model: Path, settings: dict[str, Any]) -> Iterator[str]:
    """Deploy a replica and two ingresses behind Serve's proxies. Yield the URL once all are up."""
    port = free_port()
    names = {"model.path": str(model), "model.served_name": "smol", "model.dtype": DTYPE}
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
    config = load(None, {**names, "http.port": port, "http.replicas": 2, **settings})
    serve.run(application(config), name=APP_NAME)
    try:
        eventually(Application(config).is_connected, "an ingress has no replica")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()


def _has_ended() -> bool:
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return True
    return False


def local_engine(model: Path, kv_memory: int = KV_MEMORY, is_caching: bool = False) -> Engine:
    """Return the oracle: the same model on one engine, which other tests compare with transformers' own generate.

    `is_caching`: whether it keeps the pages of prefixes, for many prompts that begin alike.
    """
    config = EngineConfig(kv_cache_memory=ByteSize(kv_memory), admission="queue", enable_prefix_caching=is_caching)
    return new_engine(load_model(ModelSpec(str(model), DTYPE, max_model_len=_MAX_MODEL_LEN)), config)


def expected(engine: Engine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    """Return the output tokens of the oracle for each prompt."""
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(ignore_eos=True, **({"temperature": 0.0, "max_tokens": 24} | params))
        engine.add(Submission(f"{number}", prompt, sampling))
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return [tokens[f"{number}"] for number in range(len(prompts))]


def assert_greedy(oracle: PreTrainedModel, asked: list[int], tokens: list[int], count: int) -> None:
    """Assert that each token is transformers' likeliest after the ones before. Ranks add up in another order than one
    does: of two tokens whose logits are within 1e-3 of each other either will do."""
    assert len(tokens) == count
    with torch.inference_mode():
        logits = oracle(torch.tensor([asked + tokens[:-1]])).logits[0, len(asked) - 1 :]
    behind = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert behind.max() < 1e-3, behind
    assert (behind == 0).float().mean() > 0.99


def assert_streams_greedy(oracle: PreTrainedModel, streams: "Sequence[Stream]") -> None:
    """Wait for streams, and assert `assert_greedy` of the tokens of each."""
    for stream in streams:
        assert_greedy(oracle, stream.prompt, stream.result(), stream.body["max_tokens"])


def prompt(number: int, num_tokens: int) -> list[int]:
    """Return a prompt that shares no first page with those of other numbers."""
    return [(number * 977 + 31 * place * place + 7 * place) % 500 + 100 for place in range(num_tokens)]


def events(answer: httpx.Response) -> Iterator[str]:
    """Yield the JSON of each event. `iter_lines` would also end a line at U+0085, of which some tokens have one."""
    rest = ""
    for text in answer.iter_text():
        *lines, rest = (rest + text).split("\n")
        yield from (line.removeprefix("data: ") for line in lines if line.startswith("data: {"))


class TokenStream(threading.Thread):
    """One streaming request, which begins at once; `tokens` grows as they come."""

    def __init__(self, url: str, path: str, body: dict[str, Any], name: str = "") -> None:
        super().__init__(daemon=True)
        self.url, self.path = url, path
        self.body = {"model": "smol", "ignore_eos": True, "stream": True, "return_token_ids": True} | body
        self.request_id = name or os.urandom(8).hex()
        self.tokens: list[int] = []
        self.error: str | None = None
        self.start()

    def run(self) -> None:
        headers = {"X-Request-Id": self.request_id}
        with httpx.stream("POST", f"{self.url}{self.path}", json=self.body, headers=headers, timeout=240) as answer:
            for data in events(answer):
                event = json.loads(data)
                if "error" in event:
                    self.error = event["error"]["message"]
                for choice in event.get("choices", ()):
                    self.tokens += choice.get("token_ids") or ()

    def result(self) -> list[int]:
        """Return all tokens, once the stream has ended without an error."""
        self.join(240)
        assert not self.is_alive(), "the stream hangs"
        assert self.error is None, self.error
        return self.tokens

    def timelines(self) -> list[dict[str, Any]]:
        """Return the timelines of this request at the replicas that worked for it."""
        return timelines(self.url, self.request_id)


class Stream(TokenStream):
    """A streaming completion."""

    def __init__(self, url: str, prompt: list[int], max_tokens: int = 24, name: str = "", **params: Any) -> None:
        self.prompt = prompt
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 0} | params
        super().__init__(url, "/v1/completions", body, name)


def shipping_stream(url: str, max_tokens: int = 24, stops: psutil.Process | None = None) -> tuple[Stream, str]:
    """Return a stream whose prompt is on its way, and the decode replica that has a part of it.

    `stops`: a process that is stopped (SIGSTOP) while the prompt is on its way. A stream may end before it is caught,
    on a fast or a busy machine: then another one is tried.
    """
    for _ in range(10):
        stream = Stream(url, prompt(next(_UNSEEN), 3500), max_tokens)
        while stream.is_alive():
            if (replica := arriving(url, stream.request_id)) is None:
                continue
            if stops is not None:
                stops.send_signal(signal.SIGSTOP)
            if not stream.tokens:
                return stream, replica
            break
        if stops is not None:
            stops.send_signal(signal.SIGCONT)
        stream.result()
    raise AssertionError("ten streams ended before one was caught while its prompt was on its way")


def timelines(url: str, request_id: str) -> list[dict[str, Any]]:
    """Return the timelines of a request at the replicas that worked for it."""
    answer = httpx.get(f"{url}/v1/requests/{request_id}", timeout=240)
    found: list[dict[str, Any]] = answer.json()["requests"] if answer.status_code == 200 else []
    return found


def arriving(url: str, request_id: str) -> str | None:
    """Return the decode replica that has some tokens of a request's prompt but not all."""
    for timeline in timelines(url, request_id):
        if 0 < timeline["num_computed_tokens"] < timeline["num_prompt_tokens"]:
            replica: str = timeline["replica"]
            if replica in processes("decode"):
                return replica
    return None


# -- metrics -----------------------------------------------------------------------------------------------------------


def scrape(url: str) -> str:
    """Return the metrics of a server that holds no text for others who ask."""
    return httpx.get(f"{url}/metrics", timeout=240).text


def samples(url: str, name: str) -> dict[str, float]:
    """Return a metric's value at each replica."""
    return samples_in(scrape(url), name)


def samples_in(text: str, name: str) -> dict[str, float]:
    """Return a metric's value at each replica in the text of a scrape."""
    found = {}
    for line in text.splitlines():
        if line.startswith(name) and 'replica="' in line:
            found[line.split('replica="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
    return found


def sample_of(url: str, name: str, replica: str) -> float:
    """Return a metric's value at one replica. A scrape omits replicas that are too busy to answer it in time."""
    return eventually(lambda: [value for at, value in samples(url, name).items() if at == replica], replica)[0]


def prompt_tokens(url: str, replicas: list[str]) -> dict[str, float]:
    """Return how many prompt tokens each replica has computed."""
    return {name: sample_of(url, "crossdock_prompt_tokens_total", name) for name in replicas}


def metric(url: str, name: str, may_be_absent: bool = False) -> float:
    """Return the sum of a metric's samples over labels, 0 if it may be absent. `name` may end in a label that must
    match."""
    name, _, label = name.partition("{")
    lines = scrape(url).splitlines()
    found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{")) and label in line]
    assert found or may_be_absent, f"no sample of {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def wait_until_whole(url: str, replicas: int = 1 + DECODES, *idle: str) -> None:
    """Wait until all replicas are up, and no request owns a page. `idle`: further metrics that are 0 then."""
    names = ('crossdock_pages{state="owned"', 'crossdock_pages{state="quarantined"', *idle)
    found: list[dict[str, float]] = [{}]

    def is_whole() -> bool:
        with contextlib.suppress(httpx.TransportError):
            text = scrape(url)
            found[:] = [samples_in(text, name) for name in names]
        return len(found[0]) == replicas and not any(sum(values.values()) for values in found)

    eventually(is_whole, lambda: f"{names}: {found}", pause_s=SCRAPE_PAUSE_S)


def wait_until_up(url: str, replicas: int) -> None:
    """Wait until so many replicas answer for their metrics."""
    eventually(lambda: len(samples(url, 'crossdock_pages{state="owned"')) >= replicas, pause_s=SCRAPE_PAUSE_S)


# -- processes ---------------------------------------------------------------------------------------------------------


def actors(kind: str) -> dict[str, dict[str, Any]]:
    """Return Ray's records of the living actors whose name or class begins with `kind`, by id."""
    every = ray._private.state.actors().items()  # the public ray.util.state needs Ray's dashboard
    return {
        name: actor
        for name, actor in every
        if actor["State"] == "ALIVE" and (actor["Name"] or actor["ActorClassName"]).startswith(kind)
    }


def processes(pool: str) -> dict[str, psutil.Process]:
    """Return the live replicas of a pool, by name. Ray may list one that has just ended as alive."""
    prefix = f"SERVE_REPLICA::{APP}#{pool}#"
    pids = {actor["Name"].removeprefix(prefix): actor["Pid"] for actor in actors(prefix).values()}
    return {name: psutil.Process(pid) for name, pid in pids.items() if psutil.pid_exists(pid)}


def driver_and_follower(pool: str) -> tuple[tuple[str, psutil.Process], tuple[str, psutil.Process]]:
    """Return the ids and the processes of the two ranks of the only replica of a pool."""
    ((driver, record),) = actors(f"SERVE_REPLICA::{APP}#{pool}").items()
    followers = {name: each for name, each in actors("Rank").items() if each["OwnerAddress"] == record["Address"]}
    ((follower, other),) = followers.items()
    return (driver, psutil.Process(record["Pid"])), (follower, psutil.Process(other["Pid"]))


def lose_rank_in_mid_stream(url: str, oracle: PreTrainedModel) -> None:
    """Kill the follower of the decode replica while streams run. Assert that all streams end with the right tokens."""
    _, (_, follower) = driver_and_follower("decode")
    streams = [Stream(url, prompt(40 + number, 100 + 20 * number), 150) for number in range(8)]
    eventually(lambda: sum(len(stream.tokens) > 5 for stream in streams) >= 6)
    follower.kill()
    assert_streams_greedy(oracle, streams)


def everyone() -> list[str]:
    """Return the names of all live replicas."""
    return [*processes("prefill"), *processes("decode")]


def scale(pool: str, replicas: int) -> None:
    """Set the size of a pool, and wait until surplus replicas have drained and ended."""
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    ray.get(controller.update_deployment_replicas.remote(DeploymentID(pool, APP), replicas))
    eventually(lambda: len(processes(pool)) == replicas, lambda: f"{pool} still has {[*processes(pool)]}")
