"""Do pools follow the load of a day, what happens to streams meanwhile, and does the simulator decide the same?

    python benchmarks/routing/scaling.py --seconds 150 --prompt-rate 0.5 --prompt-tokens 8192 --stream-rate 1.2 \
        "--crossdock-option=--device=emulated:h100-8b*20"      # a day in an hour, on emulated devices

Documents come in the morning and chats in the afternoon, at random times; rates are those of the busiest hour. A
prefill and a decode pool change sizes and roles. Prints every decision: when, the change, the predicted seconds that
decided it, how many requests were running then, how many of these broke, and the longest gap between two tokens in the
ten seconds after it; the replicas of each role by hour; and replica-seconds and goodput beside those of a fixed fleet:
both pools always as large as they may grow (simulated).

The simulator gets the profile that the server advertises after a warm-up, the same arrivals, and the seconds that new
replicas took to come up. Run nothing else beside it.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers and tables

import httpx
import yaml
from servers import add_server_options, crossdock_server, log_of
from tables import Row, hardware, markdown, quantiles, table, today, write

from crossdock.cluster.bench.metrics import Sample, Targets, by_class, spread_ms
from crossdock.cluster.bench.run import BenchOptions, BenchResult, bench_jobs, run_bench
from crossdock.cluster.bench.workloads import arrival_times
from crossdock.cluster.simulate.fleet import describe
from crossdock.cluster.simulate.report import decision_figures, describe_decision
from crossdock.cluster.simulate.simulation import Outcome, Simulation
from crossdock.cluster.watch.scrape import STEP_ERROR, Scrape
from crossdock.workers.model.weights.checkpoint import default_model_dir
from crossdock.workers.report.profile import SchedulingProfile

CLASS = "interactive"
PAUSE_S = 5.0  # between the warm-up and the first arrival: more than `up_delay_s`, so that the load alone decides
START_S = 10.0  # until a simulated replica is up, where none was started live
ENGINE = {"admission": "queue", "max_num_seqs": 16}
SETTING: dict[str, Any] = {  # in the fields of a simulated fleet and of a server
    "pools": [
        {"name": "prefill", "replicas": 1, "max_replicas": 3},
        {"name": "decode", "replicas": 2, "max_replicas": 4},
    ],
    "scaling": {
        "interval_s": 1.0,
        "up_delay_s": 5.0,
        "down_delay_s": 60.0,
        "utilisation": 0.7,
        "flip_roles": True,
    },
    "router": {"shipping": "always"},
}
LARGEST = sum(pool["max_replicas"] for pool in SETTING["pools"])  # replicas
# Arrivals in each hour of a day, as shares of those in the busiest one.
DOCUMENTS = (5, 5, 5, 5, 10, 20, 50, 80, 100, 100, 100, 80, 40, 20, 20, 20, 20, 20, 10, 10, 10, 10, 5, 5)
CHATS = (10, 5, 5, 5, 5, 10, 20, 20, 30, 30, 30, 40, 60, 80, 100, 100, 100, 80, 60, 60, 50, 40, 30, 20)
PARTS = ("night", "morning", "afternoon", "evening")  # of six hours each


@dataclass(frozen=True, slots=True)
class Phase:
    """Arrivals of one shape, at random times."""

    name: str
    begin: float  # seconds after the first arrival
    seconds: float
    rate: float  # arrivals per second
    prompt_tokens: int
    output_tokens: int

    @property
    def end(self) -> float:
        return self.begin + self.seconds

    def arrivals(self) -> list[float]:
        """Return the times of arrivals, in seconds after the first arrival of the load."""
        times = arrival_times(self.rate, Random(f"{self.begin}/{self.prompt_tokens}"))  # the first is at 0
        return [self.begin + at for at in takewhile(lambda at: at < self.seconds, times) if at or not self.begin]


@dataclass(slots=True)
class Life:
    """The seconds in which a replica was up, on the clock of the load."""

    name: str
    pool: str
    since: float
    until: float


@dataclass(slots=True)
class Watch:
    """Polls a server, and notes which replicas it has over time."""

    address: str
    lives: dict[str, Life] = field(default_factory=dict)  # on the monotonic clock of samples

    async def run(self) -> None:
        seen: dict[str, int] = {}
        async with httpx.AsyncClient(timeout=30) as client:
            while True:
                after = [f"{incarnation}:{step}" for incarnation, step in seen.items()]
                answer = await client.get(f"{self.address}/v1/replicas", params={"after": after})
                now = time.perf_counter()
                for each in answer.json()["data"]:
                    seen[each["incarnation"]] = each["last_step"]
                    self.lives.setdefault(each["replica"], Life(each["replica"], each["pool"], now, now)).until = now
                await asyncio.sleep(0.5)

    def since(self, origin: float) -> list[Life]:
        """Return the lives in seconds after `origin`; those that were there at once began with the load."""
        first = min(life.since for life in self.lives.values())
        return [
            Life(life.name, life.pool, 0.0 if life.since == first else life.since - origin, life.until - origin)
            for life in self.lives.values()
        ]


def seconds_until(lives: Sequence[Life], pool: str, count: int, since: float) -> float | None:
    """Return the seconds from `since` until a pool had so many replicas; None: it never had."""
    own = [life for life in lives if life.pool == pool]
    times = sorted(life.since for life in own if life.since >= since)
    return next((at - since for at in times if sum(life.since <= at <= life.until for life in own) >= count), None)


def roles_at(lives: Sequence[Life], decisions: Sequence[Mapping[str, Any]], at: float) -> str:
    """Return how many replicas have each role at a time, as in "2 + 3": pools have the names of roles."""
    roles = {life.name: life.pool for life in lives if life.since <= at <= life.until}
    for each in decisions:
        if each["at"] <= at and each.get("replica") in roles:
            roles[each["replica"]] = each["role"]
    counts = Counter(roles.values())
    return f"{counts['prefill']} + {counts['decode']}"


def day(args: argparse.Namespace) -> list[Phase]:
    kinds = (DOCUMENTS, args.prompt_rate, args.prompt_tokens, 32), (CHATS, args.stream_rate, 128, args.output_tokens)
    return [
        Phase(PARTS[hour // 6], hour * args.seconds, args.seconds, rate * share / 100, prompt, output)
        for shares, rate, prompt, output in kinds
        for hour, share in enumerate(shares)
    ]


def write_trace(path: Path, load: Sequence[Phase]) -> None:
    """Write the arrivals in Mooncake's format, which `crossdock bench` and `crossdock simulate` read."""
    lines = []
    for phase in load:
        lengths = {"input_length": phase.prompt_tokens, "output_length": phase.output_tokens}
        lines += [json.dumps({"timestamp": 1e3 * at, **lengths}) for at in phase.arrivals()]
    path.write_text("\n".join(lines) + "\n")


def write_config(path: Path) -> None:
    """Write the configuration of the server."""
    path.write_text(yaml.safe_dump({**SETTING, "engine": ENGINE}))


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
    errors = scrape.by(STEP_ERROR, "replica", quantile="0.9").values()
    return round(sum(errors) / len(errors) / 1.645, 3) if errors else 0.0


def simulate(
    setting: dict[str, Any], profile: SchedulingProfile, noise: float, start_s: float, options: BenchOptions
) -> Outcome:
    """Play the same arrivals in simulated time."""
    pools = [{**pool, "profile": profile, "engine": ENGINE} for pool in setting["pools"]]
    fleet = describe({**setting, "pools": pools, "noise": noise, "start_s": start_s, "latency_s": 0.01})
    return Simulation(fleet, options.seed).run(bench_jobs(options))


def figures(
    samples: Sequence[Sample], load: Sequence[Phase], origin: float, profile: SchedulingProfile
) -> dict[str, Row]:
    """Return the figures of each phase, by the arrival of the requests, and of all; times in milliseconds."""
    targets: Targets = {slo.name: {"ttft": slo.ttft_s, "tpot": slo.tpot_s} for slo in profile.slo_classes}
    spans: dict[str, list[Phase]] = {}
    for phase in load:
        spans.setdefault(phase.name, []).append(phase)
    rows = {}
    for name, parts in {**spans, "all": list(load)}.items():
        ones = [each for each in samples if any(part.begin <= each.sent - origin < part.end for part in parts)]
        ok = [sample for sample in ones if sample.ok]
        row: Row = {"requests": len(ones), "failed": len(ones) - len(ok)}
        row["good %"] = 100 * by_class(ones, 1.0, targets)["goodput"]["share"]
        row |= quantiles("TTFT", spread_ms(sample.ttft for sample in ok))
        row |= quantiles("TPOT", spread_ms(sample.tpot for sample in ok if sample.tpot is not None))
        rows[name] = row
    return rows


def trace_table(decisions: Sequence[dict[str, Any]], ups: Sequence[float | None] = ()) -> str:
    """Return the decisions. `ups`: seconds until the replicas that a decision asked for were up."""
    lines = [["at, s", "decision, and what decided it", "running", "broken", "longest gap after, ms", "up after, s"]]
    for number, each in enumerate(decisions):
        up = ups[number] if number < len(ups) else None
        cells = [f"{each['at']:.1f}", describe_decision(each), str(each["running"]), str(each["broken"])]
        lines.append([*cells, f"{1e3 * each['longest_gap_s']:.0f}", "" if up is None else f"{up:.1f}"])
    return markdown(lines)


def day_table(days: Mapping[str, tuple[Sequence[Life], Sequence[dict[str, Any]]]], load: Sequence[Phase]) -> str:
    """Return the replicas by role, prefill + decode, in the middle of each hour, and replica-seconds of the day."""
    end = load[-1].end
    middles = [(phase.begin + phase.end) / 2 for phase in load[: len(DOCUMENTS)]]
    lines = [["hour", *map(str, range(len(middles)))]]
    lines += [[name, *(roles_at(*each, at) for at in middles)] for name, each in days.items()]
    text = markdown(lines)
    for name, (lives, _) in days.items():
        seconds = sum(max(min(life.until, end) - max(life.since, 0.0), 0.0) for life in lives)
        share = seconds / (LARGEST * end)
        text += f"\n{name}: {seconds:,.0f} replica-seconds, {share:.0%} of those of {LARGEST} replicas all day"
    return text + "\n"


def run(args: argparse.Namespace, trace: Path, load: Sequence[Phase]) -> tuple[str, dict[str, Any]]:
    """Measure the day, live and simulated. Return the tables and the figures."""
    with crossdock_server(args, "--config", str(trace.with_suffix(".yaml"))) as server:
        warm = BenchOptions(
            url=server.address, workload="chat", duration=args.warmup, concurrency=4, service_tier=CLASS
        )
        asyncio.run(run_bench(warm))
        listed = httpx.get(f"{server.address}/v1/replicas", timeout=30).json()["data"]
        noise = spread_of_steps(Scrape.parse(httpx.get(f"{server.address}/metrics", timeout=30).text, 0.0))
        time.sleep(PAUSE_S)
        options = BenchOptions(url=server.address, workload="trace", trace=trace, service_tier=CLASS, seed=args.seed)
        result, watch = asyncio.run(measure(options))
        decisions = live_decisions(server.address, result)
    lives = watch.since(result.origin)
    ups = [
        seconds_until(lives, each["pool"], each["replicas"], each["at"])
        if each.get("replicas", 0) > each.get("replicas_before", 0)
        else None
        for each in decisions
    ]
    decoder = next(each for each in listed if each["profile"]["role"] != "prefill")
    learnt = {key: decoder[key] for key in ("cost", "overrun", "interval_share") if decoder.get(key)}
    profile = SchedulingProfile.model_validate(decoder["profile"] | learnt)
    known = [up for up in ups if up is not None]
    start_s = sum(known) / len(known) if known else START_S

    outcome = simulate(SETTING, profile, noise, start_s, options)
    decided = [decision_figures(each.at, asdict(each.action), outcome.samples) for each in outcome.decisions]
    until = outcome.duration
    simulated = [Life(each.name, each.pool.name, each.since, each.until or until) for each in outcome.replicas]
    pools = [{"name": pool["name"], "replicas": pool["max_replicas"]} for pool in SETTING["pools"]]
    fixed = simulate({"pools": pools, "router": SETTING["router"]}, profile, noise, start_s, options)
    rows = {
        "live": figures(result.samples, load, result.origin, profile),
        "simulated": figures(outcome.samples, load, 0.0, profile),
        "simulated, pools as large as they may grow": figures(fixed.samples, load, 0.0, profile),
    }
    tables = [f"{name}\n\n{table(each, 'arrived')}" for name, each in rows.items()]
    varied = f"steps vary by {noise:.0%}, a new replica is up after {start_s:.1f} s"
    tables += [f"live\n\n{trace_table(decisions, ups)}", f"simulated; {varied}\n\n{trace_table(decided)}"]
    tables.append(day_table({"live": (lives, decisions), "simulated": (simulated, decided)}, load))
    return "\n".join(tables), {"figures": rows, "decisions": decisions, "simulated": decided}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face directory (default: the default model)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each hour (default: %(default)s)")
    parser.add_argument("--prompt-rate", type=float, default=1.0, help="documents per second")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of each document")
    parser.add_argument("--stream-rate", type=float, default=2.0, help="chats per second")
    parser.add_argument("--output-tokens", type=int, default=256, help="of the answer to a chat")
    parser.add_argument("--warmup", type=float, default=8.0, help="seconds of other requests before")
    parser.add_argument("--seed", type=int, default=0)
    add_server_options(parser, "scaling", 8417)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.model = args.model or default_model_dir()
    load, trace = day(args), log_of(args, "day-trace").with_suffix(".jsonl")
    write_trace(trace, load)
    write_config(trace.with_suffix(".yaml"))
    text, data = run(args, trace, load)
    name = " ".join([args.model.name, *args.crossdock_option])
    shapes = f"{args.prompt_rate:g} documents of {args.prompt_tokens} tokens and {args.stream_rate:g} chats a second"
    caption = f"{name}; {hardware()}; {today()}; hours of {args.seconds:g} s; {shapes} in the busiest; class {CLASS}."
    write(args, f"{caption}\n\n{text}", data)


if __name__ == "__main__":
    main()
