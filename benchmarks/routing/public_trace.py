"""Routing policies on a public trace of conversations, in simulated time.

    python benchmarks/routing/public_trace.py conversation_trace.jsonl        # all fleets: about an hour
    python benchmarks/routing/public_trace.py conversation_trace.jsonl --fleets pools --shifts 3000

The trace is one of Mooncake's (FAST'25, kvcache-ai/Mooncake): an hour of requests, each with its time, its lengths and
the hashes of its blocks. Each shift begins at another request of the trace, with empty caches. All requests are of
class standard. Prints of each fleet and policy the means over the shifts: requests that kept the promises of their
class; the time to first token of all prompts, and of those below 4,000 tokens; the longest gap in any stream; prompt
tokens that were cached; and the error of predicted first tokens. The simulator takes every step alone where a fleet
is busy: 600 requests on two replicas take a minute of one core.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tables

from tables import Row, add_output_options, table, write

from crossdock.cluster.bench.metrics import DEFAULT_TARGETS, Sample, spread_ms
from crossdock.cluster.bench.workloads import Job, read_trace
from crossdock.cluster.simulate.fleet import load_fleet
from crossdock.cluster.simulate.report import figures
from crossdock.cluster.simulate.simulation import Simulation
from crossdock.cluster.simulate.study import routed

SHORT = 4000  # tokens of a prompt
FLEETS = {  # the pools, and how much faster than the trace its requests come
    "mixed": ("mixed=8xh100-8b", 3.2),
    "small": ("mixed=2xh100-8b", 0.8),
    "pools": ("prefill=1xh100-8b,decode=1xh100-8b", 0.8),
    "unlike": ("fast=4xh100-8b,slow=4xa100-8b", 2.0),
}
POLICIES = ("seconds", "round-robin", "prefix-affinity", "pinned", "remaining-work")
WAYS = ("seconds always", "seconds never")  # of pools alone


def arrivals(trace: Path, speed: float, start: int, count: int) -> list[Job]:
    """Return `count` requests of the trace from request `start` on, which comes at time 0."""
    jobs = read_trace(trace, speed=speed)[start : start + count]
    began = jobs[0].due or 0.0
    return [replace(job, due=(job.due or 0.0) - began, service_tier="standard") for job in jobs]


def play(pools: str, policy: str, jobs: Sequence[Job]) -> Row:
    """Return the figures of one fleet and policy. `policy`: with a setting of router.shipping behind it, or without."""
    name, _, shipping = policy.partition(" ")
    fleet = load_fleet(None, pools)
    for setting, value in (("policy", name), ("shipping", shipping or "auto")):
        fleet = next(routed(fleet, setting, [value]))[1]
    outcome = Simulation(fleet).run(jobs)
    found = figures(outcome, DEFAULT_TARGETS)
    ttfts = spread_ms(sample.ttft for sample in outcome.samples if sample.ok)
    short = spread_ms(sample.ttft for sample in outcome.samples if sample.ok and sample.prompt_tokens < SHORT)
    return {
        "good %": 100 * found["goodput"]["share"],
        "TTFT p50, s": ttfts["p50"] / 1000,
        "p99, s": ttfts["p99"] / 1000,
        "short p50, s": short["p50"] / 1000,
        "longest gap, s": max(map(longest_gap, outcome.samples)),
        "cached %": 100 * found["prefix_hit_rate"],
        "predicted off by, %": 100 * found["ttft_prediction_error"]["p50"],
    }


def longest_gap(sample: Sample) -> float:
    """Return the seconds of the longest gap between tokens of a stream."""
    return max((after - before for before, after in pairwise(sample.times)), default=0.0)


def mean(rows: Sequence[Row]) -> Row:
    """Return the mean of each figure; of gaps the longest."""
    return {
        name: max(row[name] for row in rows) if "longest" in name else sum(row[name] for row in rows) / len(rows)
        for name in rows[0]
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=[*FLEETS])
    parser.add_argument("--policies", nargs="+", default=[*POLICIES, *WAYS])
    parser.add_argument("--shifts", type=int, nargs="+", default=[0, 3000, 6000], help="first requests of the trace")
    parser.add_argument("--requests", type=int, default=1500, help="of each shift (default: %(default)s)")
    add_output_options(parser, "public-trace")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    results: dict[str, dict[str, Row]] = {}
    for name in args.fleets:
        pools, speed = FLEETS[name]
        for policy in args.policies:
            if policy in WAYS and name != "pools":
                continue
            rows = [play(pools, policy, arrivals(args.trace, speed, start, args.requests)) for start in args.shifts]
            results.setdefault(f"`{pools}` at {speed:g}", {})[policy] = mean(rows)
            print(name, policy, results[f"`{pools}` at {speed:g}"][policy], flush=True)  # a long run may end before
    text = "\n".join(f"{fleet}\n\n{table(rows, 'policy')}" for fleet, rows in results.items())
    write(args, text, results)


if __name__ == "__main__":
    main()
