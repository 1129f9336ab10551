"""Routing in predicted seconds beside policies that count, on live servers.

    python benchmarks/routing.py                        # unlike replicas by every policy, then local or shipped

*unlike*: two replicas of the default model with a core each, one in bfloat16, one in float32, which takes three to
five times as long for everything. *pools*: a prefill and a decode replica, of which each request is computed locally or
shipped, as the router chooses, or always the same way. In simulation the same comparisons are `crossdock simulate
benchmarks/fleet.yaml --policy …` and `--shipping …`.

Every setting is a server of its own, one at a time, in turn in every repeat. In a repeat all get the same arrivals,
every repeat has others: what the first setting is better or worse by is given as the mean over repeats, with its 95 %
interval. A short load of other requests goes before each, so that costs are known as they are when serving. Nothing
else should run beside it.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import httpx
import yaml
from peers.run import hardware, markdown, medians, serving

from crossdock.cluster.bench.http import BenchError
from crossdock.cluster.bench.metrics import parse_targets, spread_ms
from crossdock.cluster.bench.mix import MIXES
from crossdock.cluster.bench.run import BenchOptions, BenchResult, run_bench
from crossdock.cluster.simulate.study import Estimate
from crossdock.cluster.watch.scrape import Scrape
from crossdock.router.fleet import RouterConfig
from crossdock.workers.model.checkpoint import default_model_dir

ROOT = Path(__file__).resolve().parents[1]
TTFT_ERROR = "crossdock_router_ttft_relative_error"
UNLIKE = (
    {"name": "fast", "num_cpus": 1, "dtype": "bfloat16"},
    {"name": "slow", "num_cpus": 1, "dtype": "float32"},
)
POOLS = ({"name": "prefill", "num_cpus": 1}, {"name": "decode", "num_cpus": 1})


@dataclass(frozen=True)
class Setting:
    """Pools and how requests are placed on them; to `serving` a server like any other."""

    part: str
    name: str
    pools: tuple[Mapping[str, Any], ...]
    router: Mapping[str, str]

    def config(self) -> str:
        """The YAML file it is started from."""
        engine = {"kv_cache_memory": "1GiB"}
        return yaml.safe_dump(
            {"engine": engine, "pools": [dict(pool) for pool in self.pools], "router": dict(self.router)}
        )

    def command(self, args: argparse.Namespace, port: int) -> list[str]:
        path = args.output.with_name(f"{args.output.name}-{self.part}-{self.name}.yaml")
        path.write_text(self.config())
        command = [str(Path(sys.executable).with_name("crossdock")), "serve", str(args.model), "--port", str(port)]
        return [*command, "--config", str(path), *args.crossdock_option]

    def model(self, args: argparse.Namespace) -> None:
        """What `serving` asks for: the first model the server names."""


SETTINGS = (
    *(
        Setting("unlike", policy, UNLIKE, {"policy": policy})
        for policy in get_args(RouterConfig.model_fields["policy"].annotation)
    ),
    *(
        Setting("pools", shipping, POOLS, {"shipping": shipping})
        for shipping in get_args(RouterConfig.model_fields["shipping"].annotation)
    ),
)


def load(address: str, args: argparse.Namespace, seed: int) -> BenchOptions:
    """Chats and, now and then, a long prompt."""
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


def measure(address: str, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """One pass over one server; times in milliseconds, shares in percent."""
    options = load(address, args, seed)
    asyncio.run(run_bench(replace(options, duration=args.warmup, seed=seed + 1000)))
    before = _scrape(address)
    took = asyncio.run(run_bench(options))
    return figures(took, _scrape(address).since(before))


def figures(took: BenchResult, change: Scrape) -> dict[str, float]:
    """What stands in the table."""
    goodput = took.summary["slo"]["goodput"]
    row = {"good %": 100 * goodput["share"], "good /s": goodput["requests_per_s"]}
    ttft = spread_ms(sample.ttft for sample in took.samples if sample.ok)
    chats = spread_ms(sample.ttft for sample in took.samples if sample.ok and sample.role != "long")
    for name, spread in (("TTFT", ttft), ("chat TTFT", chats)):
        row |= {f"{name} {quantile}": spread[quantile] for quantile in ("p50", "p99") if quantile in spread}
    for quantile in (0.5, 0.9):
        error = change.quantile(TTFT_ERROR, quantile)
        if error is not None:
            row[f"TTFT error p{100 * quantile:.0f} %"] = 100 * error
    placed = change.by("crossdock_router_decisions_total", "reason")
    shipped = sum(count for reason, count in placed.items() if reason.startswith("shipped"))
    if shipped:
        row["shipped %"] = 100 * shipped / sum(placed.values())
    return row | {"refused": took.summary["requests_refused"], "failed": took.summary["requests_failed"]}


def advantage(passes: Mapping[str, list[dict[str, float]]]) -> str:
    """By how much the first setting is better than each other, repeat by repeat; they had the same arrivals."""
    (first, its), *others = passes.items()
    lines = [
        f"{first} less {name}, {column}: {Estimate.of([a[column] - b[column] for a, b in zip(its, rows, strict=True)])}"
        for name, rows in others
        if len(rows) == len(its)
        for column in ("good %", "good /s")
    ]
    return "\n".join(lines) + "\n" * bool(lines)


def _scrape(address: str) -> Scrape:
    return Scrape.parse(httpx.get(f"{address}/metrics", timeout=30).text, 0.0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face directory (default: the default model)")
    parser.add_argument("--parts", nargs="+", choices=("unlike", "pools"), default=["unlike", "pools"])
    parser.add_argument(
        "--settings", nargs="+", default=[it.name for it in SETTINGS], help="policies, and auto, never, always"
    )
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals per second")
    parser.add_argument("--long-share", type=float, default=0.08, help="of the arrivals")
    parser.add_argument("--long-tokens", type=int, nargs=2, default=(1024, 3072), metavar=("LEAST", "MOST"))
    parser.add_argument("--batch-share", type=float, default=0.5, help="of the long prompts; the others are standard")
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of arrivals")
    parser.add_argument("--warmup", type=float, default=5.0, help="seconds of other arrivals before")
    parser.add_argument("--slo", action="append", default=[], metavar="CLASS=ttft:MS,tpot:MS", help="other targets")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat's arrivals; the next has the next")
    parser.add_argument("--port", type=int, default=8414)
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--crossdock-option", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--output", type=Path, default=ROOT / ".cache" / "routing" / "results", help="without suffix")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.model = args.model or default_model_dir()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    settings = [it for it in SETTINGS if it.part in args.parts and it.name in args.settings]
    passes: dict[str, dict[str, list[dict[str, float]]]] = {}
    for repeat in range(args.repeats):
        for setting in settings:
            log = args.output.with_name(f"{args.output.name}-{setting.part}-{setting.name}.log")
            try:
                with serving(setting, args, log) as (address, _, _):
                    row = measure(address, args, args.seed + repeat)
            except (RuntimeError, OSError, BenchError) as error:
                print(f"{setting.part}, {setting.name}: {error}", file=sys.stderr, flush=True)
                continue
            passes.setdefault(setting.part, {}).setdefault(setting.name, []).append(row)
            cells = ", ".join(f"{name} {it:.4g}" for name, it in row.items())
            print(f"[{repeat + 1}/{args.repeats}] {setting.part}, {setting.name}: {cells}", flush=True)
    low, high = args.long_tokens
    caption = (
        f"{args.model.name}; {hardware()}; {datetime.now(UTC).date()}; medians of {args.repeats}; times in ms; "
        f"{args.rate:g} arrivals a second for {args.duration:g} s; {args.long_share:.0%}: {low:,} to {high:,} tokens, "
        f"{args.batch_share:.0%} of these batch."
    )
    tables = [
        markdown({name: medians(rows) for name, rows in its.items()}, f"**{part}**: {caption}") + advantage(its)
        for part, its in passes.items()
    ]
    args.output.with_suffix(".md").write_text("\n".join(tables))
    args.output.with_suffix(".json").write_text(json.dumps(passes, indent=1) + "\n")
    print("\n" + "\n".join(tables))
    if not passes:
        sys.exit(1)


if __name__ == "__main__":
    main()
