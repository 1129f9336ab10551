"""Measure the regret of the router's choices in simulation: what an oracle that knows the true seconds would gain.

    python benchmarks/routing/regret.py --requests 40

At some requests of each workload the simulation forks: in each child the request goes to one of the replicas, with or
without a fetch, with all else as it was, until it and all requests that wait with it have their first tokens. The cost
of a choice is the seconds until these first tokens, of all together, plus the seconds that the replica computes the
prompt, since requests that come later wait for them. The regret of a choice is its cost less the least cost. Steps take
random times (`--noise`), which no router knows before; nor does it know the requests that come later, which `--known`
refuses in each child. Exits with 1 if a workload's mean regret is 5 % or more of its mean time to first token. The
column `unseen` leaves out the requests that wait, as if a prompt delayed none of them; records before 2026-11-30 have
this share. The column `alone` has the seconds until the own first token alone, which a router for one client would
minimise.
"""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import inf
from statistics import fmean
from typing import ClassVar, NamedTuple
from unittest.mock import patch

import numpy as np
from fetching import chats
from rich.console import Console
from rich.table import Table

from crossdock.cluster.bench.agents import Agents, agent_jobs
from crossdock.cluster.bench.workloads import Job, Segment
from crossdock.cluster.simulate import simulation
from crossdock.cluster.simulate.fleet import SimulatedFleet, describe
from crossdock.router.fleet import Fleet
from crossdock.router.placement import Candidates, Options, Placement
from crossdock.router.query import Query
from crossdock.workers.report.presets import preset
from crossdock.workers.schedule.request.submission import Overloaded

REPLICAS = 3
SECONDS = 20.0
MOST_SHARE = 0.05  # of the mean time to first token


class Way(NamedTuple):
    """Seconds that one choice takes."""

    predicted: float  # to the first token
    true: float = inf
    work: float = 0.0  # of the replica, for the part of the prompt that it computed
    others: float = 0.0  # to the first tokens of the requests that wait, of all together


@dataclass(slots=True)
class Decision:
    """One choice of the router, and what it and every other choice took."""

    chosen: str = ""
    ways: dict[str, "Way"] = field(default_factory=dict)

    def regret(self, cost: Callable[[Way], float]) -> float:
        """Return the seconds that the choice of least `cost` would have saved."""
        return cost(self.ways[self.chosen]) - min(map(cost, self.ways.values()))


def whole(way: Way) -> float:
    """Return the whole cost of a choice: to its own request, to requests that wait, and to requests that come later."""
    return way.true + way.work + way.others


def unseen(way: Way) -> float:
    """Return the cost of a choice without the requests that wait."""
    return way.true + way.work


def alone(way: Way) -> float:
    """Return the seconds to the first token of the request alone."""
    return way.true


@dataclass(slots=True)
class Child:
    """A simulation in which one request went where its parent wanted."""

    report: int  # file to write its seconds to
    request: str
    sent: float
    waiting: set[str]  # requests without a first token, this one too
    way: list[float] = field(default_factory=list)  # once it has its first token: seconds until then, and of work
    others: float = 0.0

    def ends(self, request_id: str, now: float) -> None:
        """Note that a request waits no more. End this process, which reports first, where none waits."""
        self.waiting.remove(request_id)
        if request_id != self.request:
            self.others += now - self.sent
        if not self.waiting:
            os.write(self.report, " ".join(map(str, [*self.way, self.others])).encode())
            os._exit(0)


@dataclass(slots=True)
class ForkingFleet(Fleet):
    """A router that tries each replica for some requests, in a child process for each."""

    decisions: ClassVar[dict[str, Decision]] = {}  # by request
    simulated: ClassVar[simulation.Simulation]
    knows_all: ClassVar[bool] = False  # in a child, requests that come later are refused
    _child: Child | None = None

    def choose(self, query: Query, now: float, exclude: Collection[str] = ()) -> Placement:
        """Return where a request should go, in a child where its parent wants the request."""
        if self.knows_all and self._child is not None and query.request_id != self._child.request:
            raise Overloaded("comes later", retry_after=1.0)
        placement = Fleet.choose(self, query, now, exclude)
        decision = self.decisions.get(query.request_id)
        if self._child is not None or decision is None or decision.chosen:
            return placement
        decision.chosen = _described(placement)
        for replica in sorted(self.table.by_name):
            for shipping in ("never", "auto"):
                other = self._at(replica, shipping, query, now)
                if _described(other) in decision.ways:
                    continue
                reader, writer = os.pipe()
                if not os.fork():
                    self._child = Child(writer, query.request_id, now, {query.request_id, *self._waiting()})
                    return other
                os.close(writer)
                with os.fdopen(reader) as pipe:
                    decision.ways[_described(other)] = Way(other.predicted_ttft, *map(float, pipe.read().split()))
                os.wait()
        return placement

    def first_token(self, request_id: str) -> None:
        """Note the seconds of a child's request that has its first token."""
        child = self._child
        if child is not None and request_id == child.request and not child.way:
            replica, *_ = self._replicas_of(request_id)
            request = self.simulated.replicas[replica.name].scheduler.table.request(request_id)
            profile, num_tokens = replica.profile, request.num_prompt_tokens
            work = profile.cost.prefill_seconds(request.num_cached_tokens, num_tokens, profile.max_num_batched_tokens)
            child.way = [self.simulated.clock.now - child.sent, work]
        self._end(request_id)
        Fleet.first_token(self, request_id)

    def settle(self, request_id: str) -> None:
        """Note that another request has ended, which may have had no token."""
        if self._child is not None and request_id != self._child.request:
            self._end(request_id)
        Fleet.settle(self, request_id)

    def _end(self, request_id: str) -> None:
        if self._child is not None and request_id in self._child.waiting:
            self._child.ends(request_id, self.simulated.clock.now)

    def _waiting(self) -> set[str]:
        """Return the requests that have no first token."""
        loads = [{**each.pending, **each.included} for each in self.table.by_name.values()]
        return {request_id for each in loads for request_id, load in each.items() if not load.has_first}

    def _with_prefixes(self, query: Query, now: float, candidates: Candidates, exclude: Collection[str]) -> Options:
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


WORKLOADS: dict[str, Callable[[int], Sequence[Job] | Iterator[Job]]] = {
    "agents": agents,
    "documents": documents,
    "chats": partial(chats, rate=30, seconds=SECONDS),
}


def run_forking(
    fleet: SimulatedFleet, jobs: Sequence[Job] | Iterator[Job], seconds: float, decisions: dict[str, Decision]
) -> simulation.Outcome:
    """Simulate a fleet, and fill in the decisions about some requests."""
    ForkingFleet.decisions = decisions
    with patch.object(simulation, "Fleet", ForkingFleet):
        ForkingFleet.simulated = simulation.Simulation(fleet)
        return ForkingFleet.simulated.run(jobs, seconds)


def play(
    workload: str, seed: int, noise: float, num_pages: int, requests: Sequence[int] = ()
) -> tuple[list[float], list[Decision]]:
    """Return the times to first token, in order of arrival, and the decisions about some requests."""
    size = {"num_pages": num_pages, "max_model_len": 16_000}
    pool = {"name": "mixed", "replicas": REPLICAS, "profile": preset("h100-8b").model_copy(update=size)}
    fleet = describe({"pools": [pool | {"kv_cache_host_memory": "8GiB"}], "noise": noise})
    decisions = {str(number): Decision() for number in requests}
    outcome = run_forking(fleet, WORKLOADS[workload](seed), SECONDS, decisions)
    return [sample.ttft if sample.times else inf for sample in outcome.samples], list(decisions.values())


def pulls(names: Sequence[str], lengths: Sequence[int]) -> Table:
    """Return a table: the seconds to the first token of a prompt whose prefix another replica has."""
    out = Table("profile", "tokens", "there, ms", "computed, ms", "fetched, ms", "fetched, predicted")
    ForkingFleet.knows_all = True
    for name, tokens in product(names, lengths):
        profile = preset(name).model_copy(update={"max_model_len": tokens + 1000})
        fleet = describe({"pools": [{"name": "mixed", "replicas": 2, "profile": profile}]})
        jobs = [Job((Segment("document", tokens), Segment(str(i), 16)), 8, due=60.0 * i) for i in range(2)]
        run_forking(fleet, jobs, 70.0, {"1": (decision := Decision())})
        there, computed, fetched = decision.ways.values()
        seconds = there.true, computed.true, fetched.true, fetched.predicted
        out.add_row(name, str(tokens), *(f"{1000 * each:.0f}" for each in seconds))
    return out


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40, help="of each workload (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="histories of each workload (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="of these histories (default: %(default)s)")
    parser.add_argument("--noise", type=float, default=0.05, help="relative spread of steps (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=1500, help="of each replica (default: %(default)s)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="joined by commas (default: %(default)s)")
    parser.add_argument("--known", action="store_true", help="refuse later requests while the choices are compared")
    parser.add_argument(
        "--pull", help="profiles: only print whether they compute or fetch 2k, 8k and 48k tokens sooner"
    )
    args = parser.parse_args()
    if args.pull:
        Console().print(pulls(args.pull.split(","), (2000, 8000, 48_000)))
        return 0
    ForkingFleet.knows_all = args.known
    columns = ("workload", "TTFT mean, ms", "regret mean, ms", "share, %", "worst, ms", "unseen, %", "alone, %")
    out, worst = Table(*columns), 0.0
    for workload in args.workloads.split(","):
        times, decisions = list[float](), list[Decision]()
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            all_times, _ = play(workload, seed, args.noise, args.pages)
            chosen = np.random.default_rng(1).choice(len(all_times), min(args.requests, len(all_times)), replace=False)
            times += all_times
            some = play(workload, seed, args.noise, args.pages, [int(number) for number in chosen])[1]
            regret = fmean(each.regret(whole) for each in some) / fmean(all_times)
            print(workload, seed, f"{100 * regret:.1f} %", flush=True)
            decisions += some
        mean, most = fmean(times), max(each.regret(whole) for each in decisions)
        regrets = [fmean(each.regret(cost) for each in decisions) for cost in (whole, unseen, alone)]
        shares = [100 * regret / mean for regret in regrets]
        worst = max(worst, shares[0] / 100)
        cells = (1000 * mean, 1000 * regrets[0], shares[0], 1000 * most, *shares[1:])
        out.add_row(workload, *(f"{cell:.1f}" for cell in cells))
    Console().print(out)
    return int(worst >= MOST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
