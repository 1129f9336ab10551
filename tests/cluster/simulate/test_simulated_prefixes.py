"""Prefixes in simulated time that come from host memory, or from another replica."""

from collections import Counter
from typing import Any

import pytest

from crossdock.cluster.bench.agents import Agents, agent_jobs
from crossdock.cluster.bench.metrics import hit_rate
from crossdock.cluster.bench.workloads import Job, Segment
from crossdock.cluster.simulate.simulation import Outcome
from tests.cluster.simulate.small_fleets import fleet, play, play_out, profile, times

SMALL = Agents(scale=0.004, turns=10.0, tool_s=0.5, person_s=4.0)
RATE = 256 * 1024 * 1024.0  # bytes per second of host memory: a page takes 1/16384 s, and 1/64 s to compute


def turn(prefix: str, name: str, due: float, prompt: int = 512) -> Job:
    """Return a job whose prompt is a prefix that others share, and 16 tokens of its own."""
    return Job((Segment(prefix, prompt), Segment(name, 16)), 1, due, service_tier="standard")


def with_memory(num_bytes: int, rate: float, num_pages: int, **pool: Any) -> dict[str, Any]:
    """Return replicas with host memory below small pools."""
    tiers = [{"name": "host", "num_bytes": num_bytes, "bytes_per_second": rate}]
    return {"profile": profile(num_pages=num_pages, max_model_len=1024, tiers=tiers), **pool}


def reasons(outcome: Outcome) -> Counter[str]:
    return Counter(word for placed in outcome.placed for word in placed.reason.split())


def test_prefix_that_was_evicted_is_loaded_from_host_memory() -> None:
    """Three prefixes of 32 pages in a pool of 80: the first is evicted by the third, and loaded in 1/16384 s a page."""
    jobs = [turn(prefix, f"{number}", 4.0 * number) for number, prefix in enumerate("abca")]
    outcome = play_out(fleet(with_memory(1 << 22, RATE, 80)), jobs)
    computed, *_, loaded = outcome.samples
    assert loaded.cached_tokens == 512
    assert loaded.ttft == pytest.approx(18 / 16384 + 1 / 64 + 16 / 1024)
    assert outcome.placed[-1].predicted_ttft == pytest.approx(loaded.ttft, rel=0.05)
    assert outcome.placed[-1].reason.split()[:2] == ["local", "loaded"]
    assert computed.cached_tokens == 0


def test_prefix_that_is_slower_to_load_is_computed() -> None:
    jobs = [turn(prefix, f"{number}", 4.0 * number) for number, prefix in enumerate("abca")]
    outcome, without = (play(fleet(with_memory(size, 512 * 1024, 80)), jobs) for size in (1 << 22, 0))
    assert not reasons(outcome)["loaded"]
    assert times(outcome) == times(without)


def test_memory_for_fewer_pages_keeps_those_used_last() -> None:
    jobs = [turn(prefix, f"{number}", 4.0 * number) for number, prefix in enumerate("abcdea")]
    hits = [
        play(fleet(with_memory(pages * 16 * 1024, RATE, 64)), jobs).samples[-1].cached_tokens for pages in (0, 40, 400)
    ]
    assert hits[0] == hits[1] == 0
    assert hits[2] == 512


def test_agents_with_host_memory_find_more_cached_and_end_alike_step_by_step() -> None:
    roots = agent_jobs(SMALL, 1, concurrency=10, per_agent=1)
    rates = []
    for num_bytes in (0, 1 << 24):
        simulated = fleet(with_memory(num_bytes, RATE, 64))
        together, single = (play(simulated, roots, at_once=at_once) for at_once in (True, False))
        assert times(together) == times(single)
        rates.append(hit_rate(together.samples) or 0.0)
    assert rates[1] > rates[0] + 0.1, rates


def burst(num: int) -> list[Job]:
    """Return a prompt, and later several with its prefix at once: more than its holder can begin with."""
    return [turn("a", "first", 0.0), *(turn("a", f"{number}", 4.0) for number in range(num))]


def test_prefix_of_a_busy_replica_is_fetched() -> None:
    pools = {"replicas": 2, "profile": profile(bytes_per_second=64 * 1024 * 1024.0)}
    jobs = burst(12)
    outcome = play_out(fleet(pools), jobs)
    assert reasons(outcome)["fetched"] >= 1
    without = play(fleet(pools, router={"shipping": "never"}), jobs)
    assert sum(sample.ttft for sample in outcome.samples) < sum(sample.ttft for sample in without.samples)


def test_source_has_its_pages_back_when_the_replica_that_fetches_them_dies() -> None:
    """The source reads the question when its running step ends, at 4.03 s."""
    pools = {"replicas": 2, "profile": profile(bytes_per_second=64 * 1024 * 1024.0)}
    jobs = burst(12)
    for milliseconds in (4014, 4035):
        failures = [{"kill": "mixed/1", "at": milliseconds / 1000}]
        play_out(fleet(pools, failures=failures), jobs)


def test_death_of_a_source_ends_no_request() -> None:
    pools = {"replicas": 2, "profile": profile(bytes_per_second=64 * 1024 * 1024.0)}
    jobs = burst(12)
    for milliseconds in (4001, 4035, 4300):
        failures = [{"kill": "mixed/0", "at": milliseconds / 1000}, {"kill": "mixed/1", "at": 60.0}]
        outcome = play_out(fleet(pools, failures=failures), jobs)
        assert all(sample.ok for sample in outcome.samples)


def test_idle_simulated_replica_writes_its_cached_pages_to_files() -> None:
    """As a live one does, so that a restart finds them. The pool has room for all: nothing was evicted."""
    tiers = [{"name": "files", "num_bytes": 1 << 24, "bytes_per_second": RATE}]
    outcome = play_out(fleet({"profile": profile(tiers=tiers)}), [turn("a", "first", 0.0), turn("b", "second", 2.0)])
    (files,) = outcome.replicas[0].scheduler.loading.tiers.tiers
    assert files.num_stores == len(files.pages) == 2 * 33
