"""The search for the highest rate, queues that grow, and GPUs in the report."""

import json
from pathlib import Path

import pytest

from crossdock.cluster.bench.metrics import Sample
from crossdock.cluster.simulate.capacity_search import best_of, highest_rate, offered_rate, queue_of
from crossdock.workers.report.presets import preset
from crossdock.workers.schedule.cost.cost import StepWork
from tests.cluster.watch.terminal import run


def samples(rate: float, served: float, seconds: float = 100.0) -> list[Sample]:
    """Return the requests of a server that begins `served` of them per second, in order."""
    found, free = [], 0.0
    for number in range(int(rate * seconds)):
        sent = number / rate
        free = max(free, sent) + 1 / served
        found.append(Sample("chat", 1, 1, sent, [free], [1], free))
    return found


@pytest.mark.parametrize(("served", "grows"), [(20.0, False), (11.0, False), (9.0, True), (5.0, True)])
def test_queue_grows_where_requests_come_faster_than_they_begin(served: float, grows: bool) -> None:
    assert queue_of(samples(10.0, served)).grows == grows
    assert offered_rate(samples(10.0, served)) == pytest.approx(10.0)


@pytest.mark.parametrize(("start", "limit"), [(1.0, 37.0), (100.0, 0.3), (8.0, 8.5)])
def test_search_ends_within_five_percent_below_the_highest_rate(start: float, limit: float) -> None:
    trials = highest_rate(lambda rate: (1.0 if rate <= limit else 0.5, False), 0.99, start)
    best = best_of(trials, 0.99)
    assert best is not None
    assert limit / 1.06 < best.rate <= limit


def test_rate_at_which_a_queue_grows_is_not_the_answer() -> None:
    trials = highest_rate(lambda rate: (1.0, rate > 20), 0.99, 1.0)
    best = best_of(trials, 0.99)
    assert best is not None
    assert 18 < best.rate <= 20


def test_fleet_that_keeps_no_rate_ends_the_search() -> None:
    trials = highest_rate(lambda rate: (0.0, False), 0.99, 1.0)
    assert best_of(trials, 0.99) is None


FLEET = ["--mix", "chat-heavy", "--duration", "8"]


def test_report_counts_gpus_and_says_that_the_queue_grows(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    flags = ["--pools", "mixed=1xh100-70b", "--request-rate", "60", "--json", str(file)]
    result = run("simulate", *flags, *FLEET)
    assert result.exit_code == 0, result.output
    assert "on 1 replica with 4 GPUs in all" in result.stdout
    assert "mixed: 1 x 4 GPUs" in result.stdout
    assert "the queue grows" in result.stdout
    found = json.loads(file.read_text())
    assert (found["gpus"], found["pools"]["mixed"]["gpus_each"], found["queue"]["grows"]) == (4, 4, True)
    assert found["offered_requests_per_s"] > 1.2 * found["requests"] / found["duration_s"]


def test_found_rate_keeps_the_goal_and_one_far_above_does_not(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    result = run("simulate", "--pools", "mixed=1xl4-8b", "--find-rate", "0.9", "--json", str(file), *FLEET)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    trials = {trial["rate"]: trial["good"] for trial in found["trials"]}
    rate = found["requests_per_s"]
    assert trials[rate] >= 0.9
    assert all(
        good < 0.9 or trial["grows"] for trial in found["trials"] if (good := trial["good"]) and trial["rate"] > rate
    )
    assert f"{rate:.3g} requests/s keep 90% good on {found['gpus']} GPU" in result.stdout


def test_preset_is_as_far_from_the_measured_gpu_as_docs_say() -> None:
    """A step of 64 streams at 1,024 tokens took 7.6 ms on an H200."""
    work = StepWork(decodes=64, context=64 * 1024)
    assert preset("h200-8b").cost.seconds(work) == pytest.approx(9.5e-3, rel=0.02)
