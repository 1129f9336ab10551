"""Does the router gain from the price of evictions? Agents on several replicas, simulated.

    python benchmarks/routing/eviction_price.py --seeds 3

Each row plays the same sessions, with evictions counted in the router's sum and without, and with `prefix-affinity`.
"""

import argparse
from collections.abc import Iterator
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table

from crossdock.cluster.bench.agents import Agents, agent_jobs
from crossdock.cluster.bench.metrics import hit_rate
from crossdock.cluster.simulate.fleet import SimulatedFleet, describe
from crossdock.cluster.simulate.simulation import Simulation
from crossdock.cluster.simulate.study import Estimate
from crossdock.workers.report.presets import preset

SECONDS = 400.0
SCALE = 0.05  # of agents' lengths: a session ends at 16,000 tokens, 1,000 pages
FLEETS = (
    (4, 16, 1500),
    (4, 32, 1500),
    (8, 64, 1500),
    (16, 128, 1500),
    (4, 32, 3000),
)  # replicas, agents, pages of each
ROUTERS = {
    "ignored": {"evictions": "ignored"},
    "priced": {"evictions": "priced"},
    "prefix-affinity": {"policy": "prefix-affinity"},
}
CELLS = ("cached, %", "TTFT mean, ms", "p50", "p95", "p99")


def fleet(replicas: int, pages: int, router: dict[str, str]) -> SimulatedFleet:
    """Return replicas like one H100 with an 8B model, each with so many pages of KV memory."""
    profile = preset("h100-8b").model_copy(update={"num_pages": pages, "max_model_len": min(131_072, 16 * pages)})
    return describe({"pools": [{"name": "mixed", "replicas": replicas, "profile": profile}], "router": router})


def play(simulated: SimulatedFleet, agents: int, seeds: int) -> Iterator[str]:
    """Yield the cells of a row: hits in percent, and times to first token in ms."""
    hits, times = [], list[list[float]]()
    load = Agents(scale=SCALE).within(simulated.pools[0].profile.max_model_len)
    for seed in range(seeds):
        samples = Simulation(simulated, seed).run(agent_jobs(load, seed, agents), SECONDS).samples
        hits.append(100 * (hit_rate(samples) or 0.0))
        times.append([1000 * sample.ttft for sample in samples if sample.ok])
    yield str(Estimate.of(hits))
    yield f"{fmean(map(fmean, times)):.1f}"
    for percent in (50, 95, 99):
        yield f"{fmean(float(np.percentile(each, percent)) for each in times):.1f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="simulations of each row (default: %(default)s)")
    args = parser.parse_args()
    out = Table("replicas", "agents", "pages of each", "evictions", *CELLS, title="The price of evictions")
    for replicas, agents, pages in FLEETS:
        for name, router in ROUTERS.items():
            cells = play(fleet(replicas, pages, router), agents, args.seeds)
            out.add_row(str(replicas), str(agents), str(pages), name, *cells)
    Console(width=110).print(out)


if __name__ == "__main__":
    main()
