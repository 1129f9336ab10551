"""How much would attention by requests give a server in simulated time, beside attention by heads and pipeline stages?

    python benchmarks/models/attention_in_time.py           # DeepSeek-V3 on 8 H200: five minutes of one core
    python benchmarks/models/attention_in_time.py --ways heads requests stages --tpot 0.3 --rates 2 3.5
    python benchmarks/models/attention_in_time.py --trace conversation_trace.jsonl --rates 0.3 0.5

The pages and the seconds of each division are those of `attention_by_requests.py`, from data sheets. The scheduler, the
router and the classes are the real ones of `crossdock simulate`. One replica; all requests are of class standard.
Requests of equal lengths come at random and share nothing; or they are those of a trace (Mooncake's, FAST'25), each
with its time, its lengths and the prefix that it shares.

Prints of each division and rate: the requests that kept their promises, output tokens per second while requests came,
first tokens and gaps, prompt tokens that were cached, and the requests that had no first token when the last one came.

A division by requests has one scheduler and one pool here, whose pages any request may take: so ranks are always
divided evenly, which favours it.
"""

import argparse
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention_by_requests import MODELS, divisions
from tables import Row, add_output_options, table, write

from crossdock.cluster.bench.metrics import DEFAULT_TARGETS, meets, spread_ms
from crossdock.cluster.bench.workloads import Job, Segment, read_trace
from crossdock.cluster.simulate.capacity_search import queue_of
from crossdock.cluster.simulate.fleet import SimulatedFleet, describe
from crossdock.cluster.simulate.simulation import Outcome, Simulation
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.request.slo import DEFAULT_CLASS, DEFAULT_CLASSES


def fleet_of(profile: SchedulingProfile, tpot_s: float) -> SimulatedFleet:
    """Return one replica with such a profile. Requests that would be late wait: none is refused.

    `tpot_s`: seconds per token that class standard promises.
    """
    classes = [slo.model_dump() | ({"tpot_s": tpot_s} if slo.name == DEFAULT_CLASS else {}) for slo in DEFAULT_CLASSES]
    engine = {"max_num_seqs": profile.max_num_seqs, "admission": "queue", "slo_classes": classes}
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


def trace_arrivals(trace: Path, speed: float, count: int, start: int) -> list[Job]:
    """Return `count` requests of a trace that is played at `speed`, from request `start` on, which comes at time 0."""
    some = read_trace(trace, speed=speed)[start : start + count]
    began = some[0].due or 0.0
    return [replace(job, due=(job.due or 0.0) - began, service_tier=DEFAULT_CLASS) for job in some]


def figures(outcome: Outcome, tpot_s: float) -> Row:
    """Return the figures of one simulation. `tpot_s`: seconds per token that class standard promises."""
    samples = outcome.samples
    targets = DEFAULT_TARGETS[DEFAULT_CLASS] | {"tpot": tpot_s}
    first = min(sample.sent for sample in samples)
    last = max(sample.sent for sample in samples)
    moments = [moment for sample in samples for moment in sample.times if moment <= last]
    ttft = spread_ms(sample.ttft for sample in samples)
    gaps = spread_ms(sample.tpot for sample in samples if sample.tpot is not None)
    return {
        "good, %": 100 * sum(meets(each, targets) for each in samples) / len(samples),
        "output tokens/s": len(moments) / (last - first),
        "TTFT p50, s": ttft["p50"] / 1000,
        "TTFT p99, s": ttft["p99"] / 1000,
        "TPOT p50, ms": gaps["p50"],
        "TPOT p99, ms": gaps["p99"],
        "cached, %": 100 * sum(each.cached_tokens for each in samples) / sum(each.prompt_tokens for each in samples),
        "waiting at the end": queue_of(samples).end,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="DeepSeek-V3")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=["heads", "requests"], choices=["heads", "requests", "stages"])
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[2.0, 2.5, 3.0, 3.5, 4.0],
        help="requests in a second; with --trace, its speeds",
    )
    parser.add_argument("--trace", type=Path, help="file of a trace, in place of requests of equal lengths")
    parser.add_argument("--start", type=int, default=0, help="first request of the trace (default: %(default)s)")
    parser.add_argument(
        "--tpot", type=float, default=DEFAULT_TARGETS[DEFAULT_CLASS]["tpot"], help="seconds per token that are promised"
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
        fleet = fleet_of(found[way], args.tpot)
        for rate in args.rates:
            if args.trace is None:
                jobs = arrivals(rate, args.requests, args.prompt_tokens, args.output_tokens, args.seed)
            else:
                jobs = trace_arrivals(args.trace, rate, args.requests, args.start)
            rows[f"{way}, {rate:g}"] = figures(Simulation(fleet).run(jobs), args.tpot)
            print(f"{way}, {rate:g}: {rows[f'{way}, {rate:g}']}", file=sys.stderr, flush=True)
    load = f"{args.prompt_tokens:,} in, {args.output_tokens:,} out" if args.trace is None else args.trace.name
    title = f"{args.model}, {args.ranks} {args.gpu.upper()}, {load}, {args.tpot:g} s a token promised"
    rates = "requests/s" if args.trace is None else "speed"
    write(args, f"{title}:\n\n{table(rows, f'division, {rates}')}", {"rows": rows})


if __name__ == "__main__":
    main()
