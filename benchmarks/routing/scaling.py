"""Do pools follow a load that changes, what happens to streams meanwhile, and does the simulator decide the same?

    python benchmarks/routing/scaling.py                  # the default model: roles, then sizes; about 6 minutes

The load has three phases: prompts (long ones, short answers), streams (short prompts, long answers), and quiet. In the
setting `roles`, one prefill and two decode replicas may change roles. In the setting `sizes`, a pool may grow from one
replica to two. Prints every decision: when, the change, the predicted seconds that decided it, how many requests were
running then, how many of these broke, and the longest gap between two tokens in the ten seconds after it.

The simulator gets the profile that the server advertises after a warm-up, the same arrivals, and the seconds that new
replicas took to come up. Run nothing else beside it.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers and tables

import httpx
from servers import add_server_options, crossdock_command, log_of, serving
from tables import Row, hardware, markdown, quantiles, table, today, write

from crossdock.cluster.bench.metrics import Sample, spread_ms
from crossdock.cluster.bench.run import BenchOptions, BenchResult, bench_jobs, run_bench
from crossdock.cluster.simulate.fleet import describe, read_profile
from crossdock.cluster.simulate.report import decision_figures, describe_decision
from crossdock.cluster.simulate.simulation import Outcome, Simulation
from crossdock.cluster.watch.scrape import QUANTILE, REPLICA, STEP_ERROR, Scrape
from crossdock.workers.model.weights.checkpoint import default_model_dir
from crossdock.workers.report.profile import SchedulingProfile

CLASS = "interactive"
PAUSE_S = 5.0  # between the warm-up and the first arrival: more than `up_delay_s`, so that the load alone decides
SCALING = {"interval_s": 1.0, "up_delay_s": 3.0, "down_delay_s": 15.0, "utilisation": 0.7}
ENGINE = {"admission": "queue", "max_num_seqs": 16}
SETTINGS: dict[str, dict[str, Any]] = {  # in the fields of a simulated fleet and of a server
    "roles": {
        "pools": [{"name": "prefill", "replicas": 1}, {"name": "decode", "replicas": 2}],
        "scaling": SCALING | {"flip_roles": True},
        "router": {"shipping": "always"},
    },
    "sizes": {"pools": [{"name": "mixed", "replicas": 1, "max_replicas": 2}], "scaling": SCALING, "router": {}},
}


@dataclass(frozen=True, slots=True)
class Phase:
    """Evenly spaced arrivals of one shape."""

    name: str
    seconds: float
    rate: float  # arrivals per second
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Watch:
    """Polls a server, and notes how many replicas it has over time."""

    address: str
    counts: list[tuple[float, int]] = field(default_factory=list)  # Unix seconds, replicas

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            while True:
                answer = await client.get(f"{self.address}/v1/replicas")
                self.counts.append((time.time(), len(answer.json()["data"])))
                await asyncio.sleep(0.5)

    def seconds_until(self, count: int, since: float) -> float | None:
        """Return the seconds from `since` until there were so many replicas; None: there were never so many."""
        return next((at - since for at, each in self.counts if at >= since and each >= count), None)


def phases(args: argparse.Namespace) -> list[Phase]:
    return [
        Phase("prompts", args.seconds, args.prompt_rate, args.prompt_tokens, 8),
        Phase("streams", args.seconds, args.stream_rate, 32, args.output_tokens),
        Phase("quiet", args.seconds, 0.2, 32, 8),
    ]


def write_trace(path: Path, load: Sequence[Phase]) -> None:
    """Write the arrivals in Mooncake's format, which `crossdock bench` and `crossdock simulate` read."""
    lines, begin = [], 0.0
    for phase in load:
        for number in range(int(phase.seconds * phase.rate)):
            at = begin + number / phase.rate
            lengths = {"input_length": phase.prompt_tokens, "output_length": phase.output_tokens}
            lines.append(json.dumps({"timestamp": 1e3 * at, **lengths}))
        begin += phase.seconds
    path.write_text("\n".join(lines) + "\n")


def server_flags(setting: dict[str, Any]) -> list[str]:
    """Return the flags of `crossdock serve` for a setting."""
    flags = ["--pools", ",".join(f"{pool['name']}={pool['replicas']}" for pool in setting["pools"])]
    for pool in setting["pools"]:
        if "max_replicas" in pool:
            flags += ["--set", f"pools.{pool['name']}.max_replicas={pool['max_replicas']}"]
    for section in ("scaling", "router"):
        flags += [part for key, value in setting[section].items() for part in ("--set", f"{section}.{key}={value}")]
    return flags + [part for key, value in ENGINE.items() for part in ("--set", f"engine.{key}={value}")]


async def measure(options: BenchOptions) -> tuple[BenchResult, Watch]:
    """Run the load against a server and watch its replicas meanwhile."""
    watch = Watch(options.url)
    watching = asyncio.create_task(watch.run())
    try:
        return await run_bench(options), watch
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def live_decisions(address: str, result: BenchResult) -> list[dict[str, Any]]:
    """Return all decisions of the scaler, at seconds after the first arrival: those of the warm-up are negative."""
    clock = time.time() - time.perf_counter()
    found = httpx.get(f"{address}/v1/scaling", timeout=30).json()["data"]
    return [
        {**decision_figures(each["at"] - clock, each, result.samples), "at": each["at"] - clock - result.origin}
        for each in found
    ]


def spread_of_steps(scrape: Scrape) -> float:
    """Return the standard deviation of step times relative to their prediction, the mean over replicas.

    The error at p90 gives the deviation: 90 % of a normal distribution are within 1.645 of them.
    """
    errors = scrape.by(STEP_ERROR, REPLICA, **{QUANTILE: "0.9"}).values()
    return round(sum(errors) / len(errors) / 1.645, 3) if errors else 0.0


def simulate(
    setting: dict[str, Any], profile: SchedulingProfile, noise: float, start_s: float, options: BenchOptions
) -> Outcome:
    """Play the same arrivals in simulated time."""
    pools = [{**pool, "profile": profile, "engine": ENGINE} for pool in setting["pools"]]
    fleet = describe({**setting, "pools": pools, "noise": noise, "start_s": start_s, "latency_s": 0.01})
    return Simulation(fleet, options.seed).run(bench_jobs(options))


def figures(samples: Sequence[Sample], load: Sequence[Phase], origin: float) -> dict[str, Row]:
    """Return the figures of each phase, by the arrival of the requests; times in milliseconds."""
    rows, begin = {}, origin
    for phase in load:
        end = begin + phase.seconds
        ones = [sample for sample in samples if begin <= sample.sent < end]
        ok = [sample for sample in ones if sample.ok]
        row: Row = {"requests": len(ones), "failed": len(ones) - len(ok)}
        row |= quantiles("TTFT", spread_ms(sample.ttft for sample in ok))
        row |= quantiles("TPOT", spread_ms(sample.tpot for sample in ok if sample.tpot is not None))
        rows[phase.name] = row
        begin = end
    return rows


def trace_table(decisions: Sequence[dict[str, Any]], ups: Sequence[float | None] = ()) -> str:
    """Return the decisions. `ups`: seconds until the replicas that a decision asked for were up."""
    lines = [["at, s", "decision, and what decided it", "running", "broken", "longest gap after, ms", "up after, s"]]
    for number, each in enumerate(decisions):
        up = ups[number] if number < len(ups) else None
        cells = [f"{each['at']:.1f}", describe_decision(each), str(each["running"]), str(each["broken"])]
        lines.append([*cells, f"{1e3 * each['longest_gap_s']:.0f}", "" if up is None else f"{up:.1f}"])
    return markdown(lines)


def run(name: str, args: argparse.Namespace, trace: Path, load: Sequence[Phase]) -> tuple[str, dict[str, Any]]:
    """Measure one setting, live and simulated. Return the tables and the figures."""
    setting = SETTINGS[name]
    with serving(name, crossdock_command(args, *server_flags(setting)), args, log_of(args, name)) as server:
        warm = BenchOptions(
            url=server.address, workload="chat", duration=args.warmup, concurrency=4, service_tier=CLASS
        )
        asyncio.run(run_bench(warm))
        listed = httpx.get(f"{server.address}/v1/replicas", timeout=30).json()["data"]
        scrape = Scrape.parse(httpx.get(f"{server.address}/metrics", timeout=30).text, 0.0)
        noise = spread_of_steps(scrape)
        time.sleep(PAUSE_S)
        options = BenchOptions(url=server.address, workload="trace", trace=trace, service_tier=CLASS, seed=args.seed)
        result, watch = asyncio.run(measure(options))
        decisions = live_decisions(server.address, result)
    wall = time.time() - time.perf_counter() + result.origin
    ups = [
        watch.seconds_until(each["replicas"], wall + each["at"])
        if each.get("replicas", 0) > each.get("replicas_before", 0)
        else None
        for each in decisions
    ]
    decoder = next(each for each in listed if each["profile"]["role"] != "prefill")
    learnt = {key: decoder[key] for key in ("cost", "overrun", "interval_share") if decoder.get(key)}
    profile = SchedulingProfile.model_validate(decoder["profile"] | learnt)
    known = [up for up in ups if up is not None]
    start_s = sum(known) / len(known) if known else args.start_s
    text, simulated = run_simulated(name, profile, noise, start_s, options, load)
    live = figures(result.samples, load, result.origin)
    text = f"{name}, live\n\n{trace_table(decisions, ups)}\n{table(live, 'arrived')}\n{text}"
    return text, {"live": live, "live_decisions": decisions, **simulated}


def run_simulated(
    name: str, profile: SchedulingProfile, noise: float, start_s: float, options: BenchOptions, load: Sequence[Phase]
) -> tuple[str, dict[str, Any]]:
    """Play one setting in simulated time. Return the tables and the figures."""
    outcome = simulate(SETTINGS[name], profile, noise, start_s, options)
    decisions = [decision_figures(each.at, asdict(each.action), outcome.samples) for each in outcome.decisions]
    rows = figures(outcome.samples, load, 0.0)
    title = f"{name}, simulated; steps vary by {noise:.0%}, a new replica is up after {start_s:.1f} s"
    text = f"{title}\n\n{trace_table(decisions)}\n{table(rows, 'arrived')}"
    fleet = {"noise": noise, "start_s": start_s, "profile": profile.model_dump(mode="json")}
    return text, {"simulated": rows, "simulated_decisions": decisions, "fleet": fleet}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face directory (default: the default model)")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase")
    parser.add_argument("--prompt-rate", type=float, default=1.0, help="arrivals per second of the first phase")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of its prompts")
    parser.add_argument("--stream-rate", type=float, default=2.0, help="arrivals per second of the second phase")
    parser.add_argument("--output-tokens", type=int, default=256, help="of its answers")
    parser.add_argument("--warmup", type=float, default=8.0, help="seconds of other requests before")
    parser.add_argument("--start-s", type=float, default=10.0, help="simulated, where no replica was started live")
    parser.add_argument("--profile", help="simulate alone, with a preset or a file of `crossdock tune --profile`")
    parser.add_argument("--seed", type=int, default=0)
    add_server_options(parser, "scaling", 8417)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.model = args.model or (default_model_dir() if args.profile is None else Path(args.profile))
    load = phases(args)
    trace = log_of(args, "trace").with_suffix(".jsonl")
    write_trace(trace, load)
    texts, data = [], {}
    for name in args.settings:
        if args.profile is None:
            text, data[name] = run(name, args, trace, load)
        else:
            options = BenchOptions("", "trace", trace=trace, service_tier=CLASS, seed=args.seed)
            text, data[name] = run_simulated(name, read_profile(args.profile), 0.1, args.start_s, options, load)
        texts.append(text)
    shapes = "; ".join(
        f"{phase.name}: {phase.rate:g} requests per second, {phase.prompt_tokens} tokens in, {phase.output_tokens} out"
        for phase in load
    )
    caption = f"{args.model.name}; {hardware()}; {today()}; phases of {args.seconds:g} s: {shapes}; class {CLASS}."
    write(args.output, "\n\n".join([caption, *texts]), data)


if __name__ == "__main__":
    main()
