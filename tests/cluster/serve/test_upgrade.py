"""The application is deployed again with another configuration while clients stream: every process is replaced, and no
stream loses or changes a token."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.config import HTTPOptions
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.config_file import load
from crossdock.cluster.serve.app import application
from tests.cluster.api.http.otlp_collector import collector
from tests.cluster.clients import Clients
from tests.cluster.deploy.streaming_clients import PROMPTS, stream
from tests.cluster.ports import free_port
from tests.waiting import eventually
from tests.workers.architectures import build as build_model

APP = "upgrade"


def config(
    folder: Path, port: int, budget: int, traces: str, pools: Mapping[str, int], is_direct: bool
) -> ClusterConfig:
    """Return a configuration with two ingresses, and two replicas or more: one is up while another is replaced.

    `pools`: replicas by pool. `is_direct`: ingresses listen; else requests come through Serve's proxies.
    """
    settings: dict[str, Any] = {
        "model.path": str(folder),
        "model.served_name": "small",
        "model.dtype": "float32",
        "http.port": port,
        "http.replicas": 2,
        "http.direct": is_direct,
        "http.otlp_endpoint": traces,
        "http.trace_sample_ratio": 1.0,
        "engine.kv_cache_memory": "4MiB",
        "engine.max_num_batched_tokens": budget,
        "engine.admission": "queue",
        "pools": [{"name": name, "replicas": replicas} for name, replicas in pools.items()],
    }
    if len(pools) > 1:
        settings |= {"router.shipping": "always", "transfer.host": "127.0.0.1"}
    return load(None, settings)


def budgets(url: str) -> dict[str, int]:
    """Return max_num_batched_tokens of each replica, as one of the ingresses knows it."""
    data = httpx.get(f"{url}/v1/replicas", timeout=240).json()["data"]
    return {replica["replica"]: replica["profile"]["max_num_batched_tokens"] for replica in data}


@pytest.fixture
def port() -> Iterator[int]:
    number = free_port()
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=number))
    yield number
    serve.shutdown()


@pytest.mark.parametrize(
    ("pools", "is_direct"),
    [
        pytest.param({"mixed": 2}, False, id="proxied", marks=pytest.mark.soak),
        pytest.param({"mixed": 2}, True, id="direct"),
        pytest.param({"prefill": 2, "decode": 2}, True, id="direct, two pools", marks=pytest.mark.soak),
    ],
)
def test_upgrade_under_load_replaces_every_process_and_drops_no_stream(
    ray_cluster: None,
    port: int,
    tmp_path: Path,
    tokenizers: dict[str, PreTrainedTokenizerFast],
    pools: dict[str, int],
    is_direct: bool,
) -> None:
    size = sum(pools.values())
    port = free_port() if is_direct else port
    url = f"http://127.0.0.1:{port}"
    tokenizers["byte_level"].save_pretrained(tmp_path)
    build_model("llama", {}).save_pretrained(tmp_path)
    with collector() as (traces, received):
        serve.run(application(config(tmp_path, port, 128, traces, pools, is_direct)), name=APP)
        before = eventually(lambda: found if len(found := budgets(url)) >= size else None)
        assert before is not None
        wanted = [stream(url, "any", number, 0.0) for number in range(len(PROMPTS))]

        def ask(turn: int) -> None:
            number = turn % len(PROMPTS)
            tokens = stream(url, "any", number, 0.02)
            assert tokens == wanted[number], f"prompt {number} has other tokens, or {len(tokens)}"

        with Clients(4, ask) as clients:  # slow ones: streams live while replicas come and go
            serve.run(
                application(config(tmp_path, port, 96, traces, pools, is_direct)), name=APP
            )  # returns once all is of this configuration
            eventually(
                lambda: len(after := budgets(url)) >= size and not before.keys() & after.keys(),
                lambda: f"{before} became {budgets(url)}",
            )
            after, done = budgets(url), clients.num_ok
            eventually(lambda: clients.num_ok >= done + 8, "the new replicas do not serve")
        try:
            serve.delete(APP)
        except TimeoutError as error:
            deployments = serve.status().applications[APP].deployments
            states = {name: (each.replica_states, each.message) for name, each in deployments.items()}
            raise AssertionError(f"these do not end: {states}, {budgets(url)}") from error
    assert not clients.problems
    assert set(before.values()) == {128}
    assert set(after.values()) == {96}
    assert clients.num_ok > 16
    spans = [
        span
        for message in received
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    roots = {span.span_id for span in spans if span.name == "POST /v1/completions"}
    # Those of replaced ingresses included: they send their spans before they end.
    assert len(roots) == clients.num_ok + len(PROMPTS)
    served = {span.parent_span_id for span in spans if span.name in ("serve", "prefill", "decode")}
    assert served
    assert served <= roots  # not all: the timelines of a replica that has left are lost
