"""A fleet of emulated devices behind two ingresses: real replicas, and tokens that do not depend on the replica. Beside
them another model: one is lost or not there, and the other does not notice."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from crossdock.cluster.config_file import load
from crossdock.kernels.cache import cache_dir
from tests.cluster.ports import free_port
from tests.cluster.serve.pools.served_pools import (
    TokenStream,
    deployed,
    processes,
    prompt,
    timelines,
    wait_until_whole,
)
from tests.waiting import eventually

FLEET = ({"name": "prefill", "emulated": "l4-8b"}, {"name": "decode", "replicas": 2, "emulated": "l4-8b"})
LATER = {"name": "mixed", "emulated": "l4-8b", "replicas": 0, "max_replicas": 1}
NUM_TRIES = 5  # to kill a replica in mid-stream
SCALING = {"interval_s": 0.2, "devices": {"CPU": 8}}


@pytest.fixture(scope="module")
def url(ray_cluster: None, small_model_dir: Path) -> Iterator[str]:
    """The model `smol` has a fleet, `later` has a replica from its first request on."""
    member, port = {"path": str(small_model_dir), "max_model_len": 4096}, free_port()
    models = [
        {"name": "smol", "model": member, "pools": FLEET},
        {"name": "later", "model": member, "pools": [LATER]},
    ]
    http = {"port": port, "direct": True, "metrics_hold_s": 0, "replicas": 2}
    engine = {"admission": "queue", "max_num_batched_tokens": 256, "max_num_seqs": 8}
    settings = {"models": models, "scaling": SCALING, "http": http, "engine": engine, "router.shipping": "always"}
    with deployed(load(None, settings), 3) as url:
        yield url


@pytest.fixture(scope="module")
def whole(url: str) -> list[int]:
    """The tokens of an undisturbed stream. A step takes a fifteenth of a second."""
    return stream(url).result()


def stream(url: str, model: str = "smol", num_tokens: int = 600, name: str = "") -> TokenStream:
    body = {"model": model, "prompt": prompt(1, num_tokens), "max_tokens": 60, "seed": 7}
    return TokenStream(url, "/v1/completions", body, name)


def begun(url: str, name: str = "") -> TokenStream:
    """Return a stream that has some tokens."""
    found = stream(url, name=name)
    eventually(lambda: len(found.tokens) > 5, "no stream")
    return found


def test_killed_emulated_replica_leaves_its_stream_the_tokens_of_an_undisturbed_one(url: str, whole: list[int]) -> None:
    """The pages of both streams came from another replica. On a busy machine a stream may end before the replica is
    found and killed: then another stream is tried."""
    assert len(whole) == 60
    for _ in range(NUM_TRIES):
        disturbed = begun(url)
        decoding = {each["replica"] for each in disturbed.timelines()} & {*processes("smol-decode")}
        for replica in decoding:
            processes("smol-decode")[replica].kill()
        was_caught = len(disturbed.tokens) < 60
        assert disturbed.result() == whole
        assert len(decoding) == 1
        wait_until_whole(url, 3)
        if was_caught:
            break
    assert was_caught, "no replica was killed in mid-stream"


def test_replicas_say_that_their_devices_are_emulated(url: str) -> None:
    found = httpx.get(f"{url}/v1/replicas", timeout=240).json()["data"]
    assert {each["machine"]["device"] for each in found} == {"emulated l4-8b"}
    body = {"model": "smol", "prompt": "a", "max_tokens": 1, "logprobs": 1}
    refused = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")


def test_request_for_model_without_replica_starts_one_and_waits_unless_its_class_cannot(url: str) -> None:
    assert not processes("later-mixed")
    body = {"model": "later", "prompt": "a", "max_tokens": 1, "service_tier": "interactive"}
    refused = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_starting")
    assert int(refused.headers["retry-after"]) >= 1
    assert len(stream(url, "later", name="waits").result()) == 60
    (timeline,) = timelines(url, "waits")
    assert timeline["model_start_s"] > 0
    assert timeline["model"] == "later"
    assert [each["reason"] for each in httpx.get(f"{url}/v1/scaling", timeout=240).json()["data"]] == [
        "a request waits"
    ]
    assert (cache_dir() / "starts.json").is_file(), "the next start is predicted from this one"


def test_loss_of_one_models_replica_leaves_the_other_models_stream_undisturbed(url: str, whole: list[int]) -> None:
    for number in range(NUM_TRIES):
        httpx.post(f"{url}/v1/completions", json={"model": "later", "prompt": "a", "max_tokens": 1}, timeout=240)
        undisturbed = begun(url, f"undisturbed-{number}")
        (victim,) = processes("later-mixed").values()
        victim.kill()
        was_caught = undisturbed.is_alive()
        assert undisturbed.result() == whole
        placed = {each["epoch"] for each in timelines(url, undisturbed.request_id)}
        assert placed == {0}, "the stream was placed once"
        assert len(stream(url, "later").result()) == 60, "Serve starts another replica, for which requests wait"
        if was_caught:
            break
    assert was_caught, "no replica was killed in mid-stream"
