"""Do adaptive chunks serve more requests within their targets than fixed token budgets? Crossdock against itself.

    python benchmarks/adaptive.py --duration 40 --repeats 1   # three mixes of chats and 4k-16k prompts: 25 minutes

The setting vllm-default is vLLM's default scheduling, at its default budget: first come first served, and no request
names a class. Each request counts for the class that it names under the other settings.

Prints a table for each mix: the share of good requests, their rate, gaps and times to first token of each SLO class.

The mixes' rates are for a replica that prefills 1,000 tokens per second alone. On another machine give --load the
thousands that it prefills: with less load than it can serve, every setting is good.

Settings run one at a time, each on a server of its own. They alternate in every repeat, so that a slower machine slows
all of them; figures are medians over repeats. Run nothing else beside it. The default model's context is stretched to
17,408 tokens: its answers there are nonsense, but cost as much as real ones.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from in_turn import in_turn, report
from servers import RunningServer, add_server_options, crossdock_command
from tables import Row, cell, markdown, quantiles

from crossdock.cluster.bench.metrics import DEFAULT_TARGETS, Targets, parse_targets
from crossdock.cluster.bench.mix import MIXES
from crossdock.cluster.bench.run import BenchOptions, run_bench
from crossdock.workers.model.weights.checkpoint import default_model_dir

CONTEXT = 17_408  # tokens: the longest prompt of a mix and its answer
POLICIES = {  # flags of `crossdock serve` by the name of the setting
    "adaptive": ("--chunk-policy", "adaptive"),
    **{
        f"fixed-{budget}": ("--chunk-policy", "fixed", "--max-num-batched-tokens", str(budget))
        for budget in (512, 2048, 8192)
    },
    "vllm-default": (  # of `vllm serve` on CPUs: its budget, and all requests in order of arrival, of one class
        *("--chunk-policy", "fixed", "--max-num-batched-tokens", "2048"),
        *("--prefill-order", "fcfs", "--admission", "queue"),
    ),
}
WITHOUT_CLASSES = ("vllm-default",)  # settings under which requests name no class


def stretched(model: Path, context: int, target: Path) -> Path:
    """Make a directory like `model` whose config allows `context` tokens. All other files are links."""
    target.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = context
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return target


# -- one measurement -------------------------------------------------------------------------------------------------


def measure_mix(name: str, setting: str, address: str, args: argparse.Namespace) -> dict[str, Any]:
    options = BenchOptions(
        url=address,
        workload="mix",
        mix=replace(MIXES[name], rate=args.load * MIXES[name].rate),
        duration=args.duration,
        seed=args.seed,
        targets=parse_targets(args.slo),
        asks_for_classes=setting not in WITHOUT_CLASSES,
        timeout=1800.0,
    )
    return asyncio.run(run_bench(options)).summary


def mix_figures(summary: Mapping[str, Any]) -> Row:
    """Return the figures of the table: shares in percent, times in milliseconds."""
    row = _good("all", summary["slo"]["goodput"])
    for name, figures in summary["slo"]["classes"].items():
        row |= _good(name, figures["goodput"]) | quantiles(f"{name} TTFT", figures["ttft_ms"])
        row |= quantiles(f"{name} gap", figures["gap_ms"])
    return row | {"refused": summary["requests_refused"], "failed": summary["requests_failed"]}


def _good(name: str, goodput: Mapping[str, Any]) -> Row:
    return {f"{name} good": 100 * goodput["share"], f"{name} rate": goodput["requests_per_s"]}


# -- the report ------------------------------------------------------------------------------------------------------


def mix_table(rows: Mapping[str, Row], targets: Targets) -> str:
    """Return one row per setting. `good`: share of requests that met their class's targets, and their rate."""
    classes = [name for name in DEFAULT_TARGETS if any(f"{name} good" in row for row in rows.values())]
    gap = targets["interactive"]["tpot"] * 1e3
    head = ["setting", "good", *(f"{name} good" for name in classes), f"interactive gap p99 (target {gap:.0f})"]
    head += [*(f"{name} TTFT p50 / p99" for name in classes)]
    lines = [[*head, "refused / failed", "others CPU %"]]
    for setting, row in rows.items():
        cells = [setting, *(_pair(row, f"{name} good", " %", f"{name} rate", " /s") for name in ("all", *classes))]
        cells += [cell(row.get("interactive gap p99")), *(_p50_p99(row, f"{name} TTFT") for name in classes)]
        lines.append([*cells, _pair(row, "refused", "", "failed", ""), cell(row.get("others CPU %"))])
    return markdown(lines)


def verdict(rows: Mapping[str, Row]) -> str:
    """Return adaptive beside the best fixed budget and beside vLLM's default scheduling, in words."""
    rates = {name: row["all rate"] for name, row in rows.items()}
    fixed = [name for name in rates if name.startswith("fixed-")]
    others = [("best fixed", max(fixed, key=lambda name: rates[name]))] if fixed else []
    others += [("vLLM's default scheduling", name) for name in WITHOUT_CLASSES if name in rates]
    if "adaptive" not in rates or not others:
        return ""
    ours = rates["adaptive"]
    compared = [
        f"{words} {rates[name]:.3g} ({name}), {f'{ours / rates[name]:.2f} times' if rates[name] else 'no good request'}"
        for words, name in others
    ]
    return f"Good requests per second: adaptive {ours:.3g}; " + "; ".join(compared) + "."


def _p50_p99(row: Row, name: str) -> str:
    return _pair(row, f"{name} p50", "", f"{name} p99", "")


def _pair(row: Row, left: str, left_unit: str, right: str, right_unit: str) -> str:
    if left not in row:
        return "-"
    return f"{cell(row[left])}{left_unit} / {cell(row.get(right))}{right_unit}"


# -- all settings ----------------------------------------------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face directory (default: the stretched default)")
    parser.add_argument("--settings", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument(
        "--load", type=float, default=1.0, help="arrivals, as a multiple of the mix's own rate (default: %(default)s)"
    )
    parser.add_argument("--duration", type=float, default=120.0, help="seconds of arrivals, per mix and setting")
    parser.add_argument("--slo", action="append", default=[], metavar="CLASS=ttft:MS,tpot:MS", help="other targets")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    add_server_options(parser, "adaptive", 8412)
    return parser.parse_args()


def measure(args: argparse.Namespace, setting: str, server: RunningServer) -> Iterator[tuple[str, Row]]:
    """Yield the figures of each mix."""
    for mix in args.mixes:
        yield mix, mix_figures(measure_mix(mix, setting, server.address, args))


def main() -> None:
    args = parse_args()
    targets = parse_targets(args.slo)
    names = [name for name in POLICIES if name in args.settings]
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            model = default_model_dir()
            args.model = stretched(model, CONTEXT, Path(folder) / f"{model.name}-{CONTEXT}")
        passes = in_turn(names, args, lambda name, _: crossdock_command(args, *POLICIES[name]), partial(measure, args))

    def show(part: str, rows: Mapping[str, Row]) -> str:
        return f"**{part}**, {args.duration:.0f} s of arrivals:\n\n{mix_table(rows, targets)}\n{verdict(rows)}\n"

    report(args, "times in ms", passes, show)


if __name__ == "__main__":
    main()
