"""The same arrivals on a live server and in the simulator: how far `crossdock simulate` is from what it predicts.

    python benchmarks/simulate_vs_live.py               # the default model, two minutes of chats and long prompts

The simulator gets what anyone would give it: the profile that the server advertises at /v1/replicas, here after a
short load of other requests, so that costs are known as they are when serving. A second simulation has the profile as
it is when the load is over: where only the first is off, costs had changed. Nothing else should run beside it.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

from peers.run import hardware, serving

from crossdock.cluster.bench.metrics import DEFAULT_TARGETS, Sample, by_class, spread_ms
from crossdock.cluster.bench.mix import MIXES
from crossdock.cluster.bench.run import BenchOptions, bench_jobs, run_bench
from crossdock.cluster.simulate.fleet import SimulatedFleet, load_fleet
from crossdock.cluster.simulate.simulation import Outcome, Simulation
from crossdock.workers.checkpoint import default_model_dir

ROOT = Path(__file__).resolve().parents[1]


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


def simulate(fleet: SimulatedFleet, options: BenchOptions) -> Outcome:
    """The same jobs, on simulated time."""
    mix = options.mix.within(min(pool.profile.max_model_len for pool in fleet.pools))
    duration = options.duration or 0.0
    jobs = takewhile(lambda job: (job.due or 0.0) < duration, bench_jobs(replace(options, mix=mix)))
    return Simulation(fleet, options.seed).run(jobs)


def figures(samples: Sequence[Sample]) -> dict[str, float]:
    """Times in milliseconds, shares in percent."""
    duration = max(sample.ended for sample in samples) - min(sample.sent for sample in samples)
    goodput = by_class(samples, duration, DEFAULT_TARGETS)["goodput"]
    row = {"requests": len(samples), "good %": 100 * goodput["share"], "good /s": goodput["requests_per_s"]}
    kinds = {"": samples, "chat ": [it for it in samples if it.role != "long"]}
    for kind, its in kinds.items():
        for name, spread in (
            ("TTFT", spread_ms(it.ttft for it in its if it.ok)),
            ("TPOT", spread_ms(it.tpot for it in its if it.ok and it.tpot is not None)),
        ):
            row |= {f"{kind}{name} {quantile}": spread[quantile] for quantile in ("p50", "p99") if quantile in spread}
    return row | {"refused": sum(it.refused for it in samples)}


def table(live: dict[str, float], simulated: Sequence[dict[str, float]], caption: str) -> str:
    """`simulated`: with the costs as they were before, and as they are afterwards."""
    lines = [caption, "", "| | live | simulated | deviation | with costs as afterwards | deviation |", "|---" * 6 + "|"]
    for name, value in live.items():
        cells = [f"{value:,.4g}"]
        for each in simulated:
            other = each.get(name, float("nan"))
            cells += [f"{other:,.4g}", f"{other / value - 1:+.1%}" if value else "-"]
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
        before = load_fleet(None, f"mixed=1x{address}")
        took = asyncio.run(run_bench(options))
        after = load_fleet(None, f"mixed=1x{address}")
    outcomes = [simulate(fleet, options) for fleet in (before, after)]
    live, simulated = figures(took.samples), [figures(it.samples) for it in outcomes]
    busy = outcomes[0].replicas[0].busy_s / outcomes[0].duration
    caption = (
        f"{args.model.name}; {hardware()}; {datetime.now(UTC).date()}; {args.rate:g} arrivals per second for "
        f"{args.duration:g} s; the replica is busy {busy:.0%} of the simulated time; times in ms."
    )
    text = table(live, simulated, caption)
    args.output.with_suffix(".md").write_text(text)
    profiles = [fleet.pools[0].profile.model_dump(mode="json") for fleet in (before, after)]
    summary = {"live": live, "simulated": simulated, "busy": busy, "profiles": profiles}
    args.output.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
