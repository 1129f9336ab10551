"""How far is `crossdock simulate` from a live server with the same arrivals?

    python benchmarks/routing/simulate_vs_live.py         # the default model, two minutes of arrivals: about 5 minutes
    python benchmarks/routing/simulate_vs_live.py --rate 20 --ingresses 2 --crossdock-option=--pools=mixed=64 \
        "--crossdock-option=--device=emulated:h100-8b*40"   # a fleet of emulated devices

Prints a row per figure (good requests, times to first token, times per token): live, simulated, and the deviation.

The simulator gets what every user can give it: the profile that the server advertises at /v1/replicas after a short
load of other requests; the spread of steps around their prediction, from /metrics; and the seconds that a first token
spends outside of the replica, measured on requests that are alone. Steps vary by chance, so there are `--seeds`
simulations: medians and ranges. Run nothing else beside it.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers and tables

import httpx
from scaling import spread_of_steps
from servers import add_server_options, crossdock_server
from tables import Row, hardware, markdown, quantiles, today, write

from crossdock.cluster.bench.metrics import Sample, by_class, spread_ms
from crossdock.cluster.bench.mix import MIXES
from crossdock.cluster.bench.run import BenchOptions, bench_jobs, run_bench
from crossdock.cluster.simulate.fleet import SimulatedFleet, load_fleet
from crossdock.cluster.simulate.simulation import Outcome, Simulation
from crossdock.cluster.watch.scrape import Scrape
from crossdock.workers.model.weights.checkpoint import default_model_dir


def load(address: str, args: argparse.Namespace) -> BenchOptions:
    """Return a load of chats and a few long prompts."""
    mix = replace(MIXES["chat-heavy"], rate=args.rate, long_share=args.long_share, long_tokens=tuple(args.long_tokens))
    return BenchOptions(url=address, workload="mix", mix=mix, duration=args.duration, seed=args.seed)


def advertised(address: str, ingresses: int) -> SimulatedFleet:
    """Return the server as its own endpoints describe it now: as many mixed replicas as it has."""
    noise = spread_of_steps(Scrape.parse(httpx.get(f"{address}/metrics", timeout=30).text, 0.0))
    latency = median(latency_outside(address, f"{number}-{time.time()}") for number in range(9))
    count = len(httpx.get(f"{address}/v1/replicas", timeout=30).json()["data"])
    settings = {"noise": noise, "latency_s": round(latency, 4), "routers": ingresses}
    return load_fleet(None, f"mixed={count}x{address}", **settings)


def latency_outside(address: str, request_id: str) -> float:
    """Return the seconds that the first token of a request spends outside of the replica, both ways."""
    body = {"prompt": request_id, "max_tokens": 1, "stream": True}
    headers = {"X-Request-Id": request_id}
    with httpx.Client(timeout=30) as client:  # a new connection, as of each request of the load
        began = time.perf_counter()  # without what the client takes to be made: 19 ms, more than the server does
        with client.stream("POST", f"{address}/v1/completions", json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            next(lines)
            seconds = time.perf_counter() - began
            for _ in lines:
                pass
    (timeline,) = httpx.get(f"{address}/v1/requests/{request_id}", timeout=30).json()["requests"]
    inside: float = timeline["first_token_s"]
    return max(seconds - inside, 0.0)


def simulate(fleet: SimulatedFleet, options: BenchOptions, seeds: int) -> list[Outcome]:
    """Run the same jobs in simulated time, once per seed."""
    mix = options.mix.within(min(pool.profile.max_model_len for pool in fleet.pools))
    duration = options.duration or 0.0
    jobs = list(takewhile(lambda job: (job.due or 0.0) < duration, bench_jobs(replace(options, mix=mix))))
    return [Simulation(fleet, seed).run(jobs) for seed in range(seeds)]


def figures(samples: Sequence[Sample], fleet: SimulatedFleet) -> Row:
    """Return the figures of the table; times in milliseconds, shares in percent."""
    duration = max(sample.ended for sample in samples) - min(sample.sent for sample in samples)
    targets = {slo.name: {"ttft": slo.ttft_s, "tpot": slo.tpot_s} for slo in fleet.classes}
    goodput = by_class(samples, duration, targets)["goodput"]
    row = {
        "requests": len(samples),
        "prompt tokens": sum(sample.prompt_tokens for sample in samples),
        "good %": 100 * goodput["share"],
        "good /s": goodput["requests_per_s"],
    }
    kinds = {"": samples, "chat ": [sample for sample in samples if sample.role != "long"]}
    for kind, members in kinds.items():
        ok = [sample for sample in members if sample.ok]
        row |= quantiles(f"{kind}TTFT", spread_ms(sample.ttft for sample in ok))
        row |= quantiles(f"{kind}TPOT", spread_ms(sample.tpot for sample in ok if sample.tpot is not None))
    return row | {"refused": sum(sample.refused for sample in samples)}


def comparison(live: Row, simulated: Sequence[Row]) -> str:
    """Return the table. `simulated`: a row for each seed."""
    lines = [["", "live", "simulated: median", "range", "deviation"]]
    for name, value in live.items():
        values = sorted(run[name] for run in simulated)
        middle = median(values)
        deviation = f"{middle / value - 1:+.1%}" if value else "-"
        lines.append([name, f"{value:,.4g}", f"{middle:,.4g}", f"{values[0]:,.4g} to {values[-1]:,.4g}", deviation])
    return markdown(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face directory (default: the default model)")
    parser.add_argument("--rate", type=float, default=0.8, help="arrivals per second")
    parser.add_argument("--long-share", type=float, default=0.08, help="of the arrivals")
    parser.add_argument("--long-tokens", type=int, nargs=2, default=(1024, 3072), metavar=("LEAST", "MOST"))
    parser.add_argument("--duration", type=float, default=120.0, help="seconds of arrivals")
    parser.add_argument("--warmup", type=float, default=30.0, help="seconds of other arrivals before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=15, help="simulations")
    parser.add_argument("--ingresses", type=int, default=1, help="http.replicas of the server")
    add_server_options(parser, "simulate", 8415)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.model = args.model or default_model_dir()
    with crossdock_server(args, "--set", f"http.replicas={args.ingresses}") as server:
        options = load(server.address, args)
        asyncio.run(run_bench(replace(options, duration=args.warmup, seed=args.seed + 1000)))
        fleet = advertised(server.address, args.ingresses)
        result = asyncio.run(run_bench(options))
    outcomes = simulate(fleet, options, args.seeds)
    live = figures(result.samples, fleet)
    simulated = [figures(outcome.samples, fleet) for outcome in outcomes]
    busy = median(outcome.replicas[0].busy_s / outcome.duration for outcome in outcomes)
    caption = (
        f"{args.model.name}; {hardware()}; {today()}; {args.rate:g} arrivals per second for "
        f"{args.duration:g} s; the replica is busy {busy:.0%} of the simulated time, its steps vary by "
        f"{fleet.noise:.0%}, a first token spends {1e3 * fleet.latency_s:.0f} ms elsewhere; "
        "times in ms."
    )
    data = {"live": live, "simulated": simulated, "busy": busy, "fleet": fleet.model_dump(mode="json")}
    write(args, f"{caption}\n\n{comparison(live, simulated)}", data)


if __name__ == "__main__":
    main()
