"""Measure what LoRA adapters cost: streams of the embedded model alone, and with another adapter for each request.

    python benchmarks/models/adapters.py               # 32 adapters of rank 8, all in slots, 8 streams: 2 minutes
    python benchmarks/models/adapters.py --slots 8     # requests wait for loads, beside streams

An engine in this process, so that nothing but steps is measured. Adapters are random, over all seven projections.
Rounds of the base model and rounds with adapters alternate; each round keeps `--streams` streams busy. Prints output
tokens per second, their ratio, and the gaps between a stream's tokens in ms. Run nothing else beside it.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in replicas; torch reads it when imported
import torch
from safetensors.torch import save_file

from crossdock.workers.model.lora.adapter_files import read_adapter
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.engine_loader import load_engine
from crossdock.workers.replica.serving.interpreter import prepare_interpreter
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.submission import Adapter, SamplingParams, Submission


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


def run_round(
    engine: Engine, adapters: list[Adapter | None], cost: StepCost, *, streams: int, tokens: int, number: int
) -> tuple[float, float, list[float], list[float]]:
    """Serve one request for each of `adapters`, so many at a time.

    Returns output tokens per second, tokens per second of CPU time, gaps in seconds, and relative errors of `cost`.
    """
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    waiting = []
    for at, adapter in enumerate(adapters):
        prompt = [(at * 31 + i * 7) % 4000 + 50 for i in range(64)]
        waiting.append(Submission(f"{number}-{at}", prompt, sampling, is_promised=False, adapter=adapter))
    last, gaps, num_live, num_tokens, started = {}, list[float](), 0, 0, time.perf_counter()
    cpu, errors = time.process_time(), list[float]()
    while waiting or num_live:
        while waiting and num_live < streams:
            engine.add(waiting.pop(0))
            num_live += 1
        step = engine.step()
        now = time.perf_counter()
        if step.deltas:
            errors.append(abs(cost.seconds(step.batch.work) / step.seconds - 1))
        for delta in step.deltas:
            assert delta.error is None, delta.error
            num_tokens += len(delta.token_ids)
            if delta.request_id in last:
                gaps.append(now - last[delta.request_id])
            last[delta.request_id] = now
            num_live -= delta.finish_reason is not None
    return num_tokens / (time.perf_counter() - started), num_tokens / (time.process_time() - cpu), gaps, errors


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
    cost = engine.cost_fit.cost
    prepare_interpreter()
    with tempfile.TemporaryDirectory() as folder:
        own = [random_adapter(engine, Path(folder) / f"{n}", given.rank, n) for n in range(given.adapters)]
        kinds: dict[str, list[Adapter | None]] = {"base": [None] * given.adapters, "adapters": [*own]}
        found: dict[str, list[tuple[float, float, list[float], list[float]]]] = {name: [] for name in kinds}
        for number in range(given.rounds + 1):
            for name, adapters in kinds.items():
                sizes = {"streams": given.streams, "tokens": given.tokens}
                one = run_round(engine, adapters, cost, **sizes, number=number * 2 + (name == "base"))
                if number:  # the first round loads adapters and fills caches
                    found[name].append(one)
        for name, rounds in found.items():
            gaps = sorted(gap for *_, each, _ in rounds for gap in each)
            rates = ", ".join(f"{rate:.0f}" for rate, *_ in rounds)
            p99 = gaps[int(0.99 * len(gaps))]
            print(
                f"{name}: {rates} tokens/s; gaps p50 {1e3 * gaps[len(gaps) // 2]:.1f}, p99 {1e3 * p99:.1f}, "
                f"max {1e3 * gaps[-1]:.1f} ms"
            )
        pairs = list(zip(found["base"], found["adapters"], strict=True))
        for at, what in enumerate(("tokens/s", "tokens/CPU s")):
            ratios = [with_[at] / base[at] for base, with_ in pairs]  # type: ignore[operator]
            print(f"ratio of {what}: {statistics.median(ratios):.2f} ({', '.join(f'{each:.2f}' for each in ratios)})")
        slots, fit = engine.scheduler.adapters, engine.cost_fit
        refined, unrefined = fit.error(0.5), statistics.median(found["adapters"][-1][3])
        print(f"{slots.num_loads} loads of {1e3 * slots.load_s:.0f} ms")
        print(f"step error p50 {refined:.1%} of the newest; the last round by the cost of the start {unrefined:.1%}")
    if engine.adapters is not None:
        engine.adapters.close()


if __name__ == "__main__":
    main()
