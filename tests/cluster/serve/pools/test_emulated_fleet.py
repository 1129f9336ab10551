"""A fleet of emulated devices behind two ingresses: real replicas, and tokens that do not depend on the replica."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cluster.serve.pools.served_pools import TokenStream, deployment, processes, prompt, wait_until_whole
from tests.waiting import eventually

FLEET = ({"name": "prefill", "emulated": "l4-8b"}, {"name": "decode", "replicas": 2, "emulated": "l4-8b"})
SETTINGS = {"model.dtype": "auto", "engine.kv_cache_memory": None, "http.replicas": 2}


@pytest.fixture(scope="module")
def url(ray_cluster: None, small_model_dir: Path) -> Iterator[str]:
    with deployment(small_model_dir, FLEET, SETTINGS) as url:
        yield url


def stream(url: str) -> TokenStream:
    return TokenStream(url, "/v1/completions", {"prompt": prompt(1, 600), "max_tokens": 60, "seed": 7})


def test_killed_emulated_replica_leaves_its_stream_the_tokens_of_an_undisturbed_one(url: str) -> None:
    """The pages of both streams came from another replica. A step takes a fifteenth of a second."""
    whole = stream(url).result()
    assert len(whole) == 60
    disturbed = stream(url)
    eventually(lambda: len(disturbed.tokens) > 5, "no stream")
    decoding = {each["replica"] for each in disturbed.timelines()} & {*processes("decode")}
    for replica in decoding:
        processes("decode")[replica].kill()
    assert len(disturbed.tokens) < 60, "the replica was killed in mid-stream"
    assert disturbed.result() == whole
    assert len(decoding) == 1
    wait_until_whole(url, 3)


def test_replicas_say_that_their_devices_are_emulated(url: str) -> None:
    found = httpx.get(f"{url}/v1/replicas").json()["data"]
    assert {each["machine"]["device"] for each in found} == {"emulated l4-8b"}
    body = {"model": "smol", "prompt": "a", "max_tokens": 1, "logprobs": 1}
    refused = httpx.post(f"{url}/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
