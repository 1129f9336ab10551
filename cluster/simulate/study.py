"""Comparisons of simulations: policies over several seeds, with confidence intervals, and pools of every ratio."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, stdev

from crossdock.cluster.bench.metrics import Targets, by_class, hit_rate
from crossdock.cluster.bench.workloads import Job
from crossdock.cluster.simulate.fleet import SimulatedFleet, SimulatedPool
from crossdock.cluster.simulate.simulation import Outcome, Simulation

# Student's t at 97.5 %, by degrees of freedom from 1 on.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, and half of its 95 % confidence interval (Student's t); None with one seed."""

    mean: float
    margin: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        if len(values) < 2:
            return cls(fmean(values), None)
        t = _T[min(len(values) - 1, len(_T)) - 1]  # beyond the table: a little too wide
        return cls(fmean(values), t * stdev(values) / sqrt(len(values)))

    def __str__(self) -> str:
        return f"{self.mean:.4g}" + ("" if self.margin is None else f" ± {self.margin:.2g}")


@dataclass(frozen=True, slots=True)
class Score:
    """The figures by which runs are compared."""

    good: float  # share of requests whose promises were kept
    weighted: float  # the same, each request weighted by its class
    refused: float  # share
    ttft_p99: float  # ms, of the most urgent class that requests had
    tpot_p99: float
    hit_rate: float  # share of prompt tokens that were in a prefix cache

    @classmethod
    def of(cls, outcome: Outcome, targets: Targets) -> "Score":
        found = by_class(outcome.samples, outcome.duration, targets)
        classes = found["classes"]
        weights = {slo.name: slo.weight for slo in outcome.fleet.classes}
        counts = {name: _answered(row) * weights.get(name, 1.0) for name, row in classes.items()}
        good = sum(classes[name]["goodput"]["share"] * count for name, count in counts.items() if name in targets)
        urgent = next(slo.name for slo in outcome.fleet.classes if slo.name in classes)
        return cls(
            good=found["goodput"]["share"],
            weighted=good / max(sum(counts.values()), 1e-9),
            refused=sum(row["requests_refused"] for row in classes.values()) / max(len(outcome.samples), 1),
            ttft_p99=classes[urgent]["ttft_ms"].get("p99", float("inf")),
            tpot_p99=classes[urgent]["tpot_ms"].get("p99", float("inf")),
            hit_rate=hit_rate(outcome.samples) or 0.0,
        )


def _answered(row: dict[str, int]) -> int:
    return row["requests_ok"] + row["requests_refused"] + row["requests_failed"]


def scores(
    fleets: Iterable[tuple[str, SimulatedFleet]],
    seeds: Sequence[int],
    jobs: Callable[[int], Iterable[Job]],
    targets: Targets,
    on_done: Callable[[str, int, Score], None] = lambda *_: None,
    until: float = inf,
) -> dict[str, list[Score]]:
    """Return the scores of every fleet, by name, one for each seed; all fleets get the same jobs.

    No follow-up of a job begins at `until` seconds or later.
    """
    found: dict[str, list[Score]] = {}
    for name, fleet in fleets:
        for seed in seeds:
            score = Score.of(Simulation(fleet, seed).run(jobs(seed), until), targets)
            found.setdefault(name, []).append(score)
            on_done(name, seed, score)
    return found


def routed(fleet: SimulatedFleet, setting: str, values: Sequence[str]) -> Iterator[tuple[str, SimulatedFleet]]:
    """Yield each value, and the fleet with that value of a setting of its router."""
    for value in values:
        router = type(fleet.router).model_validate({**fleet.router.model_dump(), setting: value})
        yield value, fleet.model_copy(update={"router": router})


def ratios(fleet: SimulatedFleet, most: int = 16) -> Iterator[tuple[str, SimulatedFleet]]:
    """Yield the fleet's number of replicas, all like those of its first pool: first all mixed, then split between
    prefill and decode in up to `most` ways.

    Raises:
        ValueError: there are fewer than two replicas.
    """
    total = sum(pool.replicas for pool in fleet.pools)
    if total < 2:
        raise ValueError(f"sweep: there is nothing to split in {total} replicas")
    kind = fleet.pools[0]
    yield f"mixed {total}", fleet.model_copy(update={"pools": (_pool(kind, "mixed", total),)})
    splits = sorted({max(1, min(total - 1, round(total * (n + 1) / (most + 1)))) for n in range(most)})
    for prefill in splits if total > most else range(1, total):
        pools = (_pool(kind, "prefill", prefill), _pool(kind, "decode", total - prefill))
        yield f"prefill {prefill} : decode {total - prefill}", fleet.model_copy(update={"pools": pools})


def _pool(kind: SimulatedPool, role: str, replicas: int) -> SimulatedPool:
    profile = kind.profile.model_copy(update={"role": role})
    return kind.model_copy(
        update={"name": role, "role": role, "replicas": replicas, "max_replicas": None, "profile": profile}
    )
