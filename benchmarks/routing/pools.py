"""Do prefill and decode pools help running streams, what does the handover cost, how much of a transfer is hidden?

    python benchmarks/routing/pools.py --repeats 1 --prompts 8  # the default model, three settings of pools: 10 minutes

Prints a row per setting: time to first token, time from the first to the second token (the handover) and between later
ones, the share of a transfer that is hidden behind the prefill, its GB/s, and the gaps of running streams, quiet and
beside long prompts.

Settings run one at a time, each on a server of its own, and alternate in every repeat; figures are medians over
repeats. Run nothing else beside it. On one machine the replicas of a setting share its cores: two replicas have half
of them each, so `mixed=2` is what to compare the pools with.
"""

import argparse
import asyncio
import statistics
import sys
import time
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers and tables

import httpx
from servers import add_server_options, crossdock_command, log_of, serving
from tables import Row, hardware, medians, table, today, write

from crossdock.cluster.bench.report import as_json
from crossdock.cluster.bench.run import BenchOptions, run_bench
from crossdock.cluster.bench.workloads import Interference
from crossdock.workers.model.weights.checkpoint import default_model_dir

SETTINGS = ("mixed=1", "mixed=2", "prefill=1,decode=1")  # values of --pools


def ask(address: str, num_tokens: int, num_output: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Send one new prompt. Return the seconds until each token arrived, and the replicas' records of the request."""
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


def handover(address: str, args: argparse.Namespace) -> Row:
    """Return the figures of single prompts, one after the other; times in milliseconds."""
    first_tokens, first_gaps, later_gaps, overlaps, chunks, rates = [], [], [], [], [], []
    for number in range(args.prompts + 1):
        times, legs = ask(address, args.prompt_tokens, args.output_tokens)
        if number == 0:
            continue  # the first transfer of a pair connects the replicas
        gaps = [after - before for before, after in pairwise(times)]
        first_tokens.append(times[0])
        first_gaps.append(gaps[0])
        later_gaps += gaps[1:]
        chunks += [leg["num_chunks"] for leg in legs if leg["num_chunks"]]
        for transfer in (transfer for leg in legs for transfer in leg["transfers"] if transfer["direction"] == "sent"):
            overlaps.append(transfer["overlap"])
            rates.append(transfer["num_bytes"] / max(transfer["write_s"], 1e-9) / 1e9)
    row = {
        "TTFT p50": 1e3 * statistics.median(first_tokens),
        "chunks": statistics.median(chunks),
        "second token after p50": 1e3 * statistics.median(first_gaps),
        "later tokens after p50": 1e3 * statistics.median(later_gaps),
    }
    if overlaps:
        row |= {"overlap %": 100 * statistics.median(overlaps), "GB/s": statistics.median(rates)}
    return row


def interference(address: str, args: argparse.Namespace) -> Row:
    """Return the gaps of running streams, in milliseconds."""
    plan = Interference(long_prompts=args.long_prompts, long_prompt_tokens=args.long_prompt_tokens)
    options = BenchOptions(url=address, workload="interference", interference=plan, timeout=1800.0)
    summary = as_json(asyncio.run(run_bench(options)))["summary"]["interference"]
    return {
        "gap p99 quiet": summary["quiet_gap_ms"]["p99"],
        "gap p99 under interference": summary["interfered_gap_ms"]["p99"],
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face directory (default: the default model)")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), help="values of crossdock serve --pools")
    parser.add_argument("--prompts", type=int, default=12, help="for the handover, one after the other")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--long-prompts", type=int, default=4, help="for the interference")
    parser.add_argument("--long-prompt-tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    add_server_options(parser, "pools", 8413)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.model = args.model or default_model_dir()
    passes: dict[str, list[Row]] = {}
    for repeat in range(args.repeats):
        for pools in args.settings:
            flags = ("--pools", pools, "--admission", "queue", "--set", "router.shipping=always")
            log = log_of(args, pools.replace(",", "-"))
            with serving(pools, crossdock_command(args, *flags), args, log) as server:
                row = handover(server.address, args) | interference(server.address, args)
            passes.setdefault(pools, []).append(row)
            print(f"[{repeat + 1}/{args.repeats}] {pools}: {row}", flush=True)
    caption = (
        f"{args.model.name}; {hardware()}; {today()}; medians of {args.repeats}; {args.prompts} prompts of "
        f"{args.prompt_tokens:,} tokens, then {args.long_prompts} of {args.long_prompt_tokens:,}; times in ms."
    )
    results = {name: medians(rows) for name, rows in passes.items()}
    write(args.output, f"{caption}\n\n{table(results, 'pools')}", passes)


if __name__ == "__main__":
    main()
