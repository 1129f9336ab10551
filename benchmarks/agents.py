"""Which server answers coding agents soonest with little KV memory: ours or vLLM, each on one replica or two?

    python benchmarks/agents.py                                             # one replica: 3 minutes
    python benchmarks/agents.py --settings two two-files two-host           # a core for each of two replicas
    python benchmarks/agents.py --settings one one-files vllm --duration 70 --venvs VENVS  # after peers/vllm.sh install

The load is `crossdock bench -w agents`: sessions of many turns, each of which repeats all before it. All settings get
the same sessions and the same KV memory, `--kv-tokens` in all; two replicas have half each, and half of the cores.
`files`: pages that leave a pool go to files, and take no more memory; `host`: they go to the host's memory,
`--host-tokens` in all. `fixed`: with vLLM's rule of chunks, which keeps no stream's pace. `vllm-two`: its data
parallelism. Agents wait for answers, so a slow server gets fewer turns: look at the turns as well as at the times.

Settings run one at a time, each on a server of its own, and alternate in every repeat. Run nothing else beside them.
"""

import argparse
import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from in_turn import in_turn, report
from servers import RunningServer, add_peer_option, add_server_options, crossdock_command, peer_command
from tables import Row, table
from transformers import AutoConfig

from crossdock.cluster.bench.agents import Agents
from crossdock.cluster.bench.metrics import spread_ms
from crossdock.cluster.bench.run import BenchOptions, run_bench
from crossdock.workers.model.weights.checkpoint import default_model_dir

BUDGET = 2048  # tokens of a step: vLLM's default
_FIXED = ("--chunk-policy", "fixed", "--max-num-batched-tokens", str(BUDGET))
SETTINGS: dict[str, tuple[int, tuple[str, ...]]] = {  # replicas, and flags
    "one": (1, ()),
    "one-host": (1, ("--kv-cache-host-memory", "{host}")),
    "one-files": (1, ("--kv-cache-files", "{files},8GiB")),
    "two": (2, ()),
    "two-host": (2, ("--kv-cache-host-memory", "{host}")),
    "two-host-fixed": (2, ("--kv-cache-host-memory", "{host}", *_FIXED)),
    "two-files": (2, ("--kv-cache-files", "{files},8GiB")),
    "vllm": (1, ()),
    "vllm-two": (2, ("--data-parallel-size", "2")),
}
VLLM_PAGE = 32  # tokens: its attention on CPUs takes multiples of 32 alone; ours has 16


def token_bytes(model: Path) -> int:
    """Return the bytes of keys and values of one token, in bfloat16."""
    config = AutoConfig.from_pretrained(model)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head)


def command(args: argparse.Namespace, name: str, files: Path) -> list[str]:
    """Return the command that serves the model with one setting. `files`: a folder for pages."""
    count, flags = SETTINGS[name]
    if name.startswith("vllm"):
        # In pages, because on CPUs vLLM 0.32 takes no notice of --kv-cache-memory-bytes.
        pages = str(args.kv_tokens // count // VLLM_PAGE)
        memory = ["--block-size", str(VLLM_PAGE), "--num-gpu-blocks-override", pages]
        cache = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        cores = np.array_split(range(os.cpu_count() or 1), count)
        bound = "|".join(",".join(map(str, part)) for part in cores)  # the threads of each replica
        serve = peer_command(args, "vllm", BUDGET, *memory, *cache, *flags)
        return ["env", f"VLLM_CPU_OMP_THREADS_BIND={bound}", *serve]
    size = str(args.kv_tokens * token_bytes(args.model) // count)
    pools = ["--pools", f"mixed={count}"] if count > 1 else []
    host = str(args.host_tokens * token_bytes(args.model) // count)
    tiers = [flag.format(host=host, files=files) for flag in flags]
    return crossdock_command(args, "--kv-cache-memory", size, *tiers, *pools)


def measure(args: argparse.Namespace, _: str, server: RunningServer) -> Iterator[tuple[str, Row]]:
    """Yield the figures of one run."""
    options = BenchOptions(
        url=server.address,
        workload="agents",
        duration=args.duration,
        concurrency=args.agents,
        agents=Agents(speed=args.speed, turns=args.turns),
        seed=args.seed,
    )
    result = asyncio.run(asyncio.wait_for(run_bench(options), args.duration + 300))
    summary: dict[str, Any] = result.summary
    samples = [sample for sample in result.samples if sample.ok]
    times = sorted(1000 * sample.ttft for sample in samples)
    spread = spread_ms(sample.ttft for sample in samples)
    yield (
        "agents",
        {
            "turns": len(samples),
            "failed": summary["requests_failed"] + summary["requests_refused"],
            "cached %": 100 * (summary["prefix_hit_rate"] or 0.0),
            "TTFT p50": spread.get("p50", float("nan")),
            **{
                f"p{of}": times[min(of * len(times) // 100, len(times) - 1)] if times else float("nan")
                for of in (95, 99)
            },
            "mean": spread.get("mean", float("nan")),
            "TPOT p50": spread_ms(sample.tpot for sample in samples if sample.tpot is not None).get(
                "p50", float("nan")
            ),
        },
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="Hugging Face directory (default: the embedded model)")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["one"])
    parser.add_argument("--agents", type=int, default=24, help="sessions at a time (default: %(default)s)")
    parser.add_argument("--kv-tokens", type=int, default=20_480, help="tokens of KV memory (default: %(default)s)")
    parser.add_argument("--host-tokens", type=int, default=81_920, help="of `host` beside it (default: %(default)s)")
    parser.add_argument("--turns", type=float, default=43.0, help="median turns of a session (default: %(default)s)")
    parser.add_argument("--speed", type=float, default=3.0, help="divides all pauses (default: %(default)s)")
    parser.add_argument("--duration", type=float, default=150.0, help="seconds of a run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1)
    add_peer_option(parser)
    add_server_options(parser, "agents", 8415)
    args = parser.parse_args()
    args.model = args.model or default_model_dir()
    return args


def main() -> None:
    args = parse_args()
    mebibytes = args.kv_tokens * token_bytes(args.model) / 2**20
    caption = f"{args.agents} agents, {args.kv_tokens:,} tokens ({mebibytes:.0f} MiB) of KV memory"
    passes = in_turn(args.settings, args, partial(command, args), partial(measure, args))
    report(args, f"{caption}, {args.duration:.0f} s; times in ms", passes, lambda _, rows: table(rows, "setting"))


if __name__ == "__main__":
    main()
