"""Measure the regret of the router's choices in simulation: what an oracle that knows the true seconds would gain.

    python benchmarks/routing/regret.py --requests 12

For some requests of each workload, plays all of it again with the request at every other replica, with and without a
fetch, and all else as before. The regret is its time to first token less the least of all these. Steps take
random times (`--noise`), which no router knows before. Exits with 1 if a workload's mean regret is 5 % or more of its
mean time to first token.
"""

import argparse
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from crossdock.cluster.bench.agents import Agents, agent_jobs
from crossdock.cluster.bench.workloads import Job, Segment
from crossdock.cluster.simulate import simulation
from crossdock.cluster.simulate.fleet import describe
from crossdock.router.fleet import Fleet
from crossdock.router.placement import Placement, Query
from crossdock.workers.report.presets import preset

REPLICAS = 3
SECONDS = 20.0
MOST_SHARE = 0.05  # of the mean time to first token


@dataclass(slots=True)
class ForcedFleet(Fleet):
    """A router that places one request where it is told to."""

    request: ClassVar[str] = ""
    replica: ClassVar[str] = ""
    shipping: ClassVar[str] = ""

    def choose(self, query: Query, now: float, exclude: Collection[str] = ()) -> Placement:
        """Return where a request should go."""
        if query.request_id != self.request or exclude:
            return Fleet.choose(self, query, now, exclude)
        config = self.config
        self.config = config.model_copy(update={"shipping": self.shipping})
        try:
            return Fleet.choose(self, query, now, [name for name in self.table.by_name if name != self.replica])
        finally:
            self.config = config


def agents(seed: int) -> Sequence[Job]:
    """Return agents whose conversations do not fit into all pools together."""
    return agent_jobs(Agents(scale=0.05).within(16_000), seed, 24)


def documents(seed: int) -> Iterator[Job]:
    """Yield questions about one of 24 documents of 2,000 to 12,000 tokens each."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2000, 12_000, 24)
    for number, due in enumerate(np.cumsum(rng.exponential(1 / 8, int(8 * SECONDS)))):
        which = int(rng.integers(24))
        prompt = (Segment(f"document {which}", int(lengths[which])), Segment(f"question {number}", 100))
        yield Job(prompt, 64, due=float(due))


def chats(seed: int) -> Iterator[Job]:
    """Yield requests that share no prefix."""
    rng = np.random.default_rng(seed)
    for number, due in enumerate(np.cumsum(rng.exponential(1 / 30, int(30 * SECONDS)))):
        yield Job((Segment(f"chat {number}", int(rng.integers(50, 2000))),), 64, due=float(due))


WORKLOADS: dict[str, Callable[[int], Sequence[Job] | Iterator[Job]]] = {
    "agents": agents,
    "documents": documents,
    "chats": chats,
}


def play(workload: str, noise: float, request: str = "", replica: str = "", shipping: str = "") -> list[float]:
    """Return the times to first token, in order of arrival. `request` is placed on `replica`."""
    size = {"num_pages": 1500, "max_model_len": 16_000}
    pool = {"name": "mixed", "replicas": REPLICAS, "profile": preset("h100-8b").model_copy(update=size)}
    fleet = describe({"pools": [pool | {"kv_cache_host_memory": "8GiB"}], "noise": noise})
    ForcedFleet.request, ForcedFleet.replica, ForcedFleet.shipping = request, replica, shipping
    with patch.object(simulation, "Fleet", ForcedFleet):
        outcome = simulation.Simulation(fleet).run(WORKLOADS[workload](0), SECONDS)
    return [sample.ttft if sample.times else float("inf") for sample in outcome.samples]


def regrets(workload: str, noise: float, count: int) -> tuple[float, list[float]]:
    """Return the mean time to first token, and the regrets of `count` requests, in seconds."""
    times = play(workload, noise)
    chosen = np.random.default_rng(1).choice(len(times) // 2, count, replace=False) + len(times) // 4
    found = []
    for number in map(int, chosen):
        others = [
            play(workload, noise, str(number), f"mixed/{replica}", shipping)[number]
            for replica in range(REPLICAS)
            for shipping in ("auto", "never")
        ]
        found.append(times[number] - min(times[number], *others))
    return fmean(times), found


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12, help="of each workload (default: %(default)s)")
    parser.add_argument("--noise", type=float, default=0.05, help="relative spread of steps (default: %(default)s)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="joined by commas (default: %(default)s)")
    args = parser.parse_args()
    out, worst = Table("workload", "TTFT mean, ms", "regret mean, ms", "share, %", "worst, ms"), 0.0
    for workload in args.workloads.split(","):
        mean, found = regrets(workload, args.noise, args.requests)
        share = fmean(found) / mean
        worst = max(worst, share)
        cells = (1000 * mean, 1000 * fmean(found), 100 * share, 1000 * max(found))
        out.add_row(workload, *(f"{cell:.1f}" for cell in cells))
    Console(width=100).print(out)
    return int(worst >= MOST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
