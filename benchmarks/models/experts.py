"""How many CPU seconds does a step take on two ranks: with slices of experts on each, with whole ones, with copies?

    python benchmarks/models/experts.py      # some minutes of two cores; --experts 128 --chosen 8 --inner 128 --even

A mixture of experts with random weights, whose routers prefer some experts as much as a start assumes: by shares of
which each division is as likely as any other. With --even they prefer none. Two ranks of one thread each run on this
machine. Prints CPU milliseconds of a step on the rank that takes most, and of its experts alone, layer by layer on the
rank that takes most. Beside them stand the milliseconds that a start measures before it chooses. Each is the least of
some runs, for decodes and chunks of a prompt: they depend less than seconds on what else the machine does. All ways
take turns.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tables

import numpy as np
import tables
import torch
import torch.distributed as dist
from cpu_seconds import clocks_of_ranks
from pydantic import ByteSize
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from crossdock.workers.model.weights.weights import read_config
from crossdock.workers.replica.config import EngineConfig, EplbConfig, ReplicaSpec
from crossdock.workers.replica.engine.calibrate import measure_step
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.engine_loader import engine_of_ranks
from crossdock.workers.replica.ranks.expert_choice import measured_seconds, sizes_of, sliced_experts, whole_experts
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.replica.serving import follower

STEPS: dict[str, tuple[int, bool]] = {  # rows, whether they are one chunk
    "1 stream": (1, False),
    "4 streams": (4, False),
    "16 streams": (16, False),
    "64 streams": (64, False),
    "chunk of 256": (256, True),
    "chunk of 1,024": (1024, True),
}
COPIES = EplbConfig(num_redundant_experts=8, window_size=50, step_interval=50)
WAYS: dict[str, dict[str, Any]] = {
    "slices": {"enable_expert_parallel": False},
    "whole": {"enable_expert_parallel": True},
    "copies": {"enable_expert_parallel": True, "eplb": COPIES},
}
NUM_LAYERS = 4
CONTEXTS = range(64, 70)  # of steps of one stream, whose tokens are sent to other experts after each
SETTLING_STEPS = 120  # after which copies stand where they pay


class StepTime(NamedTuple):
    """CPU milliseconds of the ranks that take most."""

    step: float
    experts: float  # a part of it


Found = dict[str, StepTime]  # by step


def write_model(folder: Path, experts: int, chosen: int, inner: int, *, is_even: bool) -> None:
    """Write a model of 4 layers: 0.8 GB in float32 with 32 experts of 512 inner features."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=1024,
        moe_intermediate_size=inner,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=chosen,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:  # else rows become alike, and all are sent to the same experts
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.experts.down_proj.mul_(0.01)
        if not is_even:
            _prefer_some_experts(model)
    model.save_pretrained(folder)


def _prefer_some_experts(model: torch.nn.Module) -> None:
    """Give the routers of a model shares of experts: the first feature of every row is the same, and brings them."""
    embedding = model.get_input_embeddings().weight
    width = embedding.shape[1]
    embedding[:, 0] = embedding.std() * width**0.5
    constant = (width / 2) ** 0.5  # of that feature after a norm, as half of a row's squares are of it
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    drawn = torch.empty(8 * len(gates), len(gates[0])).exponential_()
    of_first = (drawn[:, : len(gates[0]) // 2].sum(1) / drawn.sum(1) - 0.5).abs()
    for gate, shares in zip(gates, drawn[of_first.argsort()[4::8]], strict=True):  # few layers, but no rare ones
        gate.normal_(std=1.28 * (2 / width) ** 0.5)  # logits vary by row as Gumbel's numbers do
        gate[:, 0] = shares.log() / constant


def spec_of(folder: Path, **way: Any) -> ReplicaSpec:
    """Return the spec of a replica of two ranks."""
    engine_config = EngineConfig(
        kv_cache_memory=ByteSize(256 << 20), max_num_batched_tokens=1024, max_num_seqs=64, enable_prefix_caching=False
    )
    return ReplicaSpec(
        engine_config.model_spec(str(folder), "float32", 2048),
        engine_config,
        num_threads=1,
        tensor_parallel_size=2,
        device="cpu",
        **way,
    )


@contextmanager
def timed_engine(spec: ReplicaSpec) -> Iterator[tuple[Engine, Any]]:
    """Yield an engine on two ranks, and the CPU seconds of each layer's experts, [rank * layer], which ranks add."""
    spawn = multiprocessing.get_context("spawn")
    seconds = spawn.Array("d", 2 * NUM_LAYERS, lock=False)
    worker_group = WorkerGroup(spec, "127.0.0.1", lambda _why: None)
    process = spawn.Process(target=_follow, args=(spec, worker_group.address, seconds), daemon=True)
    process.start()
    try:
        model = worker_group.load()
        _time_experts(model.module, 0, seconds)
        yield engine_of_ranks(model, worker_group, None), seconds
    finally:
        worker_group.close()
        process.join(20)
        process.kill()


def _follow(spec: ReplicaSpec, address: Any, seconds: Any) -> None:
    load = follower.load_rank

    def load_timed(*args: Any) -> Any:
        loaded = load(*args)
        _time_experts(loaded.model.module, 1, seconds)
        return loaded

    follower.load_rank = load_timed  # type: ignore[assignment]  # with the same arguments
    follower.follow(spec, 1, address)


def _time_experts(module: Any, rank: int, seconds: Any) -> None:
    def timed(number: int, compute: Callable[..., Any], *args: Any) -> Any:
        begun = time.thread_time()
        out = compute(*args)
        seconds[number] += time.thread_time() - begun
        return out

    for number, layer in enumerate(module.model.layers):
        experts = layer.mlp.experts
        experts.forward = partial(timed, rank * NUM_LAYERS + number, experts.forward)


def measured(folder: Path, way: str, repeats: int) -> Found:
    """Return the milliseconds of each kind of step."""
    found = {}
    with timed_engine(spec_of(folder, **WAYS[way])) as (engine, seconds):
        clocks = clocks_of_ranks()
        engine.clock = lambda: np.concatenate([clocks(), seconds])  # type: ignore[assignment,return-value]  # for differences
        if way == "copies":
            measure_step(engine, None, 32, 64, SETTLING_STEPS, vocabulary=1024)
        for name, (rows, is_chunk) in STEPS.items():
            steps = []
            for context in CONTEXTS if rows == 1 else CONTEXTS[:1]:
                step = measure_step(
                    engine, (0, rows) if is_chunk else None, 0 if is_chunk else rows, context, repeats, 1024
                )
                assert step is not None
                runs = 1000 * np.array(step[1])  # [run, ranks and their layers]
                ranks = runs[:, :2]
                experts = runs[:, 2:].min(0).reshape(2, NUM_LAYERS).max(0).sum()
                steps.append((ranks.max(1).min(), experts))
            found[name] = StepTime(*np.mean(steps, 0))
    return found


def measured_at_start(folder: Path) -> dict[str, dict[str, float]]:
    """Return the milliseconds of experts in each kind of step that a start measures, by way."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place, spawn.Pool(2) as pool:
        answers = pool.starmap(_measure, [(folder, rank, f"file://{place}/store") for rank in range(2)], chunksize=1)
    return answers[0]


def _measure(folder: Path, rank: int, store: str) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    config = read_config(folder)
    spec = spec_of(folder)
    whole = whole_experts(spec, config, rank, "cpu")
    slices = sliced_experts(spec, config, rank, "cpu", whole)
    sizes = sizes_of(spec, config, "cpu", whole)
    found = measured_seconds(spec, (slices, whole), sizes, torch.float32, [rows for rows, _ in STEPS.values()])
    dist.destroy_process_group()
    return {
        way: dict(zip(STEPS, (1000 * each for each in seconds), strict=True))
        for way, seconds in zip(("slices", "whole"), found, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32, help="in a layer")
    parser.add_argument("--chosen", type=int, default=4, help="experts of a token")
    parser.add_argument("--inner", type=int, default=512, help="inner features of an expert")
    parser.add_argument("--even", action="store_true", help="routers prefer no expert")
    parser.add_argument("--repeats", type=int, default=8, help="runs of each step in a turn")
    parser.add_argument("--turns", type=int, default=3, help="starts in each way")
    tables.add_output_options(parser, "experts")
    args = parser.parse_args()
    turns: dict[str, list[Found]] = {way: [] for way in WAYS}
    starts = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, args.experts, args.chosen, args.inner, is_even=args.even)
        for _ in range(args.turns):
            starts.append(measured_at_start(folder))
            for way, found in turns.items():
                found.append(measured(folder, way, args.repeats))
    rows: dict[str, tables.Row] = {}
    errors = []
    for step in STEPS:
        row = rows[step] = {}
        for way, found in turns.items():
            row[f"{way}, ms"] = statistics.median(each[step].step for each in found)
        for way, found in turns.items():
            row[f"experts: {way}"] = actual = statistics.median(each[step].experts for each in found)
            if way in starts[0]:
                row[f"{way}, start"] = start = statistics.median(each[way][step] for each in starts)
                errors.append(abs(start / actual - 1))
    print(f"error of the seconds of experts: p50 {statistics.median(errors):.0%}, most {max(errors):.0%}")
    tables.write(args, tables.table(rows, "step on two ranks"), rows)


if __name__ == "__main__":
    main()
