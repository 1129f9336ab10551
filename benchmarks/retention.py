"""Is a cache that keeps pages by value better than one that evicts the least recently used? Simulated, in two minutes.

    python benchmarks/retention.py --seeds 3

Loads: coding agents alone, the mix chat-heavy alone, and both. Each plays on pools of several sizes. A time to live
that is the same for all pages evicts in the order of `lru`, so there is no row for it. The second table divides one
cache among replicas: a router that keeps sessions together has the hit rate of one replica.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from statistics import fmean

from rich.console import Console
from rich.table import Table

from crossdock.cluster.bench.agents import Agents, agent_jobs
from crossdock.cluster.bench.metrics import hit_rate, spread_ms
from crossdock.cluster.bench.mix import MIXES, mix_jobs
from crossdock.cluster.bench.workloads import Job
from crossdock.cluster.simulate.fleet import SimulatedFleet, describe
from crossdock.cluster.simulate.presets import preset
from crossdock.cluster.simulate.simulation import Simulation
from crossdock.cluster.simulate.study import Estimate

SECONDS = 400.0
SCALE = 0.05  # of agents' lengths: a session ends at 16,000 tokens, 1,000 pages
LOADS = {"16 agents": (16, 0.0), "6 chats/s": (0, 6.0), "16 agents, 3 chats/s": (16, 3.0), "1.5 chats/s": (0, 1.5)}


def fleet(replicas: int, pages: int, eviction: str, policy: str = "seconds") -> SimulatedFleet:
    """Return replicas like one H100 with an 8B model, each with so many pages of KV memory."""
    profile = preset("h100-8b").model_copy(update={"num_pages": pages, "max_model_len": min(131_072, 16 * pages)})
    pool = {"name": "mixed", "replicas": replicas, "profile": profile, "engine": {"prefix_eviction": eviction}}
    return describe({"pools": [pool], "router": {"policy": policy}})


def jobs(agents: int, chats: float, context: int, seed: int) -> list[Job]:
    """Return the jobs of both loads in order of arrival."""
    chat_mix = mix_jobs(replace(MIXES["chat-heavy"].within(context), rate=chats), seed) if chats else iter(())
    found = list(takewhile(lambda job: (job.due or 0.0) < SECONDS, chat_mix))
    found += agent_jobs(Agents(scale=SCALE).within(context), seed, agents) if agents else []
    return sorted(found, key=lambda job: job.due or 0.0)


def play(simulated: SimulatedFleet, agents: int, chats: float, seeds: int) -> Iterator[str]:
    """Yield the cells of a row: hits in percent, and times to first token in ms."""
    hits, spreads = [], []
    context = simulated.pools[0].profile.max_model_len
    for seed in range(seeds):
        samples = Simulation(simulated, seed).run(jobs(agents, chats, context, seed), SECONDS).samples
        hits.append(100 * (hit_rate(samples) or 0.0))
        spreads.append(spread_ms(sample.ttft for sample in samples if sample.ok))
    yield str(Estimate.of(hits))
    for name in ("p50", "mean", "p99"):
        yield f"{fmean(spread[name] for spread in spreads):.1f}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="simulations of each row (default: %(default)s)")
    seeds = parser.parse_args().seeds
    cells = ("cached, %", "TTFT p50, ms", "mean", "p99")
    out = Table("load", "pages", "eviction", *cells, title="One replica")
    for name, (agents, chats) in LOADS.items():
        for pages in (1500, 3000, 5000):
            for eviction in ("lru", "value"):
                out.add_row(name, str(pages), eviction, *play(fleet(1, pages, eviction), agents, chats, seeds))
    Console().print(out)
    out = Table("replicas", "pages of each", "policy", *cells, title="16 agents, one cache divided among replicas")
    for replicas, policy in ((1, "seconds"), *((n, p) for n in (2, 4) for p in ("seconds", "prefix-affinity"))):
        simulated = fleet(replicas, 6000 // replicas, "lru", policy)
        out.add_row(str(replicas), str(6000 // replicas), policy, *play(simulated, 16, 0.0, seeds))
    Console().print(out)


if __name__ == "__main__":
    main()
