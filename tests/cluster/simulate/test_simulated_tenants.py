"""A tenant beside a flood has its share in every arrangement: replicas, pools, stages, several ingresses, losses."""

from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from crossdock.cluster.bench import metrics
from crossdock.cluster.bench.run import BenchOptions, bench_jobs
from crossdock.cluster.bench.tenants import parse_tenants
from crossdock.cluster.bench.workloads import Job
from crossdock.cluster.simulate import report
from tests.cluster.simulate.small_fleets import (
    assert_same_at_once_and_in_turn,
    fleet,
    job,
    play,
    play_out,
    profile,
)

PAIR = ({"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"})
AHEAD = {"profile": profile(runs_ahead=True)}
STAGES = {"profile": profile(pipeline_parallel_size=2, interval_share=0.5)}


def load(num_flooding: int) -> list[Job]:
    """Return prompts of `own`, one every second, and of `flood`, all of them at the start."""
    flood = [replace(job(f"f{number}", 200, 4, number / 1024), tenant="flood") for number in range(num_flooding)]
    own = [replace(job(f"o{number}", 100, 4, 0.5 + number), tenant="own") for number in range(10)]
    return sorted([*flood, *own], key=lambda each: each.due or 0.0)


@pytest.mark.parametrize(
    ("pools", "settings"),
    [
        (({},), {}),
        (({"replicas": 2},), {"routers": 2, "latency_s": 0.01}),
        (PAIR, {}),
        ((STAGES,), {}),
        ((AHEAD,), {}),
        (({"replicas": 2},), {"failures": [{"kill": "mixed/0", "at": 4.0}]}),
        (({"profile": profile(num_pages=128)},), {}),  # streams lose their pages
    ],
)
def test_tenant_beside_a_flood_has_first_tokens_soon(pools: tuple[dict[str, Any], ...], settings: Any) -> None:
    jobs = load(80)
    outcome = play_out(fleet(*pools, **settings), jobs)
    waits = {name: [s.ttft for s in outcome.samples if s.tenant == name and s.ok] for name in ("own", "flood")}
    assert len(waits["own"]) == 10
    assert max(waits["own"]) < 2.0 < median(waits["flood"])


@pytest.mark.parametrize("pool", [{}, AHEAD])
def test_tenants_are_charged_in_a_fast_forward_as_in_single_steps(pool: dict[str, Any]) -> None:
    assert_same_at_once_and_in_turn(fleet({"replicas": 2} | pool), load(30))


def test_order_of_arrival_knows_no_tenants_but_charges_them() -> None:
    first_come = fleet({"engine": {"prefill_order": "fcfs"}})
    jobs = load(80)
    outcome = play(first_come, jobs)
    assert max(s.ttft for s in outcome.samples if s.tenant == "own") > 5.0
    found = report.figures(outcome, metrics.DEFAULT_TARGETS)["tenants"]
    assert found["flood"]["charged_s"] > 10 * found["own"]["charged_s"] > 0
    busy = sum(replica.busy_s for replica in outcome.replicas)
    assert found["flood"]["charged_s"] + found["own"]["charged_s"] == pytest.approx(busy, rel=0.01)


def test_jobs_of_a_tenant_are_the_same_beside_others() -> None:
    def own(tenants: str) -> list[Job]:
        options = BenchOptions("", "chat", request_rate=2.0, num_requests=200, tenants=tenants)
        return [each for each in bench_jobs(options) if each.tenant == "own"]

    beside = own("own=1,flood=9x2")
    assert beside == own("own=1")[: len(beside)]
    assert 10 < len(beside) < 30
    with pytest.raises(ValueError, match=r"^tenants: .*--request-rate"):
        BenchOptions("", "chat", tenants="own=1")


@pytest.mark.parametrize("text", ["own", "own=0", "own=1,own=2", "a=1x0", "a=1.2.3", ""])
def test_tenants_that_cannot_be_read_raise(text: str) -> None:
    with pytest.raises(ValueError, match=r"^tenants: "):
        parse_tenants(text)
