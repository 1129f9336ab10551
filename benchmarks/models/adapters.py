"""Measure what LoRA adapters cost: streams of the embedded model alone, of resident adapters, and of adapters in turn.

    python benchmarks/models/adapters.py               # 32 adapters of rank 8, all in slots, 8 streams: 2 minutes
    python benchmarks/models/adapters.py --slots 8 --tokens 48    # 8 resident ones, and 32 in turn: each is a load

An engine in this process, so that nothing but steps is measured. Adapters are random, over all seven projections.
Rounds of each kind alternate; each keeps `--streams` streams busy. Requests have `--tokens` output tokens in the mean
and end one after the other, so that prompts are computed beside streams in all kinds alike. Prints output tokens per
second, the gaps between a stream's tokens in ms, and both as ratios to the base model's, whose gaps show what the
machine allows. Run nothing else beside it.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in replicas; torch reads it when imported
import numpy as np
import torch
from safetensors.torch import save_file

from crossdock.workers.model.lora.adapter_files import read_adapter
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.engine_loader import load_engine
from crossdock.workers.replica.serving.interpreter import prepare_interpreter
from crossdock.workers.schedule.request.slo import DEFAULT_CLASS
from crossdock.workers.schedule.request.submission import Adapter, SamplingParams, Submission


def random_adapter(engine: Engine, folder: Path, rank: int, seed: int) -> Adapter:
    """Write an adapter for all linears of the engine's model, in PEFT's format."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    assert engine.model.adapters is not None
    for name, site in engine.model.adapters.sites.items():
        for matrix, shape in (("A", (rank, site.in_features)), ("B", (site.out_features, rank))):
            values = torch.randn(shape, generator=generator) * 0.02
            tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = values.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return read_adapter(folder, rank).adapter(folder.name)


class Round(NamedTuple):
    """Counts what the requests of one round got."""

    rate: float  # output tokens per second
    gaps: list[float]  # seconds


def run_round(
    engine: Engine,
    adapters: Sequence[Adapter | None],
    *,
    streams: int,
    tokens: int,
    name: str,
    vocabulary: int = 4050,
    prompt_len: int = 64,
) -> Round:
    """Serve one request for each of `adapters`, so many at a time. Token ids are below `vocabulary`."""
    waiting = []
    for at, adapter in enumerate(adapters):
        prompt = [(at * 31 + i * 7) % (vocabulary - 50) + 50 for i in range(prompt_len)]
        length = tokens // 2 + at * 13 % tokens + 1  # no two streams of a time end in the same step
        sampling = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        waiting.append(Submission(f"{name}-{at}", prompt, sampling, is_promised=False, adapter=adapter))
    last, found, num_live, num_tokens = {}, Round(0.0, []), 0, 0
    started = time.perf_counter()
    while waiting or num_live:
        while waiting and num_live < streams:
            engine.add(waiting.pop(0))
            num_live += 1
        step = engine.step()
        now = time.perf_counter()
        for delta in step.deltas:
            assert delta.error is None, delta.error
            num_tokens += len(delta.token_ids)
            if delta.request_id in last:
                found.gaps.append(now - last[delta.request_id])
            last[delta.request_id] = now
            num_live -= delta.finish_reason is not None
    return found._replace(rate=num_tokens / (time.perf_counter() - started))


def describe(name: str, rounds: Sequence[Round], base: Sequence[Round], promise: float) -> str:
    """Return the rates and gaps of a kind of rounds, and their ratios to those of the base model in the same turns."""
    gaps = np.array([gap for each in rounds for gap in each.gaps])
    p99 = [float(np.quantile(each.gaps, 0.99)) for each in rounds]
    pairs = list(zip(rounds, base, strict=True))
    ratios = {
        "tokens/s": [one.rate / other.rate for one, other in pairs],
        "gaps p99": [own / float(np.quantile(other.gaps, 0.99)) for own, (_, other) in zip(p99, pairs, strict=True)],
    }
    of_base = ", ".join(f"{what} {statistics.median(each):.2f}" for what, each in ratios.items())
    return (
        f"{name}: {', '.join(f'{each.rate:.0f}' for each in rounds)} tokens/s; gaps p50 {1e3 * np.median(gaps):.0f}, "
        f"p99 {1e3 * np.quantile(gaps, 0.99):.0f} ({', '.join(f'{1e3 * each:.0f}' for each in p99)}), "
        f"longest {1e3 * gaps.max():.0f} ms; {(gaps > promise).mean():.1%} over {1e3 * promise:.0f} ms; "
        f"of base: {of_base}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("adapters", 32), ("rank", 8), ("streams", 8), ("slots", 32), ("tokens", 96), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    config = EngineConfig(
        enable_lora=True, max_loras=given.slots, max_lora_rank=given.rank, enable_prefix_caching=False
    )
    engine = load_engine(ReplicaSpec(config.model_spec(None), config, torch.get_num_threads()))
    warm_up(engine)
    assert engine.cost_fit is not None
    prepare_interpreter()
    with tempfile.TemporaryDirectory() as folder:
        own = [random_adapter(engine, Path(folder) / f"{n}", given.rank, n) for n in range(given.adapters)]
        resident = [own[number % given.slots] for number in range(given.adapters)]
        kinds: dict[str, Sequence[Adapter | None]] = {"base": [None] * given.adapters, "resident": resident}
        if given.slots < given.adapters:
            kinds["switching"] = own
        found: dict[str, list[Round]] = {name: [] for name in kinds}
        for number in range(given.rounds + 1):
            for name, adapters in kinds.items():
                if name == "resident":
                    run_round(engine, own[: given.slots], streams=given.streams, tokens=2, name=f"load {number}")
                tokens = given.tokens if number else 8  # the first round fills caches, and prices are learnt
                one = run_round(engine, adapters, streams=given.streams, tokens=tokens, name=f"{name} {number}")
                if number:
                    found[name].append(one)
        promise = next(each.tpot_s for each in engine.config.slo_classes if each.name == DEFAULT_CLASS)
        for name, rounds in found.items():
            print(describe(name, rounds, found["base"], promise))
        slots = engine.scheduler.adapters
        print(
            f"{slots.num_loads} loads of {1e3 * slots.load_s:.0f} ms; step error p50 {engine.cost_fit.error(0.5):.1%}"
        )
    if engine.adapters is not None:
        engine.adapters.close()


if __name__ == "__main__":
    main()
