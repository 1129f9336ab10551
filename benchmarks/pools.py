"""Prefill and decode pools beside mixed replicas: how much of the transfers is hidden, what the handover costs, and
what long prompts do to streams that run.

    python benchmarks/pools.py                          # the default model; mixed=1, mixed=2, prefill=1,decode=1

Settings run one at a time, each on a server of its own, in turn in every repeat; figures are medians over repeats.
Nothing else should run beside it. On one machine the replicas of a setting share its cores: two replicas have half of
them each, so `mixed=2` is what the pools are to be compared with.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from peers.run import hardware, markdown, medians, serving

from crossdock.cluster.bench.report import as_json
from crossdock.cluster.bench.run import BenchOptions, run_bench
from crossdock.cluster.bench.workloads import Interference
from crossdock.workers.model.checkpoint import default_model_dir

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("mixed=1", "mixed=2", "prefill=1,decode=1")


@dataclass(frozen=True)
class Setting:
    """`crossdock serve --pools NAME`."""

    name: str

    def model(self, args: argparse.Namespace) -> str:
        """What its clients call the model."""
        return str(args.model.name)

    def command(self, args: argparse.Namespace, port: int) -> list[str]:
        crossdock = str(Path(sys.executable).with_name("crossdock"))
        command = [crossdock, "serve", str(args.model), "--port", str(port), "--pools", self.name]
        return [*command, "--admission", "queue", "--set", "router.shipping=always", *args.crossdock_option]


def ask(address: str, num_tokens: int, num_output: int) -> tuple[list[float], list[dict[str, Any]]]:
    """When each token of one new prompt came, seconds after it was asked, and what the replicas say of it."""
    name = uuid.uuid4().hex
    prompt = [100 + (hash((name, place)) % 40_000) for place in range(num_tokens)]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": num_output, "ignore_eos": True, "stream": True}
    body["model"] = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
    started = time.perf_counter()
    headers = {"X-Request-Id": name}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, headers=headers, timeout=300) as answer:
        answer.raise_for_status()
        times = [time.perf_counter() - started for line in answer.iter_lines() if line.startswith("data: {")]
    return times, httpx.get(f"{address}/v1/requests/{name}").json()["requests"]


def measure(address: str, args: argparse.Namespace) -> dict[str, float]:
    """One pass over one server; times in milliseconds."""
    seconds: list[float] = []
    first_gaps, later_gaps, overlaps, chunks, rates = [], [], [], [], []
    for number in range(args.prompts + 1):
        times, legs = ask(address, args.prompt_tokens, args.output_tokens)
        if number == 0:
            continue  # the first transfer of a pair connects it
        gaps = [after - before for before, after in pairwise(times)]
        seconds.append(times[0])
        first_gaps.append(gaps[0])
        later_gaps += gaps[1:]
        chunks += [leg["num_chunks"] for leg in legs if leg["num_chunks"]]
        for sent in (it for leg in legs for it in leg["transfers"] if it["direction"] == "sent"):
            overlaps.append(sent["overlap"])
            rates.append(sent["num_bytes"] / max(sent["write_s"], 1e-9) / 1e9)
    row = {
        "TTFT p50": 1e3 * statistics.median(seconds),
        "chunks": statistics.median(chunks),
        "second token after p50": 1e3 * statistics.median(first_gaps),
        "later tokens after p50": 1e3 * statistics.median(later_gaps),
    }
    if overlaps:
        row |= {"overlap %": 100 * statistics.median(overlaps), "GB/s": statistics.median(rates)}
    plan = Interference(long_prompts=args.long_prompts, long_prompt_tokens=args.long_prompt_tokens)
    options = BenchOptions(url=address, workload="interference", interference=plan, timeout=1800.0)
    summary = as_json(asyncio.run(run_bench(options)))["summary"]["interference"]
    row["gap p99 quiet"] = summary["quiet_gap_ms"]["p99"]
    row["gap p99 under interference"] = summary["interfered_gap_ms"]["p99"]
    return row


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face directory (default: the default model)")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--prompts", type=int, default=12, help="for the handover, one after the other")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--long-prompts", type=int, default=4, help="for the interference")
    parser.add_argument("--long-prompt-tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--port", type=int, default=8413)
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--crossdock-option", action="append", default=[], metavar="--OPTION=VALUE")
    parser.add_argument("--output", type=Path, default=ROOT / ".cache" / "pools" / "results", help="without suffix")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.model = args.model or default_model_dir()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    passes: dict[str, list[dict[str, float]]] = {}
    for repeat in range(args.repeats):
        for name in args.settings:
            log = args.output.with_name(f"{args.output.name}-{name.replace(',', '-')}.log")
            with serving(Setting(name), args, log) as (address, _, _):
                row = measure(address, args)
            passes.setdefault(name, []).append(row)
            print(f"[{repeat + 1}/{args.repeats}] {name}: {row}", flush=True)
    date = datetime.now(UTC).date().isoformat()
    caption = (
        f"{args.model.name}; {hardware()}; {date}; medians of {args.repeats}; {args.prompts} prompts of "
        f"{args.prompt_tokens:,} tokens, then {args.long_prompts} of {args.long_prompt_tokens:,}; times in ms."
    )
    text = markdown({name: medians(rows) for name, rows in passes.items()}, caption)
    args.output.with_suffix(".md").write_text(text)
    args.output.with_suffix(".json").write_text(json.dumps(passes, indent=1) + "\n")
    print("\n" + text)


if __name__ == "__main__":
    main()
