"""How much would attention by requests give a server in simulated time, beside attention by heads and pipeline stages?

    python benchmarks/models/attention_in_time.py           # DeepSeek-V3 on 8 H200: five minutes of one core
    python benchmarks/models/attention_in_time.py --ways stages     # hours

The pages and the seconds of each division are those of `attention_by_requests.py`, from data sheets. The scheduler, the
router and the classes are the real ones of `crossdock simulate`. One replica; requests of equal lengths come at random,
are of class standard, and share nothing.

Prints of each division and rate: the requests that kept their promises, output tokens per second while requests came,
first tokens and gaps, and the requests that had no first token when the last one came.

A division by requests has one scheduler and one pool here, whose pages any request may take: so ranks are always
divided evenly, which favours it.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention_by_requests import MODELS, divisions
from tables import Row, add_output_options, table, write

from crossdock.cluster.bench.metrics import DEFAULT_TARGETS, meets, spread_ms
from crossdock.cluster.bench.workloads import Job, Segment
from crossdock.cluster.simulate.capacity_search import queue_of
from crossdock.cluster.simulate.fleet import SimulatedFleet, describe
from crossdock.cluster.simulate.simulation import Outcome, Simulation
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.request.slo import DEFAULT_CLASS


def fleet_of(profile: SchedulingProfile) -> SimulatedFleet:
    """Return one replica with such a profile. Requests that would be late wait: none is refused."""
    engine = {"max_num_seqs": profile.max_num_seqs, "admission": "queue"}
    return describe({"pools": [{"name": "mixed", "profile": profile, "engine": engine}], "latency_s": 0.0})


def arrivals(rate: float, count: int, prompt: int, output: int, seed: int) -> list[Job]:
    """Return `count` requests of so many tokens, which come at random, `rate` of them in a second."""
    draw = random.Random(seed)
    due = 0.0
    jobs = []
    for number in range(count):
        due += draw.expovariate(rate)
        jobs.append(Job((Segment(f"p{number}", prompt),), output, due=due, service_tier=DEFAULT_CLASS))
    return jobs


def figures(outcome: Outcome) -> Row:
    """Return the figures of one simulation."""
    samples = outcome.samples
    first = min(sample.sent for sample in samples)
    last = max(sample.sent for sample in samples)
    moments = [moment for sample in samples for moment in sample.times if moment <= last]
    ttft = spread_ms(sample.ttft for sample in samples)
    gaps = spread_ms(sample.tpot for sample in samples if sample.tpot is not None)
    return {
        "good, %": 100 * sum(meets(each, DEFAULT_TARGETS[DEFAULT_CLASS]) for each in samples) / len(samples),
        "output tokens/s": len(moments) / (last - first),
        "TTFT p50, s": ttft["p50"] / 1000,
        "TTFT p99, s": ttft["p99"] / 1000,
        "TPOT p50, ms": gaps["p50"],
        "TPOT p99, ms": gaps["p99"],
        "waiting at the end": queue_of(samples).end,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="DeepSeek-V3")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=["heads", "requests"], choices=["heads", "requests", "stages"])
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[2.0, 2.5, 3.0, 3.5, 4.0], help="requests in a second"
    )
    parser.add_argument("--requests", type=int, default=400, help="of each simulation (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    add_output_options(parser, "attention-by-requests")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = divisions(MODELS[args.model], args.gpu, args.ranks, Path(folder))
    rows = dict[str, Row]()
    for way in args.ways:
        fleet = fleet_of(found[way])
        for rate in args.rates:
            jobs = arrivals(rate, args.requests, args.prompt_tokens, args.output_tokens, args.seed)
            rows[f"{way}, {rate:g}"] = figures(Simulation(fleet).run(jobs))
            print(f"{way}, {rate:g}: {rows[f'{way}, {rate:g}']}", file=sys.stderr, flush=True)
    title = f"{args.model}, {args.ranks} {args.gpu.upper()}, {args.prompt_tokens:,} in, {args.output_tokens:,} out"
    write(args, f"{title}:\n\n{table(rows, 'division, requests/s')}", {"rows": rows})


if __name__ == "__main__":
    main()
