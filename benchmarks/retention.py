"""Which eviction of cached pages is best, how much could any gain, and does a divided cache serve as well as one?

    python benchmarks/retention.py --seeds 3                     # simulated, in two minutes
    python benchmarks/retention.py --only oracle --seeds 3
    python benchmarks/retention.py --only router --seeds 3

Loads: coding agents alone, the mix chat-heavy alone, and both. Each plays on pools of several sizes. A time to live
that is the same for all pages evicts in the order of `lru`, so there is no row for it.

`oracle`: `next use` knows when each session's next turn comes, and evicts the page whose next use is furthest in the
future (Belady's rule, optimal where pages cost the same). `kind of pause` is `value` with a label at each turn's end
that tells whether a tool runs, a person reads, or the session has ended. So the second shows what the best evidence of
a return could gain, and the first what any policy could.

`router`: agents on several replicas, with evictions counted in the router's sum and without. The second table of
`eviction` divides one cache among replicas: a router that keeps sessions together has the hit rate of one replica.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from math import inf
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table

from crossdock.cluster.bench.agents import Agents, agent_jobs
from crossdock.cluster.bench.metrics import hit_rate
from crossdock.cluster.bench.mix import MIXES, mix_jobs
from crossdock.cluster.bench.workloads import Job
from crossdock.cluster.simulate.fleet import SimulatedFleet, describe
from crossdock.cluster.simulate.presets import preset
from crossdock.cluster.simulate.requests import SimulatedRequest, token_ids
from crossdock.cluster.simulate.simulation import Outcome, Simulation
from crossdock.cluster.simulate.study import Estimate
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.memory.prefix_index import PageHash, hash_pages
from crossdock.workers.schedule.memory.retention import NO_HINT, LeastRecentlyUsed, LeastValuable, ReturnHint
from crossdock.workers.schedule.request import Submission

SECONDS = 400.0
SCALE = 0.05  # of agents' lengths: a session ends at 16,000 tokens, 1,000 pages
LOADS = {"16 agents": (16, 0.0), "6 chats/s": (0, 6.0), "16 agents, 3 chats/s": (16, 3.0), "1.5 chats/s": (0, 1.5)}
LONG_PAUSE_S = 15.0
CELLS = ("cached, %", "TTFT mean, ms", "p50", "p95", "p99")


def fleet(replicas: int, pages: int, eviction: str, **router: object) -> SimulatedFleet:
    """Return replicas like one H100 with an 8B model, each with so many pages of KV memory."""
    profile = preset("h100-8b").model_copy(update={"num_pages": pages, "max_model_len": min(131_072, 16 * pages)})
    pool = {"name": "mixed", "replicas": replicas, "profile": profile, "engine": {"prefix_eviction": eviction}}
    return describe({"pools": [pool], "router": router})


def jobs(agents: int, chats: float, context: int, seed: int) -> list[Job]:
    """Return the jobs of both loads in order of arrival."""
    chat_mix = mix_jobs(replace(MIXES["chat-heavy"].within(context), rate=chats), seed) if chats else iter(())
    found = list(takewhile(lambda job: (job.due or 0.0) < SECONDS, chat_mix))
    found += agent_jobs(Agents(scale=SCALE).within(context), seed, agents) if agents else []
    return sorted(found, key=lambda job: job.due or 0.0)


def play(
    simulated: SimulatedFleet,
    agents: int,
    chats: float,
    seeds: int,
    simulation: Callable[[SimulatedFleet, int], Simulation] = Simulation,
) -> Iterator[str]:
    """Yield the cells of a row: hits in percent, and times to first token in ms."""
    hits, times = [], list[list[float]]()
    context = simulated.pools[0].profile.max_model_len
    for seed in range(seeds):
        samples = simulation(simulated, seed).run(jobs(agents, chats, context, seed), SECONDS).samples
        hits.append(100 * (hit_rate(samples) or 0.0))
        times.append([1000 * sample.ttft for sample in samples if sample.ok])
    yield str(Estimate.of(hits))
    yield f"{fmean(map(fmean, times)):.1f}"
    for percent in (50, 95, 99):
        yield f"{fmean(float(np.percentile(each, percent)) for each in times):.1f}"


class Clairvoyant(LeastRecentlyUsed):
    """Evicts the page whose next use is furthest in the future; among equals the deepest."""

    def __init__(self, pool: PagePool, next_use: Callable[[PageHash], float]) -> None:
        super().__init__()
        self._pool = pool
        self._next_use = next_use
        self._parents: dict[int, int | None] = {}
        self._order: list[int] = []  # the next to be evicted is last; empty: unknown

    def index(self, page: int, parent: int | None) -> None:
        self._parents[page] = parent

    def add(self, pages: Sequence[int], hint: ReturnHint = NO_HINT) -> None:
        super().add(pages)
        self._order = []

    def share(self, pages: Sequence[int]) -> None:
        super().share(pages)
        self._order = []

    def evict(self) -> int:
        if not self._order:
            depths = {page: number for number, page in enumerate(reversed(self._pages))}  # released from their ends
            self._order = sorted(self._pages, key=lambda page: (self._time(page), depths[page]))
        page = self._order.pop()
        del self._pages[page]
        return page

    def _time(self, page: int) -> float:
        page_hash = self._pool._hash_of[page]
        assert page_hash is not None, "a cached page is indexed"
        return self._next_use(page_hash)


class ClairvoyantSimulation(Simulation):
    """A simulation whose replicas know when the next turn of every session comes."""

    def __init__(self, simulated: SimulatedFleet, seed: int) -> None:
        super().__init__(simulated, seed)
        self._uses: dict[PageHash, list[float]] = {}  # times of the turns to come that will ask for a page
        for replica in self.replicas.values():
            pages = replica.scheduler.pages
            pages.cached = Clairvoyant(pages, self._next_use)

    def run(self, jobs: Iterable[Job], until: float = inf) -> Outcome:
        known = list(jobs)
        for job in known:
            self._expect(job, job.due or 0.0)
        return super().run(known, until)

    def _next_use(self, page_hash: PageHash) -> float:
        return min(self._uses.get(page_hash, ()), default=inf)

    def _expect(self, job: Job, due: float) -> None:
        for page_hash in self._hashes(job):
            self._uses.setdefault(page_hash, []).append(due)

    def _over(self, request: SimulatedRequest, now: float, error: str | None = None, is_refused: bool = False) -> None:
        for follow_up in request.follow_ups:
            self._expect(follow_up.job, now + follow_up.pause_s)
        super()._over(request, now, error, is_refused)

    def _send(self, job: Job, now: float) -> None:
        for page_hash in self._hashes(job):
            uses = self._uses[page_hash]
            uses.remove(min(uses, key=lambda time: abs(time - now)))
            if not uses:
                del self._uses[page_hash]
        super()._send(job, now)

    def _hashes(self, job: Job) -> list[PageHash]:
        return hash_pages(token_ids(job), self.fleet.pools[0].engine.page_size)


class LabelledSimulation(Simulation):
    """A simulation whose replicas know after each turn whether its session pauses for a short or a long time, or ends.

    Every kind of pause is a hint that `value` learns apart from the others.
    """

    def __init__(self, simulated: SimulatedFleet, seed: int) -> None:
        super().__init__(simulated, seed)
        for replica in self.replicas.values():
            cached = replica.scheduler.pages.cached
            assert isinstance(cached, LeastValuable)
            cached._hints._most_pages = simulated.pools[0].profile.num_pages

    def _submission(self, name: str, job: Job, slo_class: str) -> Submission:
        continued = [each.pause_s for each in job.follow_ups if each.job.prompt[: len(job.prompt)] == job.prompt]
        pause = min(continued, default=inf)
        kind = "ends" if pause == inf else "long" if pause > LONG_PAUSE_S else "short"
        return replace(super()._submission(name, job, slo_class), tenant=kind, returns_within_s=1.0)


class HintingSimulation(Simulation):
    """A simulation in which agents give the hint of Anthropic's clients, 5 minutes, and chats give none."""

    def _submission(self, name: str, job: Job, slo_class: str) -> Submission:
        seconds = 300.0 if job.prompt[0].key.startswith("system/") else 0.0
        return replace(super()._submission(name, job, slo_class), returns_within_s=seconds)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="simulations of each row (default: %(default)s)")
    parser.add_argument("--only", choices=list(TABLES), help="one part")
    args = parser.parse_args()
    for name, table in TABLES.items():
        if args.only in (None, name):
            table(args.seeds)


def eviction(seeds: int) -> None:
    """Print how the policies compare on one replica, and what becomes of a divided cache."""
    out = Table("load", "pages", "eviction", *CELLS, title="One replica")
    for name, (agents, chats) in LOADS.items():
        for pages in (1500, 3000, 5000):
            for policy in ("lru", "value"):
                out.add_row(name, str(pages), policy, *play(fleet(1, pages, policy), agents, chats, seeds))
    Console(width=110).print(out)
    out = Table("replicas", "pages of each", "policy", *CELLS, title="16 agents, one cache divided among replicas")
    for replicas, policy in ((1, "seconds"), *((n, p) for n in (2, 4) for p in ("seconds", "prefix-affinity"))):
        simulated = fleet(replicas, 6000 // replicas, "lru", policy=policy)
        out.add_row(str(replicas), str(6000 // replicas), policy, *play(simulated, 16, 0.0, seeds))
    Console(width=110).print(out)


def oracle(seeds: int) -> None:
    """Print what knowledge of the future gains on one replica."""
    out = Table("load", "pages", "eviction", *CELLS, title="One replica, and what is known of the future")
    for name, (agents, chats) in LOADS.items():
        for pages in (1500, 3000) if agents else (3000,):
            for policy, (engine, kind) in KNOWLEDGE.items():
                simulated = fleet(1, pages, engine)
                out.add_row(name, str(pages), policy, *play(simulated, agents, chats, seeds, kind))
    Console(width=110).print(out)


def router(seeds: int) -> None:
    """Print what the price of evictions changes on several replicas."""
    out = Table("replicas", "agents", "pages of each", "evictions", *CELLS, title="The price of evictions")
    for replicas, agents, pages in ((4, 16, 1500), (4, 32, 1500), (8, 64, 1500), (16, 128, 1500), (4, 32, 3000)):
        for evictions in ("ignored", "priced"):
            simulated = fleet(replicas, pages, "lru", evictions=evictions)
            cells = play(simulated, agents, 0.0, seeds)
            out.add_row(str(replicas), str(agents), str(pages), evictions, *cells)
    Console(width=110).print(out)


KNOWLEDGE: dict[str, tuple[str, type[Simulation]]] = {
    "lru": ("lru", Simulation),
    "value": ("value", Simulation),
    "value, hints of agents": ("value", HintingSimulation),
    "value, kind of pause": ("value", LabelledSimulation),
    "next use": ("lru", ClairvoyantSimulation),
}
TABLES = {"eviction": eviction, "oracle": oracle, "router": router}

if __name__ == "__main__":
    main()
