"""How many CPU seconds does a step take with slices of experts on each of two ranks, and how many with whole experts?

    python benchmarks/models/experts.py      # a minute of two cores

A mixture of experts with random weights, whose router sends rows to all experts alike. Two ranks of one thread each run
on this machine. Prints the least CPU seconds of a rank, the mean of both, for steps of decodes and chunks of a prompt:
they depend little on what else the machine does. They leave out how long one rank waits for the other, which has more
rows of its own experts. Both ways take turns.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tables

import tables
import torch
from cpu_seconds import clock_of_ranks
from pydantic import ByteSize
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from crossdock.cluster.offline.local_engine import local_engine
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine.calibrate import measure_step

STEPS: dict[str, tuple[tuple[int, int] | None, int]] = {  # chunk (start, tokens), streams
    "1 stream": (None, 1),
    "4 streams": (None, 4),
    "16 streams": (None, 16),
    "64 streams": (None, 64),
    "chunk of 256": ((0, 256), 0),
    "chunk of 1,024": ((0, 1024), 0),
}


def write_model(folder: Path) -> None:
    """Write a model of 4 layers with 32 experts of 512 inner features, 4 of them for a token: 0.8 GB in float32."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=1024,
        moe_intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def milliseconds(folder: Path, *, is_whole: bool, repeats: int) -> dict[str, float]:
    """Return the least CPU milliseconds of a rank, in the mean, of each kind of step."""
    engine_config = EngineConfig(
        kv_cache_memory=ByteSize(256 << 20), max_num_batched_tokens=1024, max_num_seqs=64, enable_prefix_caching=False
    )
    spec = ReplicaSpec(
        engine_config.model_spec(str(folder), "float32", 2048),
        engine_config,
        num_threads=1,
        tensor_parallel_size=2,
        enable_expert_parallel=is_whole,
        device="cpu",
    )
    found = {}
    with local_engine(spec) as engine:
        engine.clock = clock_of_ranks(spec.num_ranks)
        for name, (chunk, streams) in STEPS.items():
            measured = measure_step(engine, chunk, streams, 64, repeats, vocabulary=1024)
            assert measured is not None
            found[name] = 1000 * min(measured[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="runs of each step in a turn")
    parser.add_argument("--turns", type=int, default=2, help="starts with slices and with whole experts")
    tables.add_output_options(parser, "experts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        turns = [
            (column, milliseconds(Path(name), is_whole=is_whole, repeats=args.repeats))
            for _ in range(args.turns)
            for column, is_whole in (("slices, ms", False), ("whole experts, ms", True))
        ]
    rows: dict[str, tables.Row] = {
        step: {column: min(found[step] for other, found in turns if other == column) for column, _ in turns}
        for step in STEPS
    }
    tables.write(args, tables.table(rows, "step on two ranks"), rows)


if __name__ == "__main__":
    main()
