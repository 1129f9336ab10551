"""Two ingresses and several replicas, in processes of their own: both ingresses find a cached prefix, a replica fetches
that of a busy one, and no request is lost while replicas come, die and are drained."""

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ray import serve

from crossdock.workers.replica.engine.engine import Engine
from tests.cluster.clients import Clients
from tests.cluster.serve.pools import served_pools as pools
from tests.cluster.serve.pools.served_pools import Stream, expected, metric, processes, prompt
from tests.waiting import eventually

POISON = [499, 3, 499, 3, 498]  # tokens that end every replica that gets them
REPLICAS = 3
PREFIX, TAIL = 3000, 400  # tokens
MOST_LATE = 4  # fetches without one that arrives
BURST = 6  # prompts with one prefix: more than its holder can begin with at once
_UNSEEN = itertools.count(900)  # numbers of prompts of which no page is cached


@pytest.fixture(scope="module")
def url(ray_cluster: None, small_model_dir: Path) -> Iterator[str]:
    settings = {"http.replicas": 2, "engine.fault_token_ids": POISON}
    with pools.deployment(small_model_dir, ({"name": "mixed", "replicas": REPLICAS},), settings) as address:
        yield address


@pytest.fixture(scope="module")
def local(small_model_dir: Path) -> Engine:
    return pools.local_engine(small_model_dir, is_caching=True)


def num_running() -> int:
    """Return how many replicas Serve takes to be running: for a moment, one that has died is among them."""
    states = serve.status().applications[pools.APP].deployments["mixed"].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


def are_up(url: str, count: int) -> bool:
    """Return whether an ingress, whichever answers, serves requests on so many replicas."""
    return len(pools.samples(url, 'crossdock_pages{state="owned"')) == count


def complete(url: str, prompt: list[int], max_tokens: int = 8, name: str = "", **more: Any) -> dict[str, Any]:
    """Send one request on a connection of its own, so that any ingress may get it."""
    body = {"model": "smol", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    headers = {"X-Request-Id": name or os.urandom(8).hex()}
    answer = httpx.post(
        f"{url}/v1/completions", json=body | {"return_token_ids": True} | more, headers=headers, timeout=240
    )
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def served_by(url: str, name: str) -> dict[str, Any]:
    (found,) = httpx.get(f"{url}/v1/requests/{name}", timeout=240).json()["requests"]
    timeline: dict[str, Any] = found
    return timeline


def test_prefix_is_found_by_either_ingress(url: str) -> None:
    """Cached pages are reported to both; predicted seconds decide, also at the ingress that did not place the first.

    A holder that learnt on a busy machine that it is slow may be left for one that fetches its pages, which holds them
    from then on.
    """
    holders, num_at_home = {}, 0
    for number in range(4):
        complete(url, prompt(number, PREFIX), name=f"first-{number}")
        holders[number] = {served_by(url, f"first-{number}")["replica"]}
    time.sleep(10.0)  # until both ingresses have been told, beside busy cores too: nothing shows what an ingress knows
    cached = metric(url, 'crossdock_router_decisions_total{reason="local cached"', may_be_absent=True)
    for number in range(4):
        for again in range(4):
            name = f"again-{number}-{again}"
            complete(url, [*prompt(number, PREFIX), again], name=name)
            timeline = served_by(url, name)
            if timeline["replica"] in holders[number]:
                num_at_home += 1
                assert timeline["num_cached_tokens"] == PREFIX // 16 * 16
            else:
                assert [each["outcome"] for each in timeline["transfers"]] == ["arrived"], timeline
                holders[number].add(timeline["replica"])
    assert num_at_home > 8
    assert metric(url, 'crossdock_router_decisions_total{reason="local cached"') >= cached + num_at_home


def test_prefix_of_another_owner_is_not_found(url: str) -> None:
    complete(url, prompt(50, 600), cache_salt="one")
    time.sleep(0.5)
    before = metric(url, 'crossdock_router_decisions_total{reason="local cached"', may_be_absent=True)
    complete(url, prompt(50, 600), name="salted", cache_salt="two")
    assert served_by(url, "salted")["num_cached_tokens"] == 0
    assert metric(url, 'crossdock_router_decisions_total{reason="local cached"', may_be_absent=True) == before


def test_requests_at_once_are_spread_over_replicas(url: str) -> None:
    # A replica that learnt on a busy machine that its steps are slow gets few requests, so there are many.
    names = [f"spread-{number}" for number in range(10 * REPLICAS)]
    with ThreadPoolExecutor(len(names)) as threads:
        asked = [threads.submit(complete, url, prompt(100 + i, 500), name=name) for i, name in enumerate(names)]
        for answer in asked:
            answer.result()
    count = Counter(served_by(url, name)["replica"] for name in names)
    assert len(count) > 1, count


def test_prediction_error_of_each_request_is_measured(url: str) -> None:
    before = metric(url, "crossdock_router_ttft_relative_error_count")
    for number in range(3):
        complete(url, prompt(200 + number, 300))
    assert metric(url, "crossdock_router_ttft_relative_error_count") == before + 3


def cached_at(url: str) -> tuple[list[int], str]:
    """Return a prefix that one replica has cached, and the replica's name."""
    prefix = prompt(next(_UNSEEN), PREFIX)
    stream = Stream(url, prefix, 1)
    stream.result()
    (timeline,) = stream.timelines()
    return prefix, timeline["replica"]


def burst(url: str, prefix: list[int]) -> list[Stream]:
    """Return streams of prompts that begin with a prefix, all sent at once."""
    return [Stream(url, prefix + prompt(next(_UNSEEN), TAIL)) for _ in range(BURST)]


def fetches(streams: list[Stream]) -> list[str]:
    """Return the outcomes of the fetches for some streams."""
    found = [each for stream in streams for part in stream.timelines() for each in part["transfers"]]
    return [each["outcome"] for each in found if each["direction"] == "fetched"]


def test_prefix_of_a_busy_replica_is_fetched_and_no_token_changes(url: str, local: Engine) -> None:
    streams = list[Stream]()

    def has_fetched() -> bool:
        """Whether a fetch has arrived, or many were late. A holder may be done too soon for one on a fast machine."""
        prefix, _ = cached_at(url)
        latest = burst(url, prefix)
        outputs = [stream.result() for stream in latest]
        assert outputs == expected(local, [stream.prompt for stream in latest])
        streams.extend(latest)
        outcomes = fetches(streams)
        return "arrived" in outcomes or outcomes.count("late") >= MOST_LATE

    eventually(has_fetched, lambda: f"no fetch arrived: {fetches(streams)}")
    if "arrived" not in fetches(streams):
        pytest.skip("needs cores that are less busy: each fetch took longer than its prefix takes to compute")
    assert sum(pools.samples(url, 'crossdock_transfers_total{direction="fetched",outcome="arrived"').values()) > 0


def test_source_that_is_killed_while_its_prefix_is_fetched_changes_no_token(url: str, local: Engine) -> None:
    """Its own requests are placed again, and what it did not send is computed. The third may then fetch that."""
    outcomes = set[str]()

    def has_failed() -> bool:
        """Whether a fetch from the killed one has failed. On a fast machine all prompts may wait for the source."""
        prefix, holder = cached_at(url)
        source: psutil.Process = processes("mixed")[holder]
        source.send_signal(signal.SIGSTOP)  # else the fetch may be over before the source is killed
        streams = burst(url, prefix)
        others = {*processes("mixed")} - {holder}
        eventually(lambda: any(part["replica"] in others for each in streams for part in each.timelines()))
        source.kill()
        assert [stream.result() for stream in streams] == expected(local, [stream.prompt for stream in streams])
        outcomes.update(fetches(streams))
        pools.wait_until_whole(url, REPLICAS)
        return bool(outcomes - {"arrived"})

    eventually(has_failed, lambda: f"no fetch from a killed one has failed: {outcomes}")


def test_poison_is_refused_after_two_replicas_and_streams_beside_it_go_on(url: str, local: Engine) -> None:
    """Two of three replicas die, the third survives. The answer asks clients not to send the request again."""
    prompts = [prompt(700 + number, 50) for number in range(4)]
    wanted = expected(local, prompts, max_tokens=300)
    before = {process.pid for process in processes("mixed").values()}
    streams = [Stream(url, asked, 300) for asked in prompts]
    eventually(lambda: all(len(stream.tokens) > 4 for stream in streams))
    body = {"model": "smol", "prompt": [7, 8, *POISON, 9], "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=240)
    assert [stream.result() for stream in streams] == wanted
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "suspect_request"
    assert answer.headers["x-should-retry"] == "false"

    def pids() -> set[int]:
        return {process.pid for process in processes("mixed").values()}

    eventually(lambda: len(pids() - before) == 2)
    assert len(pids() & before) == 1


def test_no_request_is_lost_while_replicas_come_and_go(url: str, local: Engine) -> None:
    """Under load the two that the poison ended are added again, one is killed, one is drained."""
    prompts = [prompt(300 + number, length) for number, length in enumerate([5, 40, 200, 500])]
    wanted = expected(local, prompts, max_tokens=40)

    def ask(turn: int) -> None:
        which = turn % len(prompts)
        got = complete(url, prompts[which], 40)["choices"][0]["token_ids"]
        assert got == wanted[which], f"prompt {which} got {got}"

    with Clients(4, ask) as clients:
        for count in (REPLICAS, 2, 1):
            if count == 2:
                next(iter(processes("mixed").values())).kill()
                eventually(lambda: num_running() == 2)  # else Serve may stop a live replica, and start one for the dead
            pools.scale("mixed", count)
            enough = clients.num_ok + 8
            eventually(partial(are_up, url, count))
            eventually(lambda enough=enough: clients.num_ok >= enough)  # type: ignore[misc]
    assert not clients.problems, clients.problems[:3]
