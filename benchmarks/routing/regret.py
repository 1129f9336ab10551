"""Measure the regret of the router's choices in simulation: what an oracle that knows the true seconds would gain.

    python benchmarks/routing/regret.py --requests 40 --worst 10

At some requests of each workload the simulation forks: in each child the request goes to one of the replicas, with or
without a fetch, with all else as it was, until its first token. The regret is its time to first token less the least of
all these. Steps take random times (`--noise`), which no router knows before; nor does it know the requests that come
later, which `--known` refuses in each child. Exits with 1 if a workload's mean regret is 5 % or more of its mean time
to first token.
"""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
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
from crossdock.router.fleet import Fleet, _Ways
from crossdock.router.placement import Candidates, Placement, Query
from crossdock.workers.report.presets import preset
from crossdock.workers.schedule.submission import Overloaded

REPLICAS = 3
SECONDS = 20.0
MOST_SHARE = 0.05  # of the mean time to first token


@dataclass(slots=True)
class Decision:
    """One choice of the router, and what it and every other choice took."""

    seed: int
    request: int
    chosen: str = ""
    others: dict[str, tuple[float, float]] = field(default_factory=dict)  # predicted and true TTFT of each, in seconds
    true: float = inf  # seconds, of the chosen one

    @property
    def regret(self) -> float:
        """Return the seconds that the best choice would have saved."""
        return self.true - min([self.true, *(true for _, true in self.others.values())])


@dataclass(slots=True)
class ForkingFleet(Fleet):
    """A router that tries each replica for some requests, in a child process for each."""

    decisions: ClassVar[dict[str, Decision]] = {}  # by request
    clock: ClassVar[simulation.Clock]
    knows_all: ClassVar[bool] = False  # in a child, requests that come later are refused
    _report: int = -1  # in a child: where to write the seconds of its request
    _request: str = ""
    _sent: float = 0.0

    def choose(self, query: Query, now: float, exclude: Collection[str] = ()) -> Placement:
        """Return where a request should go, in a child where its parent wants the request."""
        if self.knows_all and self._report >= 0 and query.request_id != self._request:
            raise Overloaded("comes later", retry_after=1.0)
        placement = Fleet.choose(self, query, now, exclude)
        decision = self.decisions.get(query.request_id)
        if self._report >= 0 or decision is None or decision.chosen:
            return placement
        decision.chosen = _described(placement)
        for replica in sorted(self.table.by_name):
            for shipping in ("never", "auto"):
                other = self._at(replica, shipping, query, now)
                if _described(other) in decision.others:
                    continue
                reader, writer = os.pipe()
                if not os.fork():
                    self._report, self._request, self._sent = writer, query.request_id, now
                    return other
                os.close(writer)
                with os.fdopen(reader) as pipe:
                    decision.others[_described(other)] = other.predicted_ttft, float(pipe.read() or inf)
                os.wait()
        return placement

    def first_token(self, request_id: str) -> None:
        """End a child whose request has its first token."""
        if request_id == self._request:
            os.write(self._report, str(self.clock.now - self._sent).encode())
            os._exit(0)
        Fleet.first_token(self, request_id)

    def _with_prefixes(self, query: Query, now: float, candidates: Candidates, exclude: Collection[str]) -> _Ways:
        """Let replicas on which the request must not be placed send pages."""
        return Fleet._with_prefixes(self, query, now, candidates, ())

    def _at(self, replica: str, shipping: str, query: Query, now: float) -> Placement:
        """Return the placement of a request on one replica."""
        config, self.config = self.config, self.config.model_copy(update={"shipping": shipping})
        try:
            return Fleet.choose(self, query, now, [name for name in self.table.by_name if name != replica])
        finally:
            self.config = config


def _described(placement: Placement) -> str:
    ways = [word for word in placement.reason.split() if word in ("fetched", "loaded")]
    return " ".join([placement.decode, f"{placement.cached_tokens} cached", *ways])


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


def play(
    workload: str, seed: int, noise: float, num_pages: int, requests: Sequence[int] = ()
) -> tuple[list[float], list[Decision]]:
    """Return the times to first token, in order of arrival, and the decisions about some requests."""
    size = {"num_pages": num_pages, "max_model_len": 16_000}
    pool = {"name": "mixed", "replicas": REPLICAS, "profile": preset("h100-8b").model_copy(update=size)}
    fleet = describe({"pools": [pool | {"kv_cache_host_memory": "8GiB"}], "noise": noise})
    decisions = ForkingFleet.decisions = {str(number): Decision(seed, number) for number in requests}
    with patch.object(simulation, "Fleet", ForkingFleet):
        simulated = simulation.Simulation(fleet)
        ForkingFleet.clock = simulated.clock
        outcome = simulated.run(WORKLOADS[workload](seed), SECONDS)
    times = [sample.ttft if sample.times else inf for sample in outcome.samples]
    for decision in decisions.values():
        known = decision.others.get(decision.chosen) if ForkingFleet.knows_all else None
        decision.true = known[1] if known is not None else times[decision.request]
    return times, list(decisions.values())


def main() -> int:
    """Print a table, and the worst decisions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40, help="of each workload (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="histories of each workload (default: %(default)s)")
    parser.add_argument("--worst", type=int, default=0, help="decisions to print (default: %(default)s)")
    parser.add_argument("--noise", type=float, default=0.05, help="relative spread of steps (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=1500, help="of each replica (default: %(default)s)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="joined by commas (default: %(default)s)")
    parser.add_argument("--known", action="store_true", help="refuse later requests while the choices are compared")
    args = parser.parse_args()
    ForkingFleet.knows_all = args.known
    out, worst, console = Table("workload", "TTFT mean, ms", "regret mean, ms", "share, %", "worst, ms"), 0.0, Console()
    for workload in args.workloads.split(","):
        times, decisions = list[float](), list[Decision]()
        for seed in range(args.seeds):
            all_times, _ = play(workload, seed, args.noise, args.pages)
            chosen = np.random.default_rng(1).choice(len(all_times), min(args.requests, len(all_times)), replace=False)
            times += all_times
            some = play(workload, seed, args.noise, args.pages, [int(number) for number in chosen])[1]
            print(workload, seed, f"{100 * fmean(d.regret for d in some) / fmean(all_times):.1f} %")
            decisions += some
        mean, regret = fmean(times), fmean(decision.regret for decision in decisions)
        worst = max(worst, regret / mean)
        cells = (1000 * mean, 1000 * regret, 100 * regret / mean, 1000 * max(each.regret for each in decisions))
        out.add_row(workload, *(f"{cell:.1f}" for cell in cells))
        for each in sorted(decisions, key=lambda each: -each.regret)[: args.worst]:
            console.print(f"{workload} {each.seed}/{each.request}: {each.chosen} took {1000 * each.true:.1f} ms")
            for way, (predicted, true) in each.others.items():
                console.print(f"    {way}: predicted {1000 * predicted:.1f}, true {1000 * true:.1f} ms")
    console.print(out)
    return int(worst >= MOST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
