"""Compare, in simulation on the costs of GPUs, routers that may let replicas fetch prefixes with routers that may not.

    python benchmarks/routing/fetching.py --seeds 2

First, one prompt whose prefix is on another replica: predicted seconds to its first token, computed and fetched.
Then agents and chats on fleets. Each row plays the same requests, with `router.shipping` auto (which fetches), never,
and with `prefix-affinity`.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np
from rich.console import Console
from rich.table import Table

from crossdock.cluster.bench.agents import Agents, agent_jobs
from crossdock.cluster.bench.metrics import hit_rate
from crossdock.cluster.bench.workloads import Job, Segment
from crossdock.cluster.simulate.fleet import SimulatedFleet, describe
from crossdock.cluster.simulate.simulation import Outcome, Simulation
from crossdock.router.fleet import Fleet
from crossdock.router.placement import Query
from crossdock.workers.report.advertise import LiveProfile, PageChanges, Prompts
from crossdock.workers.report.presets import preset
from crossdock.workers.schedule.memory.prefix_index import hash_pages

SECONDS = 300.0
SCALE = 0.05  # of agents' lengths: a session ends at 16,000 tokens, 1,000 pages
FLEETS = ((4, 32, 1500), (8, 64, 1500), (4, 32, 3000))  # replicas, agents, pages of each
PRESETS = ("h100-8b", "h100-70b")
LENGTHS = (512, 2048, 8192, 49_152)  # tokens of a prefix
ROUTERS = {"fetches": {}, "never": {"shipping": "never"}, "prefix-affinity": {"policy": "prefix-affinity"}}
TTFT_S, TPOT_S = 1.0, 0.05  # of a good request


def fleet(name: str, replicas: int, router: dict[str, str], **changes: int) -> SimulatedFleet:
    """Return replicas like those of a preset."""
    profile = preset(name).model_copy(update=changes)
    return describe({"pools": [{"name": "mixed", "replicas": replicas, "profile": profile}], "router": router})


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


def good_share(outcome: Outcome) -> float:
    """Return the share of requests in percent whose first token and mean gap are in time."""
    good = [each for each in outcome.samples if each.ok and each.ttft <= TTFT_S and (each.tpot or 0.0) <= TPOT_S]
    return 100 * len(good) / len(outcome.samples)


def chats(seed: int, rate: float, num_tokens: int = 2000) -> list[Job]:
    """Return requests that share no prefix, at random times."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, int(60 * rate)))
    return [
        Job((Segment(f"{seed}/{number}", int(rng.integers(50, num_tokens))),), 64, due=float(due))
        for number, due in enumerate(times)
    ]


def row(simulated: SimulatedFleet, loads: Sequence[Sequence[Job]]) -> Iterator[str]:
    """Yield the cells of a row: hits in percent, good requests, TTFT in ms, and fetches."""
    outcomes = [Simulation(simulated, seed).run([*jobs], SECONDS) for seed, jobs in enumerate(loads)]
    times = [[1000 * sample.ttft for sample in each.samples if sample.ok] for each in outcomes]
    yield f"{fmean(100 * (hit_rate(each.samples) or 0.0) for each in outcomes):.1f}"
    yield f"{fmean(map(good_share, outcomes)):.1f}"
    yield f"{fmean(map(fmean, times)):.0f}"
    for percent in (50, 99):
        yield f"{fmean(float(np.percentile(each, percent)) for each in times):.0f}"
    reasons = Counter(word for each in outcomes for placed in each.placed for word in placed.reason.split())
    yield f"{100 * reasons['fetched'] / sum(len(each.placed) for each in outcomes):.1f}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="simulations of each row (default: %(default)s)")
    args = parser.parse_args()
    console = Console(width=110)
    out = Table("replica", "tokens of the prefix", "computed, ms", "fetched, ms", title="One prompt")
    for name in PRESETS:
        for tokens in LENGTHS:
            out.add_row(name, f"{tokens:,}", *(f"{1000 * seconds:.0f}" for seconds in one_prompt(name, tokens)))
    console.print(out)
    cells = ("cached, %", "good, %", "TTFT mean, ms", "p50", "p99", "fetched, %")
    out = Table("load", "replicas", "pages of each", "router", *cells, title="Fleets of h100-8b")
    for replicas, agents, pages in FLEETS:
        size = {"num_pages": pages, "max_model_len": min(131_072, 16 * pages)}
        for name, router in ROUTERS.items():
            simulated = fleet("h100-8b", replicas, router, **size)
            load = Agents(scale=SCALE).within(size["max_model_len"])
            loads = [agent_jobs(load, seed, agents) for seed in range(args.seeds)]
            out.add_row(f"{agents} agents", str(replicas), str(pages), name, *row(simulated, loads))
    for name, router in ROUTERS.items():
        loads = [chats(seed, 60.0) for seed in range(args.seeds)]
        out.add_row("chats, 60/s", "4", "20000", name, *row(fleet("h100-8b", 4, router, num_pages=20_000), loads))
    console.print(out)


if __name__ == "__main__":
    main()
