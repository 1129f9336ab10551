"""Routing policies on a public trace of conversations, in simulated time.

    python benchmarks/routing/public_trace.py conversation_trace.jsonl        # all fleets: hours
    python benchmarks/routing/public_trace.py conversation_trace.jsonl --fleets pools --speed 0.8 --shifts 3000

The trace is one of Mooncake's (FAST'25, kvcache-ai/Mooncake): an hour of requests, each with its time, its lengths and
the hashes of its blocks. Each shift begins at another request of the trace, with empty caches. Prompts below 4,000
tokens are of the class `--short-class`, all others of class standard.

Each fleet is tried with and without memory of the host for pages, at the highest speed of the trace at which the first
policy keeps 95 % of the requests of all shifts good. The search for this speed doubles or halves the fleet's first
speed, then halves the distance until 5 % are left. Short shifts end before queues grow, so that speeds of unlike
numbers of requests cannot be compared.

Prints of each fleet and policy the means over the shifts: requests that kept the promises of their class, short prompts
and others by themselves; the gain of the first policy, in points, with half of the 95 % interval of the differences
between equal shifts; the time to first token; requests that were refused; the longest gap in any stream; prompt tokens
that were cached; and the error of predicted first tokens. Prints each shift as it ends. The simulator takes every step
alone where a fleet is busy: 100 requests on two replicas take four seconds of one core, and the search plays each shift
six to nine times.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tables

from tables import Row, add_output_options, table, write

from crossdock.cluster.bench.metrics import DEFAULT_TARGETS, Sample, meets, spread_ms
from crossdock.cluster.bench.workloads import Job, read_trace
from crossdock.cluster.simulate.capacity_search import best_of, highest_rate
from crossdock.cluster.simulate.fleet import SimulatedFleet, load_fleet
from crossdock.cluster.simulate.report import figures
from crossdock.cluster.simulate.simulation import Simulation
from crossdock.cluster.simulate.study import Estimate, routed
from crossdock.workers.schedule.request.slo import DEFAULT_CLASS, DEFAULT_CLASSES

SHORT = 4000  # tokens of a prompt
GOAL = 0.95  # of the requests
FLEETS = {  # the pools, and the speed of the trace at which the search begins
    "mixed": ("mixed=8xh100-8b", 2.8),
    "like": ("mixed=4xh100-8b", 1.3),
    "small": ("mixed=2xh100-8b", 0.55),
    "unlike": ("fast=1xh100-8b,slow=1xa100-8b", 0.4),
    "pools": ("prefill=1xh100-8b,decode=1xh100-8b", 0.55),
}
POLICIES = ("seconds", "round-robin", "prefix-affinity", "pinned", "remaining-work")
WAYS = ("seconds always", "seconds never")  # of pools alone


def arrivals(jobs: Sequence[Job], speed: float, start: int, count: int, short_class: str) -> list[Job]:
    """Return `count` requests of the trace from request `start` on, which comes at time 0, each with its class."""
    some = jobs[start : start + count]
    began = some[0].due or 0.0
    return [
        replace(
            job,
            due=((job.due or 0.0) - began) / speed,
            service_tier=short_class if job.prompt_tokens < SHORT else DEFAULT_CLASS,
        )
        for job in some
    ]


def play(fleet: SimulatedFleet, policy: str, jobs: Sequence[Job]) -> Row:
    """Return the figures of one fleet and policy. `policy`: with a setting of router.shipping behind it, or without."""
    name, _, shipping = policy.partition(" ")
    for setting, value in (("policy", name), ("shipping", shipping or "auto")):
        fleet = next(routed(fleet, setting, [value]))[1]
    outcome = Simulation(fleet).run(jobs)
    found = figures(outcome, DEFAULT_TARGETS)
    short = [sample for sample in outcome.samples if sample.prompt_tokens < SHORT]
    other = [sample for sample in outcome.samples if sample.prompt_tokens >= SHORT]
    ttfts = spread_ms(sample.ttft for sample in outcome.samples if sample.ok)
    short_ttfts = spread_ms(sample.ttft for sample in short if sample.ok)
    return {
        "good %": good(outcome.samples),
        "short good %": good(short),
        "others good %": good(other),
        "TTFT p50, s": ttfts["p50"] / 1000,
        "p99, s": ttfts["p99"] / 1000,
        "short p50, s": short_ttfts["p50"] / 1000,
        "short p90, s": short_ttfts["p90"] / 1000,
        "refused %": 100 * sum(sample.refused for sample in outcome.samples) / len(outcome.samples),
        "longest gap, s": max(map(longest_gap, outcome.samples)),
        "cached %": 100 * found["prefix_hit_rate"],
        "predicted off by, %": 100 * found["ttft_prediction_error"]["p50"],
    }


def good(samples: Sequence[Sample]) -> float:
    """Return the percentage of requests that kept the promises of their class."""
    return 100 * sum(meets(each, DEFAULT_TARGETS[each.service_tier or ""]) for each in samples) / max(len(samples), 1)


def longest_gap(sample: Sample) -> float:
    """Return the seconds of the longest gap between tokens of a stream."""
    return max((after - before for before, after in pairwise(sample.times)), default=0.0)


def mean(rows: Sequence[Row], first: Sequence[Row]) -> Row:
    """Return the mean of each figure, of gaps the longest, and what the `first` policy has more in the same shifts."""
    means = {
        name: max(row[name] for row in rows) if "longest" in name else sum(row[name] for row in rows) / len(rows)
        for name in rows[0]
    }
    for name, label in (("good %", "gain"), ("short good %", "short gain")) if rows is not first else ():
        gain = Estimate.of([own[name] - row[name] for own, row in zip(first, rows, strict=True)])
        means[label] = gain.mean
        if gain.margin is not None:
            means[f"{label} ±"] = gain.margin
    return means


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plays one fleet on shifts of the trace, each play once: the search and the comparison share plays."""

    title: str
    fleet: SimulatedFleet
    jobs: Sequence[Job]  # the whole trace
    args: argparse.Namespace
    _played: dict[tuple[str, float, int], Row] = field(default_factory=dict)

    def row(self, policy: str, speed: float, start: int) -> Row:
        """Return the figures of a policy on the shift that begins at request `start`; prints them at the first call."""
        key = policy, speed, start
        if key not in self._played:
            requests = arrivals(self.jobs, speed, start, self.args.requests, self.args.short_class)
            self._played[key] = play(self.fleet, policy, requests)
            print(f"{self.title}, speed {speed:.3g}", policy, start, self._played[key], flush=True)
        return self._played[key]

    def highest_speed(self, policy: str, begin: float) -> float:
        """Return the highest speed of the trace, within 5 %, at which a policy keeps `GOAL` over all shifts.

        Raises:
            ValueError: the policy does not at any speed that was tried.
        """

        def run(speed: float) -> tuple[float, bool]:
            return fmean(self.row(policy, speed, start)["good %"] for start in self.args.shifts) / 100, False

        best = best_of(highest_rate(run, GOAL, begin), GOAL)
        if best is None:
            raise ValueError(f"{self.title}: {policy} keeps less than {GOAL:.0%} of the requests good at any speed")
        return best.rate


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=[*FLEETS])
    parser.add_argument("--policies", nargs="+", default=[*POLICIES, *WAYS], help="the first is compared with the rest")
    parser.add_argument("--host-memory", nargs="+", default=["none", "256GiB"], help="of each replica, for pages")
    parser.add_argument("--short-class", choices=[slo.name for slo in DEFAULT_CLASSES], default="interactive")
    parser.add_argument("--speed", type=float, help="of the trace, for all fleets (default: search for it)")
    shifts = [3000, 6000, 9000, 1000, 5000]
    parser.add_argument("--shifts", type=int, nargs="+", default=shifts, help="first requests of the trace")
    parser.add_argument("--requests", type=int, default=600, help="of each shift (default: %(default)s)")
    add_output_options(parser, "public-trace")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    jobs = read_trace(args.trace)
    results: dict[str, dict[str, Row]] = {}
    for name in args.fleets:
        pools, begin = FLEETS[name]
        policies = [policy for policy in args.policies if policy not in WAYS or name == "pools"]
        for memory in args.host_memory:
            fleet = load_fleet(None, pools, None if memory == "none" else memory)
            comparison = Comparison(f"`{pools}`, host memory {memory}", fleet, jobs, args)
            speed = args.speed or comparison.highest_speed(policies[0], begin)
            rows: dict[str, list[Row]] = {policy: [] for policy in policies}
            for start in args.shifts:  # a long run may end before: then policies have equal shifts
                for policy in policies:
                    rows[policy].append(comparison.row(policy, speed, start))
            title = f"{comparison.title}, speed {speed:.3g}"
            results[title] = {policy: mean(own, rows[policies[0]]) for policy, own in rows.items()}
    text = "\n".join(f"{fleet}\n\n{table(rows, 'policy')}" for fleet, rows in results.items())
    write(args, text, results)


if __name__ == "__main__":
    main()
