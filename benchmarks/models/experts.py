"""How many CPU seconds does a step take with slices of experts on each of two ranks, and how many with whole experts?

    python benchmarks/models/experts.py      # a minute of two cores; --experts 128 --chosen 8 --inner 128

A mixture of experts with random weights, whose routers prefer some experts as much as predictions assume: by shares of
which each division is as likely as any other. Two ranks of one thread each run on this machine. Prints CPU milliseconds
of a step on the rank that takes most, the least of some runs, for decodes and chunks of a prompt: they depend less than
seconds on what else the machine does. Beside them stand the milliseconds that a start predicts, without the host's
work, and the mean of both ranks. Both ways take turns.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tables

import numpy as np
import tables
import torch
from cpu_seconds import clocks_of_ranks
from pydantic import ByteSize
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from crossdock.cluster.offline.local_engine import local_engine
from crossdock.workers.model.weights.weights import read_config
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine.calibrate import measure_step
from crossdock.workers.replica.ranks.cpu_rates import measure_rates
from crossdock.workers.replica.ranks.expert_choice import division_of, sizes_of
from crossdock.workers.report.expert_division import step_seconds

STEPS: dict[str, tuple[tuple[int, int] | None, int]] = {  # chunk (start, tokens), streams
    "1 stream": (None, 1),
    "4 streams": (None, 4),
    "16 streams": (None, 16),
    "64 streams": (None, 64),
    "chunk of 256": ((0, 256), 0),
    "chunk of 1,024": ((0, 1024), 0),
}
WAYS = {False: "slices", True: "whole"}


def write_model(folder: Path, experts: int, chosen: int, inner: int) -> None:
    """Write a model of 4 layers: 0.8 GB in float32 with 32 experts of 512 inner features."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=1024,
        moe_intermediate_size=inner,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=chosen,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _prefer_some_experts(model)
    model.save_pretrained(folder)


@torch.no_grad()
def _prefer_some_experts(model: torch.nn.Module) -> None:
    """Give the routers of a model shares of experts: the first feature of every row is the same, and brings them."""
    embedding = model.get_input_embeddings().weight
    width = embedding.shape[1]
    embedding[:, 0] = embedding.std() * width**0.5
    constant = (width / 2) ** 0.5  # of that feature after a norm, as half of a row's squares are of it
    for layer in model.model.layers:
        gate = layer.mlp.gate.weight
        gate.normal_(std=1.28 * (2 / width) ** 0.5)  # logits vary by row as Gumbel's numbers do
        gate[:, 0] = torch.empty(len(gate)).exponential_().log() / constant


def spec_of(folder: Path, *, is_whole: bool) -> ReplicaSpec:
    """Return the spec of a replica of two ranks."""
    engine_config = EngineConfig(
        kv_cache_memory=ByteSize(256 << 20), max_num_batched_tokens=1024, max_num_seqs=64, enable_prefix_caching=False
    )
    return ReplicaSpec(
        engine_config.model_spec(str(folder), "float32", 2048),
        engine_config,
        num_threads=1,
        tensor_parallel_size=2,
        enable_expert_parallel=is_whole,
        device="cpu",
    )


def measured(folder: Path, *, is_whole: bool, repeats: int) -> dict[str, tuple[float, float]]:
    """Return the least CPU milliseconds of each kind of step: of the rank that takes most, and of ranks in the mean."""
    found = {}
    with local_engine(spec_of(folder, is_whole=is_whole)) as engine:
        engine.clock = clocks_of_ranks()  # type: ignore[assignment]  # measure_step takes differences
        for name, (chunk, streams) in STEPS.items():
            step = measure_step(engine, chunk, streams, 64, repeats, vocabulary=1024)
            assert step is not None
            ranks = 1000 * np.array(step[1])  # [run, rank]
            found[name] = float(ranks.max(1).min()), float(ranks.mean(1).min())
    return found


def predicted(folder: Path) -> dict[str, tuple[float, float]]:
    """Return the milliseconds of each kind of step that a start predicts: with slices, and with whole experts."""
    config = read_config(folder)
    sizes = sizes_of(config, division_of(spec_of(folder, is_whole=True), config, "cpu", is_whole=True))
    rates = measure_rates(torch.float32, 1)
    found = {}
    for name, (chunk, streams) in STEPS.items():
        slices, whole = step_seconds(sizes, rates, 2, streams or (chunk or (0, 0))[1], max(streams, 1))
        found[name] = 1000 * slices, 1000 * whole
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32, help="in a layer")
    parser.add_argument("--chosen", type=int, default=4, help="experts of a token")
    parser.add_argument("--inner", type=int, default=512, help="inner features of an expert")
    parser.add_argument("--repeats", type=int, default=10, help="runs of each step in a turn")
    parser.add_argument("--turns", type=int, default=2, help="starts with slices and with whole experts")
    tables.add_output_options(parser, "experts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, args.experts, args.chosen, args.inner)
        expected = predicted(folder)
        turns = [
            (is_whole, measured(folder, is_whole=is_whole, repeats=args.repeats))
            for _ in range(args.turns)
            for is_whole in WAYS
        ]
    rows: dict[str, tables.Row] = {}
    for step in STEPS:
        most, mean = ({key: min(f[step][i] for way, f in turns if way == key) for key in WAYS} for i in (0, 1))
        row = rows[step] = {}
        for key, way in WAYS.items():
            row |= {f"{way}, ms": most[key], f"{way}, predicted": expected[step][key]}
        row |= {"whole / slices": most[True] / most[False], "predicted ": expected[step][1] / expected[step][0]}
        row |= {f"{way}, mean of ranks": mean[key] for key, way in WAYS.items()}
    errors = [abs(row[f"{way}, predicted"] / row[f"{way}, ms"] - 1) for row in rows.values() for way in WAYS.values()]
    print(f"error of predicted seconds: p50 {statistics.median(errors):.0%}, most {max(errors):.0%}")
    tables.write(args, tables.table(rows, "step on two ranks"), rows)


if __name__ == "__main__":
    main()
