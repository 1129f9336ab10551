"""Does routing in predicted seconds serve more requests in time than policies that count requests? On live servers.

    python benchmarks/routing/routing.py                        # 6 policies, then 3 ways to ship: 15 minutes
    python benchmarks/routing/routing.py --parts pools          # local or shipped alone: 5 minutes

*unlike*: two replicas of the default model with a core each, one in bfloat16 and one in float32, which takes three to
five times as long for everything; a row for each routing policy. *pools*: a prefill and a decode replica; a row for
each way to choose whether a prompt is computed locally or shipped. Prints good requests, their rate, times to first
token, the error of their prediction, and the share of shipped requests. In simulation the same comparisons are
`crossdock simulate benchmarks/fleet.yaml --policy …` and `--shipping …`.

Every setting is a server of its own, one at a time; settings alternate in every repeat. In one repeat all settings get
the same arrivals; each repeat has others. The advantage of the first setting is the mean over repeats with its 95 %
interval. A short load of other requests precedes each measurement, so that step costs are known as when serving. Run
nothing else beside it.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers and tables

import httpx
import yaml
from servers import add_server_options, crossdock_command, log_of, serving
from tables import Row, hardware, medians, quantiles, table, today, write

from crossdock.cluster.bench.http import BenchError
from crossdock.cluster.bench.metrics import parse_targets, spread_ms
from crossdock.cluster.bench.mix import MIXES
from crossdock.cluster.bench.run import BenchOptions, BenchResult, run_bench
from crossdock.cluster.simulate.study import Estimate
from crossdock.cluster.watch.scrape import Scrape
from crossdock.router.fleet import RouterConfig
from crossdock.workers.model.weights.checkpoint import default_model_dir

TTFT_ERROR = "crossdock_router_ttft_relative_error"
UNLIKE = (
    {"name": "fast", "num_cpus": 1, "dtype": "bfloat16"},
    {"name": "slow", "num_cpus": 1, "dtype": "float32"},
)
POOLS = ({"name": "prefill", "num_cpus": 1}, {"name": "decode", "num_cpus": 1})


@dataclass(frozen=True)
class RoutingSetting:
    """Pools and the way requests are placed on them."""

    part: str
    name: str
    pools: tuple[Mapping[str, Any], ...]
    router: Mapping[str, str]

    def config(self) -> str:
        """Return the YAML file for `crossdock serve --config`."""
        engine = {"kv_cache_memory": "1GiB"}
        return yaml.safe_dump(
            {"engine": engine, "pools": [dict(pool) for pool in self.pools], "router": dict(self.router)}
        )


def _choices(field: str) -> tuple[str, ...]:
    return get_args(RouterConfig.model_fields[field].annotation)


SETTINGS = (
    *(RoutingSetting("unlike", policy, UNLIKE, {"policy": policy}) for policy in _choices("policy")),
    *(RoutingSetting("pools", shipping, POOLS, {"shipping": shipping}) for shipping in _choices("shipping")),
)


def load(address: str, args: argparse.Namespace, seed: int) -> BenchOptions:
    """Return a load of chats and a few long prompts."""
    mix = replace(
        MIXES["chat-heavy"],
        rate=args.rate,
        long_share=args.long_share,
        long_tokens=tuple(args.long_tokens),
        batch_share=args.batch_share,
    )
    return BenchOptions(
        url=address, workload="mix", mix=mix, duration=args.duration, seed=seed, targets=parse_targets(args.slo)
    )


def measure(address: str, args: argparse.Namespace, seed: int) -> Row:
    """Return the figures of one pass over one server; times in milliseconds, shares in percent."""
    options = load(address, args, seed)
    asyncio.run(run_bench(replace(options, duration=args.warmup, seed=seed + 1000)))
    before = _scrape(address)
    result = asyncio.run(run_bench(options))
    return figures(result, _scrape(address).since(before))


def figures(result: BenchResult, change: Scrape) -> Row:
    """Return the figures of the table. `change`: of the server's metrics over the run."""
    goodput = result.summary["slo"]["goodput"]
    row = {"good %": 100 * goodput["share"], "good /s": goodput["requests_per_s"]}
    row |= quantiles("TTFT", spread_ms(sample.ttft for sample in result.samples if sample.ok))
    chats = [sample for sample in result.samples if sample.role != "long"]
    row |= quantiles("chat TTFT", spread_ms(sample.ttft for sample in chats if sample.ok))
    for quantile in (0.5, 0.9):
        error = change.quantile(TTFT_ERROR, quantile)
        if error is not None:
            row[f"TTFT error p{100 * quantile:.0f} %"] = 100 * error
    placed = change.by("crossdock_router_decisions_total", "reason")
    shipped = sum(count for reason, count in placed.items() if reason.startswith("shipped"))
    if shipped:
        row["shipped %"] = 100 * shipped / sum(placed.values())
    return row | {"refused": result.summary["requests_refused"], "failed": result.summary["requests_failed"]}


def advantage(passes: Mapping[str, list[Row]]) -> str:
    """Return the advantage of the first setting over each other one, over repeats with the same arrivals."""
    (first, own), *others = passes.items()
    lines = [
        f"{first} less {name}, {column}: {Estimate.of([a[column] - b[column] for a, b in zip(own, rows, strict=True)])}"
        for name, rows in others
        if len(rows) == len(own)
        for column in ("good %", "good /s")
    ]
    return "\n".join(lines) + "\n" * bool(lines)


def _scrape(address: str) -> Scrape:
    return Scrape.parse(httpx.get(f"{address}/metrics", timeout=30).text, 0.0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face directory (default: the default model)")
    parser.add_argument("--parts", nargs="+", choices=("unlike", "pools"), default=["unlike", "pools"])
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--settings", nargs="+", default=names, help="policies, and auto, never, always")
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals per second")
    parser.add_argument("--long-share", type=float, default=0.08, help="of the arrivals")
    parser.add_argument("--long-tokens", type=int, nargs=2, default=(1024, 3072), metavar=("LEAST", "MOST"))
    parser.add_argument("--batch-share", type=float, default=0.5, help="of the long prompts; the others are standard")
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of arrivals")
    parser.add_argument("--warmup", type=float, default=5.0, help="seconds of other arrivals before")
    parser.add_argument("--slo", action="append", default=[], metavar="CLASS=ttft:MS,tpot:MS", help="other targets")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat's arrivals; the next has the next")
    add_server_options(parser, "routing", 8414)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.model = args.model or default_model_dir()
    passes: dict[str, dict[str, list[Row]]] = {}
    for repeat in range(args.repeats):
        for setting in SETTINGS:
            if setting.part not in args.parts or setting.name not in args.settings:
                continue
            log = log_of(args, f"{setting.part}-{setting.name}")
            config = log.with_suffix(".yaml")
            config.write_text(setting.config())
            try:
                with serving(setting.name, crossdock_command(args, "--config", str(config)), args, log) as server:
                    row = measure(server.address, args, args.seed + repeat)
            except (RuntimeError, OSError, BenchError) as error:
                print(f"{setting.part}, {setting.name}: {error}", file=sys.stderr, flush=True)
                continue
            passes.setdefault(setting.part, {}).setdefault(setting.name, []).append(row)
            cells = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
            print(f"[{repeat + 1}/{args.repeats}] {setting.part}, {setting.name}: {cells}", flush=True)
    low, high = args.long_tokens
    caption = (
        f"{args.model.name}; {hardware()}; {today()}; medians of {args.repeats}; times in ms; "
        f"{args.rate:g} arrivals a second for {args.duration:g} s; {args.long_share:.0%}: {low:,} to {high:,} tokens, "
        f"{args.batch_share:.0%} of these batch."
    )
    tables = []
    for part, settings in passes.items():
        results = {name: medians(rows) for name, rows in settings.items()}
        tables.append(f"**{part}**: {caption}\n\n{table(results, 'setting')}{advantage(settings)}")
    write(args.output, "\n".join(tables), passes)
    if not passes:
        sys.exit(1)


if __name__ == "__main__":
    main()
