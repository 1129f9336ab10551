"""The same arrivals on a live server and in the simulator: how far `crossdock simulate` is from what it predicts.

    python benchmarks/simulate_vs_live.py               # the default model, two minutes of chats and long prompts

The simulator gets what anyone would give it: the profile that the server advertises at /v1/replicas, here after a
short load of other requests, so that costs are known as they are when serving; steps that differ from their prediction
by as much as the server says at /metrics; and the seconds that a first token spends outside of the replica, measured on
requests that come alone. How steps vary is chance, so all of it is simulated fifteen times: medians and ranges. A
second simulation has the costs as they are when the load is over: where only the first is off, they had changed.
Nothing else should run beside it.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from statistics import median

import httpx
from peers.run import hardware, serving

from crossdock.cluster.bench.metrics import DEFAULT_TARGETS, Sample, by_class, spread_ms
from crossdock.cluster.bench.mix import MIXES
from crossdock.cluster.bench.run import BenchOptions, bench_jobs, run_bench
from crossdock.cluster.simulate.fleet import SimulatedFleet, load_fleet
from crossdock.cluster.simulate.simulation import Outcome, Simulation
from crossdock.cluster.watch.scrape import QUANTILE, STEP_ERROR, Scrape
from crossdock.workers.model.checkpoint import default_model_dir

ROOT = Path(__file__).resolve().parents[1]
SEEDS = 15


@dataclass(frozen=True)
class OneReplica:
    """`crossdock serve`; to `serving` a server like any other."""

    name: str = "crossdock"

    def command(self, args: argparse.Namespace, port: int) -> list[str]:
        crossdock = str(Path(sys.executable).with_name("crossdock"))
        return [crossdock, "serve", str(args.model), "--port", str(port), *args.crossdock_option]

    def model(self, args: argparse.Namespace) -> None:
        """What `serving` asks for: the first model the server names."""


def load(address: str, args: argparse.Namespace) -> BenchOptions:
    mix = replace(MIXES["chat-heavy"], rate=args.rate, long_share=args.long_share, long_tokens=tuple(args.long_tokens))
    return BenchOptions(url=address, workload="mix", mix=mix, duration=args.duration, seed=args.seed)


def as_now(address: str) -> SimulatedFleet:
    """The server as it says that it is. Of a normal distribution 90 % are within 1.645 of its spread."""
    scrape = Scrape.parse(httpx.get(f"{address}/metrics", timeout=30).text, 0.0)
    error = scrape.total(STEP_ERROR, **{QUANTILE: "0.9"}) or 0.0
    latency = median(outside(address, f"{number}-{time.time()}") for number in range(9))
    return load_fleet(None, f"mixed=1x{address}", noise=round(error / 1.645, 3), latency_s=round(latency, 4))


def outside(address: str, request_id: str) -> float:
    """Seconds that the first token of a request spent on the way there and back."""
    body = {"prompt": request_id, "max_tokens": 1, "stream": True}
    headers = {"X-Request-Id": request_id}
    began = time.perf_counter()
    with httpx.stream("POST", f"{address}/v1/completions", json=body, headers=headers, timeout=30) as answer:
        lines = answer.iter_lines()
        next(lines)
        took = time.perf_counter() - began
        for _ in lines:
            pass
    (timeline,) = httpx.get(f"{address}/v1/requests/{request_id}", timeout=30).json()["requests"]
    return max(took - timeline["first_token_s"], 0.0)


def simulate(fleet: SimulatedFleet, options: BenchOptions) -> list[Outcome]:
    """The same jobs on simulated time, again and again."""
    mix = options.mix.within(min(pool.profile.max_model_len for pool in fleet.pools))
    duration = options.duration or 0.0
    jobs = list(takewhile(lambda job: (job.due or 0.0) < duration, bench_jobs(replace(options, mix=mix))))
    return [Simulation(fleet, seed).run(jobs) for seed in range(SEEDS)]


def figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Times in milliseconds, shares in percent."""
    duration = max(sample.ended for sample in samples) - min(sample.sent for sample in samples)
    goodput = by_class(samples, duration, DEFAULT_TARGETS)["goodput"]
    tokens = sum(sample.prompt_tokens for sample in samples)
    row = {
        "requests": len(samples),
        "prompt tokens": tokens,
        "good %": 100 * goodput["share"],
        "good /s": goodput["requests_per_s"],
    }
    kinds = {"": samples, "chat ": [it for it in samples if it.role != "long"]}
    for kind, its in kinds.items():
        for name, spread in (
            ("TTFT", spread_ms(it.ttft for it in its if it.ok)),
            ("TPOT", spread_ms(it.tpot for it in its if it.ok and it.tpot is not None)),
        ):
            row |= {f"{kind}{name} {quantile}": spread[quantile] for quantile in ("p50", "p99") if quantile in spread}
    return row | {"refused": sum(it.refused for it in samples)}


def table(live: dict[str, float], simulated: Sequence[Sequence[dict[str, float]]], caption: str) -> str:
    """`simulated`: with the costs as they were before, and as they are afterwards; of each, one of every seed."""
    columns = "simulated: median | range | deviation"
    lines = [caption, "", f"| | live | {columns} | as afterwards: median | range | deviation |", "|---" * 8 + "|"]
    for name, value in live.items():
        cells = [f"{value:,.4g}"]
        for runs in simulated:
            others = sorted(run[name] for run in runs)
            middle = median(others)
            cells += [f"{middle:,.4g}", f"{others[0]:,.4g} to {others[-1]:,.4g}"]
            cells += [f"{middle / value - 1:+.1%}" if value else "-"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face directory (default: the default model)")
    parser.add_argument("--rate", type=float, default=0.8, help="arrivals per second")
    parser.add_argument("--long-share", type=float, default=0.08, help="of the arrivals")
    parser.add_argument("--long-tokens", type=int, nargs=2, default=(1024, 3072), metavar=("LEAST", "MOST"))
    parser.add_argument("--duration", type=float, default=120.0, help="seconds of arrivals")
    parser.add_argument("--warmup", type=float, default=30.0, help="seconds of other arrivals before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8415)
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--crossdock-option", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--output", type=Path, default=ROOT / ".cache" / "simulate" / "results", help="without suffix")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.model = args.model or default_model_dir()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with serving(OneReplica(), args, args.output.with_suffix(".log")) as (address, _, _):
        options = load(address, args)
        asyncio.run(run_bench(replace(options, duration=args.warmup, seed=args.seed + 1000)))
        before = as_now(address)
        took = asyncio.run(run_bench(options))
        after = as_now(address)
    outcomes = [simulate(fleet, options) for fleet in (before, after)]
    live, simulated = figures(took.samples), [[figures(it.samples) for it in its] for its in outcomes]
    busy = median(it.replicas[0].busy_s / it.duration for it in outcomes[0])
    caption = (
        f"{args.model.name}; {hardware()}; {datetime.now(UTC).date()}; {args.rate:g} arrivals per second for "
        f"{args.duration:g} s; the replica is busy {busy:.0%} of the simulated time, its steps vary by "
        f"{before.noise:.0%} and {after.noise:.0%}, a first token spends {1e3 * before.latency_s:.0f} ms elsewhere; "
        "times in ms."
    )
    text = table(live, simulated, caption)
    args.output.with_suffix(".md").write_text(text)
    fleets = [fleet.model_dump(mode="json") for fleet in (before, after)]
    summary = {"live": live, "simulated": simulated, "busy": busy, "fleets": fleets}
    args.output.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
