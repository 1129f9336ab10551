"""Compare, in simulation on the costs of GPUs, this router with others that keep conversations where their pages are.

    python benchmarks/routing/fetching.py --seeds 2
    python benchmarks/routing/fetching.py --highest      # 20 minutes for each load

First, one prompt whose prefix is on another replica, at several rates of its link: predicted seconds to its first
token, computed, fetched, and cut: computed from its beginning while it is fetched from its end.
Then loads on fleets whose pools are too small for them, with host memory below. Each row plays the same requests. The
last column is the goodput: requests a second whose first token comes within 1 s and whose tokens come within 50 ms.
`--highest` finds, for each router, the highest load at which 95 % of requests are such, in place of all this.

`pinned` does what ConServe does (arXiv 2606.01839): a conversation's first turn goes to the replica on which the fewest
tokens of conversations lie, and all later turns go to the same replica. `prefix-affinity` is SGLang's choice.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np
from rich.console import Console
from rich.table import Table

from crossdock.cluster.bench.agents import Agents, agent_jobs
from crossdock.cluster.bench.metrics import hit_rate
from crossdock.cluster.bench.workloads import Job, Segment
from crossdock.cluster.simulate import simulation
from crossdock.cluster.simulate.fleet import SimulatedFleet, describe
from crossdock.router.fleet import Fleet
from crossdock.router.placement import HANDOVER_S, Placement
from crossdock.router.query import Query
from crossdock.workers.report.live_profile import LiveProfile, PageChanges, Prefills, Prompts, Room
from crossdock.workers.report.presets import preset
from crossdock.workers.schedule.request.page_hashes import PageHash, hash_pages

SECONDS = 300.0
LENGTH = 16_000  # tokens at which a session ends: 1,000 pages
SYSTEM_PAGES = 80  # of a session's beginning, which others share
PRESETS = ("h100-8b", "h100-70b")
LENGTHS = (2048, 8192, 49_152)  # tokens of a prefix
RATES = (1.25e9, 12.5e9, 50e9)  # bytes a second of a link
ROUTERS: dict[str, dict[str, str]] = {
    "seconds": {},
    "without fetches": {"shipping": "never"},
    "prefix-affinity": {"policy": "prefix-affinity"},
    "pinned": {"shipping": "never"},
}
TTFT_S, TPOT_S = 1.0, 0.05  # of a good request
MOST_BAD, SEARCH_SECONDS = 0.05, 60.0  # of a load that a fleet bears; simulated


@dataclass(slots=True)
class PinnedFleet(Fleet):
    """A router that leaves each conversation on the replica of its first turn."""

    _replica_of: dict[PageHash, str] = field(default_factory=dict)  # by the last page of each turn
    _tokens_of: dict[PageHash, int] = field(default_factory=dict)  # the same

    def choose(self, query: Query, now: float, exclude: Collection[str] = ()) -> Placement:
        """Return the replica of the conversation's turn before, or the one with the fewest tokens of conversations."""
        own = query.page_hashes[SYSTEM_PAGES:]
        before = next((each for each in reversed(own) if each in self._replica_of), None)
        name = self._replica_of.pop(before) if before is not None else self._emptiest(exclude)
        self._tokens_of.pop(before or b"", None)
        if own:
            self._replica_of[own[-1]], self._tokens_of[own[-1]] = name, query.num_tokens
        return Fleet.choose(self, query, now, {*exclude, *(set(self.table.by_name) - {name})} - {name})

    def _emptiest(self, exclude: Collection[str]) -> str:
        tokens = Counter({name: 0 for name in self.table.by_name if name not in exclude})
        for page_hash, name in self._replica_of.items():
            tokens[name] += self._tokens_of[page_hash]
        return min(tokens, key=lambda name: tokens[name])


def fleet(names: Sequence[str], router: dict[str, str], host: str = "0B", **changes: int) -> SimulatedFleet:
    """Return replicas like those of presets, each with a pool of its own kind."""
    pools: list[dict[str, Any]] = [
        {
            "name": each,
            "role": "mixed",
            "replicas": count,
            "profile": preset(each).model_copy(update=changes),
            "kv_cache_host_memory": host,
        }
        for each, count in Counter(names).items()
    ]
    return describe({"pools": pools, "router": router})


def one_prompt(name: str, tokens: int, rate: float) -> tuple[float, float, float]:
    """Return the predicted seconds to the first token of a prompt: computed, fetched, and cut.

    Its prefix of `tokens` tokens is on another replica, which is busy for 20 s and sends `rate` bytes a second.
    Cut, the replica computes all the time; fetched, it computes the last 32 tokens."""
    profile = preset(name).model_copy(update={"peer": b"a dock", "compatibility": "one", "bytes_per_second": rate})
    router, hashes = Fleet(), hash_pages(range(tokens + 32), profile.page_size)
    num_classes = len(profile.slo_classes)
    room = Room((64,) * num_classes, (20_000,) * num_classes)
    for replica, prompts in (("holder", (Prompts(0, 6, 4, 400_000, 20.0),)), ("other", ())):
        router.join(replica, profile, 0.0)
        router.hear(replica, LiveProfile("first", 1, prefills=Prefills(prompts), room=room), 0.0)
    router.hear_pages("holder", PageChanges("first", 1, hashes[: tokens // profile.page_size]))
    computed = router.choose(Query("prompt", tokens + 32, hashes), 0.0).alternatives["compute"]
    rest = profile.cost.chunk_step_seconds(tokens, 32)
    travel = tokens / profile.page_size * profile.page_bytes / rate
    wait, saved = HANDOVER_S + travel, computed - rest
    return computed, rest + wait, rest + saved * wait / (saved + travel)


def agents(seed: int, count: float) -> Sequence[Job]:
    """Return so many agents, whose sessions end at 16,000 tokens."""
    return agent_jobs(Agents().within(LENGTH), seed, int(count))


def chats(seed: int, rate: float, seconds: float = 30.0) -> Iterator[Job]:
    """Yield requests that share no prefix, at random times."""
    rng = np.random.default_rng(seed)
    for number, due in enumerate(np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))):
        yield Job((Segment(f"{seed}/{number}", int(rng.integers(50, 2000))),), 64, due=float(due))


LIKE, UNLIKE = ("h100-8b",) * 4, ("h100-8b", "h100-8b", "a100-8b", "l4-8b")
SMALL = {"num_pages": 1500, "max_model_len": LENGTH}
LOADS: dict[str, tuple[Callable[[int, float], Any], Sequence[float], Sequence[str], str, dict[str, int]]] = {
    "agents": (agents, (256, 2000), LIKE, "8GiB", SMALL),
    "agents, unlike GPUs": (agents, (128, 1300), UNLIKE, "8GiB", SMALL),
    "chats a second": (chats, (60, 240), LIKE, "8GiB", {"num_pages": 20_000}),
}


def played(name: str, simulated: SimulatedFleet, seeds: Sequence[Any], seconds: float) -> list[simulation.Outcome]:
    """Play each load once, with one of the routers."""
    with patch.object(simulation, "Fleet", PinnedFleet if name == "pinned" else Fleet):
        return [simulation.Simulation(simulated, seed).run(jobs, seconds) for seed, jobs in enumerate(seeds)]


def num_good(outcomes: Sequence[simulation.Outcome]) -> tuple[int, float, float]:
    """Return how many requests were good, their share, and how many there were in a second."""
    samples = [sample for each in outcomes for sample in each.samples]
    seconds = sum(max(sample.ended for sample in each.samples) for each in outcomes)
    good = sum(each.ok and each.ttft <= TTFT_S and (each.tpot or 0.0) <= TPOT_S for each in samples)
    return good, good / len(samples), good / seconds


def row(name: str, simulated: SimulatedFleet, loads: Sequence[Any], seconds: float) -> list[str]:
    """Return the cells of a row: hits in percent, fetches in percent, TTFT in ms, and good requests."""
    outcomes = played(name, simulated, loads, seconds)
    times = [1000 * sample.ttft for each in outcomes for sample in each.samples if sample.ok]
    reasons = Counter(word for each in outcomes for placed in each.placed for word in placed.reason.split())
    _, share, goodput = num_good(outcomes)
    cells = [100 * fmean(hit_rate(each.samples) or 0.0 for each in outcomes), 100 * reasons["fetched"] / len(times)]
    cells += [fmean(times), *np.percentile(times, (50, 95)), 100 * share]
    return [f"{cell:.1f}" if cell < 100 else f"{cell:.0f}" for cell in cells] + [f"{goodput:.2f}"]


def highest(name: str, load: str) -> tuple[int, float]:
    """Return the highest load that a router bears, by bisection, and its good requests a second."""
    jobs, (low, most), names, host, sizes = LOADS[load]
    found, high = (0, 0.0), most
    for _ in range(5):
        amount = round((low * high) ** 0.5)
        simulated = fleet(names, ROUTERS[name], host, **sizes)
        _, share, goodput = num_good(played(name, simulated, [jobs(0, amount)], SEARCH_SECONDS))
        if share >= 1 - MOST_BAD:
            found, low = (amount, goodput), amount
        else:
            high = amount
    if high == most:
        raise SystemExit(f"{name} bears all loads of {load} that were tried: raise the bound in LOADS")
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="simulations of each row (default: %(default)s)")
    parser.add_argument("--loads", default=";".join(LOADS), help="joined by semicolons (default: %(default)s)")
    parser.add_argument("--amounts", type=float, nargs="+", default=[48, 72], help="of each load (default: 48 72)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each simulation (default: %(default)s)")
    parser.add_argument("--highest", action="store_true", help="find the highest load that each router bears")
    args, console = parser.parse_args(), Console(width=120)
    if args.highest:
        names = [name for name in ROUTERS if name != "without fetches"]
        out = Table("load", *names, "the best other", title="Highest load, and good requests a second")
        for load in args.loads.split(";"):
            found = {name: highest(name, load) for name in names}
            ours, *others = [goodput for _, goodput in found.values()]
            cells = (f"{amount}: {goodput:.2f}" for amount, goodput in found.values())
            out.add_row(load, *cells, f"{ours / max(others):.2f} x")
        console.print(out)
        return
    out = Table("replica", "tokens", "GB/s", "computed, ms", "fetched", "cut", title="One prompt")
    for name, tokens, rate in product(PRESETS, LENGTHS, RATES):
        seconds = one_prompt(name, tokens, rate)
        out.add_row(name, f"{tokens:,}", f"{rate / 1e9:.4g}", *(f"{1000 * each:.0f}" for each in seconds))
    console.print(out)
    cells = ("cached, %", "fetched, %", "TTFT mean, ms", "p50", "p95", "good, %", "good /s")
    for load in args.loads.split(";"):
        jobs, _, kinds, host, sizes = LOADS[load]
        out = Table("load", "router", *cells, title=f"{load}: {', '.join(kinds)}")
        for amount, (name, router) in product(args.amounts, ROUTERS.items()):
            seeds = [jobs(seed, amount) for seed in range(args.seeds)]
            found = row(name, fleet(kinds, router, host, **sizes), seeds, args.seconds)
            out.add_row(f"{amount:g} {load}", name, *found)
        console.print(out)


if __name__ == "__main__":
    main()
