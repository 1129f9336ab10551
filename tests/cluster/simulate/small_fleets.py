"""Small fleets to simulate, with costs that are exact in binary."""

import json
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from crossdock.cluster.bench.metrics import DEFAULT_TARGETS
from crossdock.cluster.bench.pictures import DrawnPicture
from crossdock.cluster.bench.workloads import Job, Segment
from crossdock.cluster.simulate import report
from crossdock.cluster.simulate.fleet import SimulatedFleet, describe
from crossdock.cluster.simulate.replica import SimulatedReplica
from crossdock.cluster.simulate.simulation import Outcome, Simulation
from crossdock.workers.report.live_profile import LiveProfile
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.request.slo import SloClass

# Exact in binary, so that sums come out even: 1/64 s and a 1/1024 s per prompt token and per stream.
COST = StepCost(base=1 / 64, per_prefill_token=1 / 1024, per_decode=1 / 1024)
ENCODER = EncoderCost(base=0.0, per_embedding_token=1 / 4096)
CLASSES = (
    SloClass(name="interactive", ttft_s=1.0, tpot_s=0.05, weight=4.0),
    SloClass(name="standard", ttft_s=10.0, tpot_s=0.1),
    SloClass(name="batch", ttft_s=600.0, tpot_s=2.0),
)


def profile(**changes: Any) -> SchedulingProfile:
    plain = {
        "max_model_len": 2048,
        "vocab_size": 1000,
        "page_size": 16,
        "num_pages": 512,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 16,
        "slo_classes": CLASSES,
        "chunk_policy": "fixed",
        "min_chunk_tokens": 32,
        "admission": "queue",
        "compatibility": "one",
        "page_bytes": 16 * 1024,
        "bytes_per_second": 1024 * 1024.0,
        "cost": COST,
    }
    return SchedulingProfile.model_validate(plain | changes)


def fleet(*pools: dict[str, Any], **settings: Any) -> SimulatedFleet:
    plain = {"name": "mixed", "replicas": 1, "profile": profile()}
    described = [plain | pool for pool in pools] or [plain]
    return describe({"pools": described, "latency_s": 0.0, "publish_s": 0.05, **settings})


def job(
    name: str, prompt: int, output: int, due: float = 0.0, tier: str = "standard", pictures: Sequence[str] = ()
) -> Job:
    """Return a job with pictures of 64 rows each, equal where their names are."""
    drawn = tuple(DrawnPicture(picture, 8 * 28) for picture in pictures)
    return Job((Segment(name, prompt),), output, due, service_tier=tier, pictures=drawn)


def play(fleet: SimulatedFleet, jobs: Sequence[Job], seed: int = 0, at_once: bool = True) -> Outcome:
    return Simulation(fleet, seed, at_once).run(jobs)


class Reported(Simulation):
    """A simulation that keeps what replicas report: when, from where, and what a router then knows.

    Without the price of evictions: pages that steps evict at once are evicted at one time, which is in the price."""

    def __init__(self, fleet: SimulatedFleet, seed: int = 0, at_once: bool = True) -> None:
        self.reports: list[tuple[float, str, LiveProfile]] = []
        super().__init__(fleet, seed, at_once)

    def published(self, replica: SimulatedReplica, now: float) -> None:
        super().published(replica, now)
        live = self.routers[replica.pool.model][0].table.by_name[replica.name].live
        assert live is not None
        live = structs.replace(live, room=live.room._replace(eviction_seconds=0.0))
        self.reports.append((now, replica.name, live))


def play_out(fleet: SimulatedFleet, jobs: Sequence[Job], seed: int = 0) -> Outcome:
    """Play jobs, and check that each of them ended."""
    simulation = Simulation(fleet, seed)
    outcome = simulation.run(jobs)
    assert_all_ended(simulation, outcome, jobs)
    return outcome


def times(outcome: Outcome) -> list[list[float]]:
    return [list(sample.times) for sample in outcome.samples]


def assert_all_ended(simulation: Simulation, outcome: Outcome, jobs: Sequence[Job]) -> None:
    """Check that every request ended once, with all its tokens or an error, and that no page is held."""
    assert len(outcome.samples) == len(jobs)
    assert not simulation.requests
    for sample, each in zip(outcome.samples, jobs, strict=True):
        assert sample.sent == each.due
        assert sample.ended >= sample.sent
        assert sample.error != "it never ended"
        assert len(sample.counts) == len(sample.times)
        assert list(sample.times) == sorted(sample.times)
        if sample.error is None:
            assert sample.output_tokens == each.output_tokens
    for replica in outcome.replicas:
        if replica.until is None:
            counts = replica.scheduler.pages.counts()
            assert counts.owned == counts.quarantined == 0
            assert counts.free + counts.cached == counts.total
            assert not replica.scheduler.table.requests()
    for name, replica in simulation.replicas.items():
        assert all(router.num_booked(name) == 0 for router in simulation.routers[replica.pool.model])


def assert_same_at_once_and_in_turn(fleet: SimulatedFleet, jobs: Sequence[Job]) -> None:
    """Check that every request ends, and that equal steps computed at once give the figures of single steps."""
    outcome = play_out(fleet, jobs, seed=3)
    in_turn = play(fleet, jobs, seed=3, at_once=False)
    assert times(in_turn) == times(outcome)
    found, same = (report.figures(each, DEFAULT_TARGETS) for each in (outcome, in_turn))
    assert json.dumps(found) == json.dumps(same)
