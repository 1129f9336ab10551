"""Compare, in simulation on the costs of GPUs, this router with others that keep conversations where their pages are.

    python benchmarks/routing/fetching.py --seeds 2

First, one prompt whose prefix is on another replica: predicted seconds to its first token, computed and fetched.
Then loads on fleets whose pools are too small for them, with host memory below. Each row plays the same requests. The
last column is the goodput: requests a second whose first token comes within 1 s and whose tokens come within 50 ms.

`pinned` does what ConServe does (arXiv 2606.01839): a conversation's first turn goes to the replica on which the fewest
tokens of conversations lie, and all later turns go to the same replica. `prefix-affinity` is SGLang's choice.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
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
from crossdock.router.placement import Placement, Query
from crossdock.workers.report.advertise import LiveProfile, PageChanges, Prompts
from crossdock.workers.report.presets import preset
from crossdock.workers.schedule.memory.prefix_index import PageHash, hash_pages

SECONDS = 300.0
LENGTH = 16_000  # tokens at which a session ends: 1,000 pages
SYSTEM_PAGES = 80  # of a session's beginning, which others share
PRESETS = ("h100-8b", "h100-70b")
LENGTHS = (512, 2048, 8192, 49_152)  # tokens of a prefix
ROUTERS: dict[str, dict[str, str]] = {
    "seconds": {},
    "without fetches": {"shipping": "never"},
    "prefix-affinity": {"policy": "prefix-affinity"},
    "pinned": {"shipping": "never"},
}
TTFT_S, TPOT_S = 1.0, 0.05  # of a good request


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


def one_prompt(name: str, tokens: int) -> tuple[float, float]:
    """Return the predicted seconds to the first token of a prompt, computed and fetched.

    Its prefix of `tokens` tokens is on another replica, which is busy for 20 s."""
    profile = preset(name).model_copy(update={"peer": b"a dock", "compatibility": "one"})
    router, hashes = Fleet(), hash_pages(range(tokens + 32), profile.page_size)
    places = {"places": (64,) * len(profile.slo_classes), "free_pages": (20_000,) * len(profile.slo_classes)}
    for replica, prompts in (("holder", (Prompts(0, 6, 4, 400_000, 20.0),)), ("other", ())):
        router.join(replica, profile, 0.0)
        router.hear(replica, LiveProfile("first", 1, (), prompts, **places), 0.0)
    router.hear_pages("holder", PageChanges("first", 1, hashes[: tokens // profile.page_size]))
    ways = router.choose(Query("prompt", tokens + 32, hashes), 0.0).alternatives
    return ways["compute"], ways.get("fetch", ways["compute"])


def agents(seed: int, count: float) -> Sequence[Job]:
    """Return so many agents, whose sessions end at 16,000 tokens."""
    return agent_jobs(Agents().within(LENGTH), seed, int(count))


def chats(seed: int, rate: float) -> Iterator[Job]:
    """Yield requests that share no prefix, at random times."""
    rng = np.random.default_rng(seed)
    for number, due in enumerate(np.cumsum(rng.exponential(1 / rate, int(30 * rate)))):
        yield Job((Segment(f"{seed}/{number}", int(rng.integers(50, 2000))),), 64, due=float(due))


LIKE, UNLIKE = ("h100-8b",) * 4, ("h100-8b", "h100-8b", "a100-8b", "l4-8b")
SMALL = {"num_pages": 1500, "max_model_len": LENGTH}
LOADS: dict[str, tuple[Callable[[int, float], Any], Sequence[float], Sequence[str], str, dict[str, int]]] = {
    "agents": (agents, (24, 48, 72), LIKE, "8GiB", SMALL),
    "agents, unlike GPUs": (agents, (16, 32, 48), UNLIKE, "8GiB", SMALL),
    "chats a second": (chats, (60, 90, 120), LIKE, "8GiB", {"num_pages": 20_000}),
}


def row(name: str, simulated: SimulatedFleet, loads: Sequence[Any]) -> tuple[list[str], float]:
    """Return the cells of a row, and the goodput: hits in percent, TTFT in ms, fetches and good requests."""
    with patch.object(simulation, "Fleet", PinnedFleet if name == "pinned" else Fleet):
        outcomes = [simulation.Simulation(simulated, seed).run(jobs, SECONDS) for seed, jobs in enumerate(loads)]
    samples = [sample for each in outcomes for sample in each.samples]
    seconds = sum(max(sample.ended for sample in each.samples) for each in outcomes)
    times = [1000 * sample.ttft for sample in samples if sample.ok]
    reasons = Counter(word for each in outcomes for placed in each.placed for word in placed.reason.split())
    good = [each for each in samples if each.ok and each.ttft <= TTFT_S and (each.tpot or 0.0) <= TPOT_S]
    cells = [100 * fmean(hit_rate(each.samples) or 0.0 for each in outcomes), 100 * reasons["fetched"] / len(samples)]
    cells += [fmean(times), *np.percentile(times, (50, 95)), 100 * len(good) / len(samples)]
    goodput = len(good) / seconds
    return [f"{cell:.1f}" if cell < 100 else f"{cell:.0f}" for cell in cells] + [f"{goodput:.2f}"], goodput


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="simulations of each row (default: %(default)s)")
    parser.add_argument("--loads", default=";".join(LOADS), help="joined by semicolons (default: %(default)s)")
    args = parser.parse_args()
    console = Console(width=120)
    out = Table("replica", "tokens of the prefix", "computed, ms", "fetched, ms", title="One prompt")
    for name in PRESETS:
        for tokens in LENGTHS:
            out.add_row(name, f"{tokens:,}", *(f"{1000 * seconds:.0f}" for seconds in one_prompt(name, tokens)))
    console.print(out)
    cells = ("cached, %", "fetched, %", "TTFT mean, ms", "p50", "p95", "good, %", "good /s")
    for load in args.loads.split(";"):
        jobs, amounts, names, host, sizes = LOADS[load]
        out, most = Table("load", "router", *cells, title=f"{load}: {', '.join(names)}"), Counter[str]()
        for amount in amounts:
            for name, router in ROUTERS.items():
                played = [jobs(seed, amount) for seed in range(args.seeds)]
                found, goodput = row(name, fleet(names, router, host, **sizes), played)
                most[name] = max(most[name], goodput)
                out.add_row(f"{amount} {load}", name, *found)
        console.print(out)
        ours = most["seconds"]
        console.print("highest goodput / this router's: ", {name: round(each / ours, 3) for name, each in most.items()})


if __name__ == "__main__":
    main()
