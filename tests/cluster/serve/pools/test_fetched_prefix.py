"""One of two mixed replicas is busy with prompts whose prefix it has: the other one fetches the prefix."""

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from crossdock.workers.replica.engine.engine import Engine
from tests.cluster.serve.pools import served_pools as pools
from tests.cluster.serve.pools.served_pools import Stream, expected, processes, prompt
from tests.waiting import eventually

PREFIX, TAIL = 3000, 400  # tokens
BURST = 6  # prompts with one prefix: more than its holder can begin with at once
_NUMBERS = itertools.count(900)  # of prompts of which no page is cached


@pytest.fixture(scope="module")
def url(ray_cluster: None, small_model_dir: Path) -> Iterator[str]:
    with pools.deployment(small_model_dir, ({"name": "mixed", "replicas": 2},)) as address:
        yield address


@pytest.fixture(scope="module")
def local(small_model_dir: Path) -> Engine:
    return pools.local_engine(small_model_dir)


def cached_at(url: str) -> tuple[list[int], str]:
    """Return a prefix that one replica has cached, and the replica's name."""
    prefix = prompt(next(_NUMBERS), PREFIX)
    stream = Stream(url, prefix, 1)
    stream.result()
    (timeline,) = stream.timelines()
    return prefix, timeline["replica"]


def burst(url: str, prefix: list[int]) -> list[Stream]:
    """Return streams of prompts that begin with a prefix, all sent at once."""
    return [Stream(url, prefix + prompt(next(_NUMBERS), TAIL)) for _ in range(BURST)]


def fetches(streams: list[Stream]) -> list[str]:
    """Return the outcomes of the fetches for some streams."""
    found = [each for stream in streams for part in stream.timelines() for each in part["transfers"]]
    return [each["outcome"] for each in found if each["direction"] == "fetched"]


def test_prefix_of_a_busy_replica_is_fetched_and_no_token_changes(url: str, local: Engine) -> None:
    streams = list[Stream]()

    def has_fetched() -> bool:
        """Whether a fetch has arrived. A holder may be done too soon for one on a fast machine."""
        prefix, _ = cached_at(url)
        latest = burst(url, prefix)
        outputs = [stream.result() for stream in latest]
        assert outputs == expected(local, [stream.prompt for stream in latest])
        streams.extend(latest)
        return "arrived" in fetches(streams)

    eventually(has_fetched, lambda: f"no fetch arrived: {fetches(streams)}", 120)
    assert sum(pools.samples(url, 'crossdock_transfers_total{direction="fetched",outcome="arrived"').values()) > 0


def test_source_that_is_killed_while_its_prefix_is_fetched_changes_no_token(url: str, local: Engine) -> None:
    """Its own requests are placed again, and what it did not send is computed."""
    prefix, holder = cached_at(url)
    source: psutil.Process = processes("mixed")[holder]
    source.send_signal(signal.SIGSTOP)  # else the fetch may be over before the source is killed
    streams = burst(url, prefix)
    others = {*processes("mixed")} - {holder}
    eventually(lambda: any(part["replica"] in others for each in streams for part in each.timelines()))
    source.kill()
    assert [stream.result() for stream in streams] == expected(local, [stream.prompt for stream in streams])
    outcomes = fetches(streams)
    assert outcomes, "no replica has asked for the prefix"
    assert "arrived" not in outcomes
