"""Replicas of two ranks under Ray: the same tokens as one rank, and a rank's death or hang ends its replica alone."""

import json
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
from pydantic import ByteSize
from ray import serve
from ray.serve.config import ProxyLocation
from transformers import AutoConfig

from crossdock.cluster.app import build
from crossdock.cluster.config import load
from crossdock.workers.engine import Engine, EngineConfig
from crossdock.workers.model import load_model
from tests.cluster.test_pools import Stream, expected, prompt, samples
from tests.workers.architectures import build as build_model

APP = "gang"


@pytest.fixture(scope="module")
def tiny(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the embedded one's tokenizer: steps of a few milliseconds, in fp32."""
    folder = tmp_path_factory.mktemp("tiny")
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    vocab_size = AutoConfig.from_pretrained(model_dir).vocab_size
    options = {"vocab_size": vocab_size, "max_position_embeddings": 1024, "num_attention_heads": 9}
    build_model("llama", options | {"num_key_value_heads": 3, "hidden_size": 108}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(ray_cluster: None, tiny: Path) -> Iterator[str]:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        port: int = it.getsockname()[1]
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
            "pools": [
                {"name": "wide", "tensor_parallel_size": 2, "rank_timeout_s": 3},
                {"name": "narrow"},
            ],
        },
    )
    serve.start(proxy_location=ProxyLocation.Disabled)
    serve.run(build(config), name=APP)
    address = f"http://127.0.0.1:{port}"
    wait_until_whole(address)
    yield address
    serve.shutdown()


@pytest.fixture(scope="module")
def one_rank(tiny: Path) -> Engine:
    config = EngineConfig(kv_cache_memory=ByteSize(32 << 20), admission="queue", enable_prefix_caching=False)
    return Engine(load_model(tiny), config)


def wait_until_whole(url: str) -> None:
    deadline = time.monotonic() + 120
    while len(samples(url, 'crossdock_pages{state="owned"')) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def actors(kind: str) -> dict[str, psutil.Process]:
    """The living actors whose name or class begins so, by id."""
    found = {}
    for actor in ray._private.state.actors().values():
        if actor["State"] == "ALIVE" and (actor["Name"] or actor["ActorClassName"]).startswith(kind):
            found[actor["ActorID"]] = psutil.Process(actor["Pid"])
    return found


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_lost_under_load(url: str, one_rank: Engine, harm: signal.Signals) -> None:
    """kill -9, then a hang: what ran there goes on elsewhere, token for token; the replica comes back, whole and new;
    nobody is left behind."""
    prompts = [prompt(number + 40 * (harm is signal.SIGSTOP), 100 + 20 * number) for number in range(12)]
    wanted = expected(one_rank, prompts, max_tokens=400)
    ((replica, its_process),) = actors(f"SERVE_REPLICA::{APP}#wide").items()
    ((rank, rank_process),) = actors("Rank").items()
    with ThreadPoolExecutor(12) as pool:
        streams = list(pool.map(lambda it: Stream(url, it, 400), prompts))
    while sum(len(stream.tokens) > 5 for stream in streams) < 10:
        time.sleep(0.01)
    assert samples(url, "crossdock_output_tokens_total")[serving("wide")] > 0
    rank_process.send_signal(harm)
    assert [stream.result() for stream in streams] == wanted
    assert any(len(stream.timelines()) > 0 for stream in streams)
    _, alive = psutil.wait_procs([its_process, rank_process], timeout=20)
    assert not alive, json.dumps([process.cmdline() for process in alive])
    deadline = time.monotonic() + 60
    while not actors("Rank") or not actors(f"SERVE_REPLICA::{APP}#wide"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    wait_until_whole(url)
    assert not {replica, rank} & {*actors("Rank"), *actors("SERVE_REPLICA")}
    again = prompt(99, 50)
    assert [Stream(url, again).result() for _ in range(4)] == expected(one_rank, [again]) * 4


def serving(pool: str) -> str:
    """The name of a pool's replica in the metrics."""
    prefix = f"SERVE_REPLICA::{APP}#{pool}#"
    alive = (actor["Name"] for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE")
    (name,) = (name for name in alive if name.startswith(prefix))
    return name.removeprefix(prefix)
