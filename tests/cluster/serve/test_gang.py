"""Replicas of two ranks under Ray give the tokens of one rank, and a rank's death or hang ends its replica alone."""

import json
import shutil
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray import serve
from ray.serve.config import ProxyLocation
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from crossdock.cluster.config_file import load
from crossdock.cluster.serve.app import build, engine_deployment
from tests.cluster.serve.pools.served_pools import Stream, assert_greedy, prompt, samples, timelines, wait_until_up
from tests.waiting import eventually
from tests.workers.architectures import build as build_model

APP = "gang"


@pytest.fixture(scope="module")
def tiny(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random fp32 model with the embedded one's tokenizer: steps of a few milliseconds."""
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    vocab_size = AutoConfig.from_pretrained(model_dir).vocab_size
    options = {"vocab_size": vocab_size, "max_position_embeddings": 1024, "num_attention_heads": 9}
    build_model("llama", options | {"num_key_value_heads": 3, "hidden_size": 108}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(ray_cluster: None, tiny: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    config = load(
        None,
        {
            "model.path": str(tiny),
            "model.served_name": "smol",
            "model.dtype": "float32",
            "http.port": port,
            "http.direct": True,
            "engine.kv_cache_memory": "32MiB",
            "engine.admission": "queue",
            "router.policy": "round-robin",  # by predicted time the narrow one, faster here, would get all
            "pools": [
                {"name": "wide", "tensor_parallel_size": 2, "rank_timeout_s": 3},
                {"name": "narrow"},
            ],
        },
    )
    serve.start(proxy_location=ProxyLocation.Disabled)
    serve.run(build(config), name=APP)
    address = f"http://127.0.0.1:{port}"
    wait_until_up(address, 2)
    yield address
    serve.shutdown()


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    return model


def test_node_labels_bind_the_nodes_of_all_ranks() -> None:
    """A group whose first bundle alone is bound may be placed where its driver, which is bound too, cannot run."""
    labels = {"ray.io/accelerator-type": "H100"}
    config = load(
        None, {"pools": [{"name": "big", "tensor_parallel_size": 4, "node_labels": labels}, {"name": "small"}]}
    )
    big, small = (engine_deployment(config, pool)._bound_deployment._replica_config for pool in config.pools)
    assert big.placement_group_bundle_label_selector == [labels] * 4
    assert len(big.placement_group_bundles) == 4
    assert small.placement_group_bundle_label_selector is None


def actors(kind: str) -> dict[str, psutil.Process]:
    """Return the living actors whose name or class begins with `kind`, by id."""
    found = {}
    for actor in ray._private.state.actors().values():
        if actor["State"] == "ALIVE" and (actor["Name"] or actor["ActorClassName"]).startswith(kind):
            found[actor["ActorID"]] = psutil.Process(actor["Pid"])
    return found


@pytest.mark.parametrize("harm", [pytest.param(signal.SIGKILL, marks=pytest.mark.soak), signal.SIGSTOP])
def test_rank_lost_under_load_ends_its_replica_alone(url: str, oracle: PreTrainedModel, harm: signal.Signals) -> None:
    """By kill -9, and by a hang. Its requests go on elsewhere, token for token; a new replica comes up whole; no
    process is left behind."""
    prompts = [prompt(number + 40 * (harm is signal.SIGSTOP), 100 + 20 * number) for number in range(12)]
    ((replica, replica_process),) = actors(f"SERVE_REPLICA::{APP}#wide").items()
    ((rank, rank_process),) = actors("Rank").items()
    with ThreadPoolExecutor(12) as pool:
        streams = list(pool.map(lambda tokens: Stream(url, tokens, 400), prompts))
    eventually(lambda: sum(len(stream.tokens) > 5 for stream in streams) >= 10)
    assert samples(url, "crossdock_output_tokens_total")[serving("wide")] > 0
    rank_process.send_signal(harm)
    for asked, stream in zip(prompts, streams, strict=True):
        assert_greedy(oracle, asked, stream.result(), 400)
    assert any(len(timelines(url, stream.request_id)) > 0 for stream in streams)
    _, alive = psutil.wait_procs([replica_process, rank_process], timeout=20)
    assert not alive, json.dumps([process.cmdline() for process in alive])
    eventually(lambda: actors("Rank") and actors(f"SERVE_REPLICA::{APP}#wide"), seconds=180)
    wait_until_up(url, 2)
    assert not {replica, rank} & {*actors("Rank"), *actors("SERVE_REPLICA")}
    again = prompt(99, 50)
    for stream in [Stream(url, again, 50) for _ in range(4)]:
        assert_greedy(oracle, again, stream.result(), 50)


def serving(pool: str) -> str:
    """Return the name of a pool's replica in the metrics."""
    prefix = f"SERVE_REPLICA::{APP}#{pool}#"
    alive = (actor["Name"] for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE")
    (name,) = (name for name in alive if name.startswith(prefix))
    return name.removeprefix(prefix)
