"""Simulated pipelines: what replicas and routers predict of them is what they take."""

import random
from collections import deque
from itertools import pairwise

import pytest

from crossdock.cluster.simulate.simulation import Simulation
from crossdock.router.query import Query
from crossdock.workers.report.advertise import observe
from crossdock.workers.schedule.cost.cost_fit import IntervalShare
from crossdock.workers.schedule.cost.stages import Stages
from crossdock.workers.schedule.policies.pace import LONGEST_GAP
from tests.cluster.simulate.small_fleets import assert_all_ended, fleet, job, play, profile, times

PIPELINES = [(1, 1.0), (2, 0.5), (2, 0.7), (4, 0.25), (4, 0.4)]  # stages, and the share that the slowest takes


def simulation_of(depth: int, interval_share: float) -> Simulation:
    return Simulation(fleet({"profile": profile(pipeline_parallel_size=depth, interval_share=interval_share)}))


@pytest.mark.parametrize(("depth", "interval_share"), PIPELINES)
def test_reported_backlog_of_a_pipeline_is_what_computing_it_takes(depth: int, interval_share: float) -> None:
    """The latencies of all its steps, one after the other, are 1.4 to 4 times as much."""
    simulation = simulation_of(depth, interval_share)
    reported: list[float] = []

    def look(_: float) -> None:
        live = observe(simulation.replicas["mixed/0"].scheduler, "me", 1)
        reported.append(sum(prompts.seconds for prompts in live.prefills.groups))

    at = 0.3  # the first step has ended, and the others are queued
    simulation.clock.at(at, look)
    outcome = simulation.run([job(f"{number}", 256, 1) for number in range(120)])
    assert reported == [pytest.approx(outcome.duration - at, rel=0.06)]


@pytest.mark.parametrize(("depth", "interval_share"), PIPELINES)
def test_ttft_behind_the_backlog_of_a_pipeline_is_predicted(depth: int, interval_share: float) -> None:
    simulation = simulation_of(depth, interval_share)
    jobs = [job(f"{number}", 256, 1) for number in range(60)] + [job("new", 256, 1, due=1.0)]
    placed = simulation.run(jobs).placed[-1]
    assert placed.predicted_ttft == pytest.approx(placed.ttft, rel=0.06)


@pytest.mark.parametrize(("depth", "interval_share"), PIPELINES)
def test_prompt_alone_in_a_pipeline_takes_what_is_predicted(depth: int, interval_share: float) -> None:
    """Its chunks follow each other at the interval of steps; the last one takes the latency of a whole step."""
    (placed,) = simulation_of(depth, interval_share).run([job("a", 1500, 1)]).placed
    assert placed.predicted_ttft == pytest.approx(placed.ttft, rel=0.05)


@pytest.mark.parametrize(("depth", "interval_share"), PIPELINES)
@pytest.mark.parametrize("num_streams", [1, 2, 8, 12])
def test_gap_of_streams_in_a_pipeline_is_predicted(depth: int, interval_share: float, num_streams: int) -> None:
    """Each step in flight has a part of the streams."""
    simulation = simulation_of(depth, interval_share)
    predicted: list[float] = []

    def look(now: float) -> None:
        predicted.append(simulation.routers[""][0].choose(Query("new", 16), now).predicted_gap)

    simulation.clock.at(1.5, look)
    jobs = [job(f"{number}", 16, 200) for number in range(num_streams)]
    jobs.append(job("new", 16, 100, due=1.5))
    outcome = simulation.run(jobs)
    gaps = [after - before for before, after in pairwise(times(outcome)[-1])]
    assert predicted == [pytest.approx(sum(gaps) / len(gaps), rel=0.1)]


@pytest.mark.parametrize(("depth", "interval_share"), PIPELINES)
def test_stream_of_a_pipeline_is_in_time_beside_a_long_prompt(depth: int, interval_share: float) -> None:
    """Chunks leave it time for all intervals of a gap, also where stages are not alike."""
    shape = {"pipeline_parallel_size": depth, "interval_share": interval_share, "chunk_policy": "adaptive"}
    jobs = [job("stream", 16, 60, tier="standard"), job("long", 1900, 1, due=0.2, tier="batch")]
    outcome = play(fleet({"profile": profile(**shape)}), jobs)
    stream, (last,) = times(outcome)
    gaps = [after - before for before, after in pairwise(time for time in stream if time < last)]
    assert len(gaps) > 5
    assert max(gaps) <= LONGEST_GAP * 0.1  # of what its class promises


def test_interval_share_is_learnt_from_the_ends_of_unequal_steps() -> None:
    """The warm-up measured equal stages; since then one takes 0.6 of every step."""
    rng, stages, learnt = random.Random(1), Stages([0.6, 0.4]), IntervalShare([(0.05, 0.1)] * 3)
    in_flight: deque[tuple[float, float]] = deque()
    now = total = 0.0
    for _ in range(2000):
        while len(in_flight) < 2:
            seconds = rng.uniform(0.02, 0.06)
            in_flight.append((stages.begin(seconds, now), seconds))
        ended, seconds = in_flight.popleft()
        learnt.observe(ended - now, seconds)
        now, total = ended, total + seconds
    assert learnt.share == pytest.approx(now / total, rel=0.05)
    assert 0.6 < learnt.share < 0.75
    learnt.observe(100.0, 0.04)
    assert learnt.share < 0.75, "a pause is no interval"


def test_requests_that_end_in_flight_leave_nothing_in_a_pipeline() -> None:
    """A prefill replica dies while it computes and sends; the others go on."""
    pipeline = profile(pipeline_parallel_size=3, interval_share=0.4)
    pools = {"name": "prefill", "replicas": 3, "profile": pipeline}, {"name": "decode", "profile": pipeline}
    rng = random.Random(3)
    jobs = [job(f"{n}", rng.randint(1, 1200), rng.randint(1, 40), due=n / 20) for n in range(80)]
    failures = [{"at": 1.03, "kill": "prefill/0"}, {"at": 2.2, "add": "prefill"}]
    simulation = Simulation(fleet(*pools, failures=failures, router={"shipping": "always"}))
    in_flight = 0

    def look(_: float) -> None:
        nonlocal in_flight
        running = simulation.replicas["prefill/0"].scheduler.table.running
        in_flight = sum(request.num_in_flight_tokens > 0 for request in running)

    simulation.clock.at(1.029, look)
    outcome = simulation.run(jobs)
    assert_all_ended(simulation, outcome, jobs)
    assert [sample.error for sample in outcome.samples if sample.error is not None] == []
    assert in_flight > 0
    assert outcome.replicas[1].busy_s <= outcome.duration
