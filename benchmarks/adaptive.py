"""Adaptive chunks beside fixed budgets, and short requests beside a long prompt: Crossdock against itself.

    python benchmarks/adaptive.py                       # three mixes of chats and 4k-16k prompts, four settings
    python benchmarks/adaptive.py --short-vs-long       # a 16k prompt prefills while short requests keep coming

Settings run one at a time, each on a server of its own, in turn in every repeat, so that a machine that slows down
slows all of them; figures are medians over repeats. Nothing else should run beside it. Without a model it is the
default one with its context stretched to 17,408 tokens: what it says there does not matter, what it costs does.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peers.run import cpu_seconds, hardware, machine_cpu_seconds, medians, serving

from crossdock.cluster.bench.http import BenchError
from crossdock.cluster.bench.metrics import DEFAULT_TARGETS, parse_targets
from crossdock.cluster.bench.mix import MIXES
from crossdock.cluster.bench.report import as_json
from crossdock.cluster.bench.run import BenchOptions, run_bench
from crossdock.cluster.bench.workloads import Interference
from crossdock.workers.model.checkpoint import default_model_dir

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = 17_408  # tokens: the longest prompt of a mix, its answer, and room


@dataclass(frozen=True)
class Setting:
    """A way to run Crossdock; to `serving` it is a server like its peers."""

    name: str
    flags: tuple[str, ...]

    def command(self, args: argparse.Namespace, port: int) -> list[str]:
        crossdock = str(Path(sys.executable).with_name("crossdock"))
        return [crossdock, "serve", str(args.model), "--port", str(port), *self.flags, *args.crossdock_option]

    def model(self, args: argparse.Namespace) -> None:
        """What `serving` asks for: the first model the server names."""


def _fixed(budget: int) -> Setting:
    return Setting(f"fixed-{budget}", ("--chunk-policy", "fixed", "--max-num-batched-tokens", str(budget)))


POLICIES = (Setting("adaptive", ("--chunk-policy", "adaptive")), *map(_fixed, (512, 2048, 8192)))
# Nobody is refused: a short request that FCFS lets wait for the long one is to be seen waiting.
ORDERS = (
    Setting(
        "adaptive-response-ratio",
        ("--chunk-policy", "adaptive", "--prefill-order", "response_ratio", "--admission", "queue"),
    ),
    Setting("fixed-fcfs", ("--chunk-policy", "fixed", "--prefill-order", "fcfs", "--admission", "queue")),
)


def stretched(model: Path, context: int, target: Path) -> Path:
    """A directory like `model` whose config allows `context` tokens. All other files are links."""
    target.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = context
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return target


def measure_mix(name: str, address: str, args: argparse.Namespace) -> dict[str, Any]:
    options = BenchOptions(
        url=address,
        workload="mix",
        mix=MIXES[name],
        duration=args.duration,
        seed=args.seed,
        targets=parse_targets(args.slo),
        timeout=1800.0,
    )
    return as_json(asyncio.run(run_bench(options)))


def measure_short(address: str, args: argparse.Namespace) -> dict[str, Any]:
    plan = Interference(long_prompts=args.long_prompts, long_prompt_tokens=args.long_prompt_tokens)
    options = BenchOptions(url=address, workload="short-vs-long", interference=plan, seed=args.seed, timeout=1800.0)
    return as_json(asyncio.run(run_bench(options)))


def mix_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """What stands in the table: shares in percent, times in milliseconds."""
    row = _good("all", summary["slo"]["goodput"])
    for name, its in summary["slo"]["classes"].items():
        row |= _good(name, its["goodput"]) | _spread(f"{name} TTFT", its["ttft_ms"])
        row |= _spread(f"{name} gap", its["gap_ms"])
    server = summary.get("server", {})
    found = {
        "prefill": server.get("prefill_tokens_per_s"),
        "error p50": _percent(server.get("step_error_p50")),
        "error p90": _percent(server.get("step_error_p90")),
    }
    row |= {name: value for name, value in found.items() if value is not None}
    return row | {"refused": summary["requests_refused"], "failed": summary["requests_failed"]}


def short_figures(summary: Mapping[str, Any]) -> dict[str, float]:
    its = summary["short_vs_long"]
    return {
        **_spread("quiet", its["quiet_ttft_ms"]),
        **_spread("short", its["short_ttft_ms"]),
        **_spread("long", its["long_ttft_ms"]),
        "count": its["short_ttft_ms"]["count"],
        "failed": summary["requests_failed"],
    }


def mix_table(rows: Mapping[str, Mapping[str, float]], targets: Mapping[str, Mapping[str, float]]) -> str:
    """One row per setting. `good`: the share of requests that met their class's targets, and how many per second."""
    classes = [name for name in DEFAULT_TARGETS if any(f"{name} good" in row for row in rows.values())]
    gap = targets["interactive"]["tpot"] * 1e3
    head = ["setting", "good", *(f"{name} good" for name in classes), f"interactive gap p99 (target {gap:.0f})"]
    head += [*(f"{name} TTFT p50 / p99" for name in classes), "prefill tok/s", "prediction error p50 / p90"]
    lines = [[*head, "refused / failed", "others CPU %"]]
    for setting, row in rows.items():
        cells = [setting, *(_pair(row, f"{name} good", " %", f"{name} rate", " /s") for name in ("all", *classes))]
        cells += [_cell(row.get("interactive gap p99")), *(_p50_p99(row, f"{name} TTFT") for name in classes)]
        cells += [_cell(row.get("prefill")), _pair(row, "error p50", " %", "error p90", " %")]
        lines.append([*cells, _pair(row, "refused", "", "failed", ""), _cell(row.get("others"))])
    return _markdown(lines)


def short_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    head = [
        "setting",
        "short TTFT quiet p50 / p99",
        "short TTFT while prefilling p50 / p99",
        "how many",
        "long TTFT p50",
    ]
    lines = [[*head, "failed", "others CPU %"]]
    for setting, row in rows.items():
        cells = [setting, _p50_p99(row, "quiet"), _p50_p99(row, "short"), _cell(row.get("count"))]
        lines.append([*cells, _cell(row.get("long p50")), _cell(row.get("failed")), _cell(row.get("others"))])
    return _markdown(lines)


def verdict(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Adaptive beside the best of the fixed ones."""
    fixed = {name: row["all rate"] for name, row in rows.items() if name != "adaptive"}
    if "adaptive" not in rows or not fixed:
        return ""
    best = max(fixed, key=lambda name: fixed[name])
    return (
        f"Good requests per second: adaptive {rows['adaptive']['all rate']:.3g}, best fixed {fixed[best]:.3g} ({best})."
    )


def _good(name: str, goodput: Mapping[str, Any]) -> dict[str, float]:
    return {f"{name} good": 100 * goodput["share"], f"{name} rate": goodput["requests_per_s"]}


def _spread(name: str, spread: Mapping[str, Any]) -> dict[str, float]:
    return {f"{name} {quantile}": spread[quantile] for quantile in ("p50", "p99") if quantile in spread}


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _p50_p99(row: Mapping[str, float], name: str) -> str:
    return _pair(row, f"{name} p50", "", f"{name} p99", "")


def _pair(row: Mapping[str, float], left: str, left_unit: str, right: str, right_unit: str) -> str:
    if left not in row:
        return "-"
    return f"{_cell(row[left])}{left_unit} / {_cell(row.get(right))}{right_unit}"


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rows = ("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rows]) + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face directory (default: the stretched default)")
    parser.add_argument("--short-vs-long", action="store_true", help="measure this instead of the mixes")
    names = [setting.name for setting in (*POLICIES, *ORDERS)]
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--duration", type=float, default=120.0, help="seconds of arrivals, per mix and setting")
    parser.add_argument("--slo", action="append", default=[], metavar="CLASS=ttft:MS,tpot:MS", help="other targets")
    parser.add_argument("--long-prompts", type=int, default=3, help="short-vs-long: how many, one after the other")
    parser.add_argument("--long-prompt-tokens", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8412)
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--crossdock-option", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--output", type=Path, default=ROOT / ".cache" / "adaptive" / "results", help="without suffix")
    return parser.parse_args()


def run(args: argparse.Namespace) -> tuple[dict[str, dict[str, list[dict[str, float]]]], list[dict[str, Any]]]:
    """Figures by part (a mix, or short-vs-long) and setting, one per repeat; and all that was measured."""
    settings = [it for it in (ORDERS if args.short_vs_long else POLICIES) if it.name in args.settings]
    parts = ["short-vs-long"] if args.short_vs_long else args.mixes
    passes: dict[str, dict[str, list[dict[str, float]]]] = {part: {} for part in parts}
    raw = []
    for repeat in range(args.repeats):
        for setting in settings:
            print(f"[{repeat + 1}/{args.repeats}] {setting.name}: starting", flush=True)
            log = args.output.with_name(f"{args.output.name}-{setting.name}.log")
            try:
                with serving(setting, args, log) as (address, processes, start_seconds):
                    for part in parts:
                        row, took = _measured(part, address, processes, args)
                        passes[part].setdefault(setting.name, []).append(row)
                        labels = {"part": part, "setting": setting.name, "repeat": repeat, "start_s": start_seconds}
                        raw.append({**labels, "figures": row, "run": took})
                        print(f"  {part}: " + ", ".join(f"{name} {it:.4g}" for name, it in row.items()), flush=True)
            except (RuntimeError, OSError, BenchError) as error:
                print(f"  {error}", file=sys.stderr, flush=True)
    return passes, raw


def _measured(
    part: str, address: str, processes: set[int], args: argparse.Namespace
) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures and all that was measured, with what else ran on the machine meanwhile, in percent of a core."""
    ours = processes | {os.getpid()}
    started, ours_before, all_before = time.monotonic(), cpu_seconds(ours), machine_cpu_seconds()
    took = measure_short(address, args) if args.short_vs_long else measure_mix(part, address, args)
    row = (short_figures if args.short_vs_long else mix_figures)(took["summary"])
    others = machine_cpu_seconds() - all_before - (cpu_seconds(ours) - ours_before)
    return row | {"others": 100 * max(0.0, others / (time.monotonic() - started))}, took


def main() -> None:
    args = parse_args()
    targets = parse_targets(args.slo)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            model = default_model_dir()
            args.model = stretched(model, CONTEXT, Path(folder) / f"{model.name}-{CONTEXT}")
        passes, raw = run(args)
    date = datetime.now(UTC).date().isoformat()
    text = [f"{args.model.name}; {hardware()}; {date}; medians of {args.repeats}; times in ms."]
    results = {part: {name: medians(rows) for name, rows in its.items()} for part, its in passes.items()}
    for part, rows in results.items():
        what = (
            f"{args.long_prompt_tokens:,}-token prompts" if args.short_vs_long else f"{args.duration:.0f} s of arrivals"
        )
        table = short_table(rows) if args.short_vs_long else mix_table(rows, targets)
        text.append(f"**{part}**, {what}:\n\n{table}" + ("" if args.short_vs_long else f"\n{verdict(rows)}\n"))
    args.output.with_suffix(".md").write_text("\n".join(text))
    summary = {"date": date, "hardware": hardware(), "medians": results, "passes": raw}
    args.output.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
    print("\n" + "\n".join(text))
    if not raw:
        sys.exit(1)


if __name__ == "__main__":
    main()
