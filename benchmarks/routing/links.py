"""How slow may links be, and prefill and decode pools still be better than mixed replicas? Live beside simulated.

    python benchmarks/routing/links.py                    # emulated devices, six times as slowly: about 17 minutes
    python benchmarks/routing/links.py --simulate-alone   # half a minute

Chats (interactive) and prompts of 32,768 tokens (standard) arrive at random times at as many devices in both fleets:
two prefill and two decode replicas, or four mixed ones. `--rates` are those of each replica's link. Mixed replicas send
no pages, since no prompts begin alike: they are measured once. Prints of each fleet the p99 gap of chats while long
prompts are computed, the requests that kept the promises of their class, times to first tokens, and from the first to
the last token of long prompts. The better fleet has more good requests or, within 1 %, a gap shorter by 5 %.

Live, everything takes `--slow` times as long: steps, transfers, promises, and the times between arrivals. The figures
are divided by it, so that they are those of the devices. Run nothing else beside it.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers and tables

import numpy as np
from servers import add_server_options, crossdock_server, log_of
from tables import Row, cell, hardware, markdown, today, write

from crossdock.cluster.bench.metrics import DEFAULT_TARGETS, Sample, Targets, by_class, gaps_within, spread_ms
from crossdock.cluster.bench.mix import Mix
from crossdock.cluster.bench.run import BenchOptions, bench_jobs, run_bench
from crossdock.cluster.simulate.fleet import describe
from crossdock.cluster.simulate.simulation import Simulation
from crossdock.workers.report.presets import preset
from crossdock.workers.report.profile import SchedulingProfile

FLEETS = {"pools": {"prefill": 2, "decode": 2}, "mixed": {"mixed": 4}}


def load(args: argparse.Namespace, slow: float = 1.0) -> BenchOptions:
    """Return the arrivals at devices that are so many times as slow."""
    mix = Mix(
        rate=args.rate / slow,
        long_share=args.long_share,
        interactive_share=1.0,
        batch_share=0.0,
        turn_tokens=(64, 256),
        answer_tokens=(150, 350),
        turns=1.0,
        long_tokens=(args.long_tokens, args.long_tokens),
        long_answer_tokens=(64, 64),
    )
    url = f"http://127.0.0.1:{args.port}"
    return BenchOptions(url=url, workload="mix", mix=mix, duration=args.duration * slow, seed=args.seed)


def simulated(fleet: str, shipping: str, profile: SchedulingProfile, args: argparse.Namespace) -> Row:
    """Play the arrivals in simulated time."""
    pools = [{"name": name, "replicas": count, "profile": profile} for name, count in FLEETS[fleet].items()]
    jobs = takewhile(lambda job: (job.due or 0.0) < args.duration, bench_jobs(load(args)))
    simulation = Simulation(describe({"pools": pools, "router": {"shipping": shipping}}), args.seed)
    return figures(simulation.run(jobs).samples, args.duration)


def live(fleet: str, shipping: str, profile: SchedulingProfile, args: argparse.Namespace) -> Row:
    """Serve a fleet of emulated devices with this profile, and send it the arrivals."""
    name = f"{fleet}-{shipping}-{profile.bytes_per_second / 1e9:g}"
    file = log_of(args, name).with_suffix(".json").resolve()
    file.write_text(profile.model_dump_json())
    pools = ",".join(f"{pool}={count}" for pool, count in FLEETS[fleet].items())
    flags = ["--pools", pools, "--device", f"emulated:{file}*{args.slow:g}", "--set", f"router.shipping={shipping}"]
    with crossdock_server(args, *flags, name=name):
        result = asyncio.run(run_bench(load(args, args.slow)))
    row = figures(result.samples, args.duration, args.slow)
    print(name, row, flush=True)  # a long run may end before its table
    return row


def figures(samples: Sequence[Sample], duration: float, slow: float = 1.0) -> Row:
    """Return the figures in milliseconds of devices that are not slowed; goodput in percent and per second."""
    targets: Targets = {
        name: {key: seconds * slow for key, seconds in limits.items()} for name, limits in DEFAULT_TARGETS.items()
    }
    goodput = by_class(samples, duration, targets)["goodput"]
    long = [sample for sample in samples if sample.role == "long" and sample.ok]
    chats = [sample for sample in samples if sample.role != "long" and sample.ok]
    windows = [(sample.sent, sample.times[0]) for sample in long]
    gaps = spread_ms(np.concatenate([gaps_within(sample, windows) for sample in chats]) / slow)
    chat, prompt = (spread_ms(each.ttft / slow for each in kind) for kind in (chats, long))
    return {
        "gap p99": gaps["p99"],
        "good %": 100 * goodput["share"],
        "good /s": goodput["requests_per_s"],
        "chat TTFT p50": chat["p50"],
        "p99": chat["p99"],
        "32k TTFT p50": prompt["p50"],
        "32k rest p50": spread_ms((each.times[-1] - each.times[0]) / slow for each in long)["p50"],
        "failed": len(samples) - len(long) - len(chats),
    }


def better(pools: Row, mixed: Row) -> str:
    """Return which fleet is better."""
    more, shorter = pools["good /s"] / mixed["good /s"] - 1, 1 - pools["gap p99"] / mixed["gap p99"]
    lead = more if abs(more) > 0.01 else shorter if abs(shorter) > 0.05 else 0.0
    return "neither" if lead == 0 else "pools" if lead > 0 else "mixed"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="h100-8b", help="a preset (default: %(default)s)")
    parser.add_argument("--rates", type=float, nargs="+", default=[25.0, 5.0, 2.5, 1.25], help="of the links, GB/s")
    parser.add_argument("--rate", type=float, default=24.0, help="arrivals per second of the devices")
    parser.add_argument("--long-share", type=float, default=0.04, help="of the arrivals")
    parser.add_argument("--long-tokens", type=int, default=32_768)
    parser.add_argument("--duration", type=float, default=16.0, help="seconds of arrivals, of the devices")
    parser.add_argument("--shipping", nargs="+", default=["always", "auto"], help="router.shipping of the pools")
    parser.add_argument("--slow", type=float, default=6.0, help="so many times as slow are live devices")
    parser.add_argument("--simulate-alone", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    add_server_options(parser, "links", 8419)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    kinds = {"simulated": simulated} if args.simulate_alone else {"live": live, "simulated": simulated}
    device, rows = preset(args.profile), dict[tuple[str, str], Row]()
    for shipping in args.shipping:
        for rate in args.rates:
            profile = device.model_copy(update={"bytes_per_second": 1e9 * rate})
            name = f"pools, shipping {shipping}, {rate:g} GB/s"
            rows |= {(name, kind): run("pools", shipping, profile, args) for kind, run in kinds.items()}
    rows |= {("mixed", kind): run("mixed", "auto", device, args) for kind, run in kinds.items()}
    lines = [["fleet", "", *next(iter(rows.values())), "better"]]
    for (name, kind), row in rows.items():
        lines.append(
            [name, kind, *map(cell, row.values()), "" if name == "mixed" else better(row, rows["mixed", kind])]
        )
    work = (
        f"{args.rate:g} arrivals a second for {args.duration:g} s, {args.long_share:.0%} of {args.long_tokens:,} tokens"
    )
    caption = f"{args.profile}; {hardware()}; {today()}; {work}; live {args.slow:g} times as slowly, times divided, ms."
    write(args, f"{caption}\n\n{markdown(lines)}", {", ".join(key): row for key, row in rows.items()})


if __name__ == "__main__":
    main()
