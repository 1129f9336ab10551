"""How fast is Crossdock beside vLLM, llama.cpp, transformers and Ray Serve LLM, with one model and one load?

    benchmarks/peers/vllm.sh install                    # each peer first; 2 to 9 minutes
    python benchmarks/peers/run.py MODEL_DIR --servers crossdock:512 vllm:512 vllm:128 --repeats 2   # 5 minutes a pass

Prints a row per server: output and prefill tokens per second, times to first token, the wall time of 16 requests that
share 2,048 tokens, gaps of streams (quiet and beside long prompts), memory and seconds to start.

A server is NAME[:BUDGET]. The budget is the most tokens of one step, in order of arrival as in vLLM.
`crossdock:adaptive` is the default of `crossdock serve`; `crossdock:unchunked` computes every prompt in one step.
Servers run one at a time and start again for each pass; they alternate in every repeat, so that a slower machine slows
all of them. With `--together` all are up and idle but one, and alternate in every workload: for machines that are slow
for minutes. Run nothing else beside it: `others CPU %` reports what ran (of one core, in the workload with the most of
it), the host's other guests included.
"""

import argparse
import asyncio
import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers and tables

from in_turn import report, shown
from servers import (
    OtherLoad,
    RunningServer,
    add_peer_option,
    add_server_options,
    crossdock_command,
    log_of,
    memory_mib,
    peer_command,
    serving,
)
from tables import Row, table

from crossdock.cluster.bench.http import BenchError
from crossdock.cluster.bench.run import BenchOptions, BenchResult, run_bench
from crossdock.cluster.bench.workloads import Interference

PEERS = ("vllm", "llamacpp", "transformers", "rayserve")
WORKLOADS = ("chat", "prefill", "shared-prefix", "interference")
_ADAPTIVE = 0
_UNCHUNKED = 8192  # tokens: the longest prompt of the model that is measured, in one step


@dataclass(frozen=True)
class ServerSpec:
    """A server to measure. `name` is `crossdock` or one of the peers."""

    name: str
    budget: int

    @classmethod
    def parse(cls, text: str) -> "ServerSpec":
        """Return the server that NAME[:BUDGET] names."""
        name, _, budget = text.partition(":")
        if text in ("crossdock:unchunked", "crossdock:adaptive"):
            return cls(name, _UNCHUNKED if text.endswith("unchunked") else _ADAPTIVE)
        if name not in ("crossdock", *PEERS):
            raise argparse.ArgumentTypeError(f"no server {name!r}: crossdock, {', '.join(PEERS)}")
        if budget and not budget.isdecimal():
            raise argparse.ArgumentTypeError(f"{text!r}: the budget is a number of tokens")
        return cls(name, int(budget or 512))

    @property
    def label(self) -> str:
        return f"{self.name}, adaptive" if self.budget == _ADAPTIVE else f"{self.name}, budget {self.budget}"

    def command(self, args: argparse.Namespace) -> list[str]:
        """Return the command that serves the model."""
        if self.name == "crossdock":
            whole = ["--no-enable-chunked-prefill"] if self.budget == _UNCHUNKED else []
            fixed = ["--chunk-policy", "fixed", "--prefill-order", "fcfs", "--max-num-batched-tokens", str(self.budget)]
            policy = [*fixed, *whole] if self.budget != _ADAPTIVE else []
            return crossdock_command(args, *policy)
        model = args.gguf if self.name == "llamacpp" and args.gguf else args.model
        return peer_command(argparse.Namespace(**{**vars(args), "model": model}), self.name, self.budget)

    def model(self, args: argparse.Namespace) -> str | None:
        """Return the model to ask for; None: the first that the server lists."""
        # transformers lists all models in the hub's cache, not the one that it serves.
        return str(args.model) if self.name == "transformers" else None


Running: TypeAlias = tuple[ServerSpec, RunningServer]


def measure(spec: ServerSpec, workload: str, address: str, args: argparse.Namespace) -> BenchResult:
    counts = {"chat": args.chat_requests, "prefill": args.prefill_requests}
    options = BenchOptions(
        url=address,
        workload=workload,
        num_requests=counts.get(workload),
        model=spec.model(args),
        tokenizer=args.model if (args.model / "tokenizer.json").is_file() else None,
        interference=Interference(long_prompts=args.long_prompts),
        seed=args.seed,
    )
    return asyncio.run(asyncio.wait_for(run_bench(options), args.workload_timeout))


def measure_all(running: Sequence[Running], args: argparse.Namespace) -> list[Row]:
    """Return the figures of each server: workloads one after the other, each on all servers in turn. A server has none
    after one that fails or takes too long: its requests would disturb the next."""
    rows: list[Row] = [{} for _ in running]
    totals: list[Row] = [dict.fromkeys(("failed", "refused", "others CPU %", "client CPU %"), 0.0) for _ in running]
    left_out: set[str] = set()
    for workload in args.workloads:
        for (spec, server), row, total in zip(running, rows, totals, strict=True):
            if spec.label in left_out:
                continue
            others = OtherLoad(server.processes)
            try:
                result = measure(spec, workload, server.address, args)
            except (TimeoutError, BenchError) as error:
                reason = str(error) or f"not done within {args.workload_timeout:.0f} s"
                later = "this and the later workloads are left out"
                print(f"  {spec.label}, {workload}: {reason}; {later}", file=sys.stderr, flush=True)
                left_out.add(spec.label)
                continue
            row |= figures(workload, result.summary)
            total["failed"] += result.summary["requests_failed"]
            total["refused"] += result.summary["requests_refused"]
            total["others CPU %"] = max(total["others CPU %"], 100 * others.share())
            total["client CPU %"] = max(total["client CPU %"], 100 * result.client_cpu_share)
    return [row | total for row, total in zip(rows, totals, strict=True)]


def figures(workload: str, summary: dict[str, Any]) -> Row:
    """Return the figures of one workload on one server."""
    if workload == "chat":
        gaps = {f"chat gap {name}": summary["gap_ms"].get(name, nan) for name in ("p50", "p99")}
        return {
            "chat tok/s": summary["output_tokens_per_s"],
            "chat TTFT p50": summary["ttft_ms"].get("p50", nan),
        } | gaps
    if workload == "prefill":
        return {"prefill tok/s": summary["prompt_tokens_per_s"]}
    if workload == "shared-prefix":
        return {"prefix wall s": summary["duration_s"]}
    found = summary["interference"]
    columns = {"quiet gap": ("p50",), "interfered gap": ("p50", "p99"), "long TTFT": ("p50",)}
    return {
        f"{name} {quantile}": found[f"{name.lower().replace(' ', '_')}_ms"].get(quantile, nan)
        for name, quantiles in columns.items()
        for quantile in quantiles
    }


def start(spec: ServerSpec, args: argparse.Namespace, number: int, stack: ExitStack) -> RunningServer:
    """Start a server at its own port, which ends with `stack`."""
    own = argparse.Namespace(**{**vars(args), "port": args.port + number})
    return stack.enter_context(serving(spec.name, spec.command(own), own, log_of(own, spec.name), spec.model(own)))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face directory with bf16 safetensors")
    parser.add_argument("--gguf", type=Path, help="the same weights for llamacpp (see bf16_gguf.py)")
    parser.add_argument("--servers", nargs="+", type=ServerSpec.parse, default=[ServerSpec("crossdock", 512)])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--together", action="store_true", help="all servers are up; each workload runs on all in turn")
    parser.add_argument("--chat-requests", type=int, default=32)
    parser.add_argument("--prefill-requests", type=int, default=4)
    parser.add_argument("--long-prompts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    add_peer_option(parser)
    parser.add_argument("--workload-timeout", type=float, default=300.0, help="seconds; longer workloads are left out")
    add_server_options(parser, "peers", 8411)
    given = parser.parse_args()
    if given.together and sum(spec.name in ("crossdock", "rayserve") for spec in given.servers) > 1:
        parser.error("--together: at most one server on Ray, whose clusters would meet")
    return given


def main() -> None:
    args = parse_args()
    passes: dict[str, list[Row]] = {}
    groups = [args.servers] if args.together else [[spec] for spec in args.servers]
    for repeat, group in itertools.product(range(args.repeats), groups):
        print(f"[{repeat + 1}/{args.repeats}] {', '.join(spec.label for spec in group)}: starting", flush=True)
        try:
            with ExitStack() as stack:
                running = [(spec, start(spec, args, number, stack)) for number, spec in enumerate(group)]
                for (spec, server), row in zip(running, measure_all(running, args), strict=True):
                    row |= {"memory MiB": memory_mib(server.processes), "start s": server.start_s}
                    passes.setdefault(spec.label, []).append(row)
                    print(f"  {spec.label}: {shown(row)}", flush=True)
        except (RuntimeError, OSError) as error:
            print(f"  {error}", file=sys.stderr, flush=True)
    found = {"peers": passes} if passes else {}
    report(args, "bf16; times in ms", found, lambda _, rows: table(rows, "server"))


if __name__ == "__main__":
    main()
