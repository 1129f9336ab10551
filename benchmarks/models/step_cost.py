"""How well does `StepCost` predict the seconds of a step?

    OMP_WAIT_POLICY=PASSIVE python benchmarks/models/step_cost.py --seconds 60       # two minutes
    python benchmarks/models/step_cost.py --model ./moe --cpu-seconds --ranks 2 --whole-experts

Prints the seconds of the warm-up; p50 and p90 of the relative error, for the steps that it measured and by kind for
steps that it did not; and the same for the steps of a served mix of chats and long prompts, with the coefficients as
measured at start and as refined online. The median residual has a sign: positive means predicted too long.

`--cpu-seconds` for a machine that other processes use too: the engine learns and predicts the CPU seconds of a step,
with one thread, in the mean of its ranks.
"""

import argparse
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cpu_seconds import clock_of_ranks

from crossdock.cluster.offline.local_engine import local_engine
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine.calibrate import measure_step, warm_up
from crossdock.workers.replica.engine.engine import Engine, Step
from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.request.submission import SamplingParams, Submission

UNSEEN: dict[str, list[tuple[tuple[int, int] | None, int, int]]] = {  # chunk (start, tokens), streams, context
    "decodes, 1 to 4": [(None, streams, context) for streams in (1, 2, 3, 4) for context in (100, 1000)],
    "decodes, 6 to 24": [(None, streams, context) for streams in (6, 8, 12, 24) for context in (100, 700)],
    "decodes, 32 to 64": [(None, streams, context) for streams in (32, 48, 64) for context in (100, 700)],
    "chunks to 64": [((start, tokens), 0, 0) for start in (0, 1500, 5000) for tokens in (16, 32, 48)],
    "chunks from 96": [((start, tokens), 0, 0) for start in (0, 1500, 5000) for tokens in (96, 256, 1024)],
    "mixed": [
        ((start, tokens), streams, context)
        for start, tokens in ((0, 32), (0, 256), (3000, 48), (3000, 192))
        for streams, context in ((2, 300), (8, 300), (32, 300))
    ],
}


def report_unseen(engine: Engine, cost: StepCost) -> None:
    print("\nsteps that the warm-up did not measure; residual: (predicted - actual) / actual, median of five each")
    for kind, shapes in UNSEEN.items():
        residuals = []
        for shape in shapes:
            measured = measure_step(engine, *shape, repeats=5)
            if measured is not None:
                work, seconds = measured
                residuals.append((cost.seconds(work) - median(seconds)) / median(seconds))
        print_errors(kind, residuals)


def serve_a_mix(engine: Engine, seconds: float, long_tokens: int) -> list[Step]:
    """Serve chats of 50 to 400 tokens in and 30 to 150 out, and a long prompt every 12 s. Return the steps."""
    rng, steps = random.Random(0), []
    last = min(40_000, engine.executor.vocab_size)
    first = min(1000, last // 2)
    started = time.monotonic()
    next_chat = next_long = started
    count = 0
    while (now := time.monotonic()) < started + seconds or engine.has_work:
        if now < started + seconds:
            if now >= next_chat and len(engine.scheduler.table.running) < 16:
                count += 1
                prompt = [rng.randrange(first, last) for _ in range(rng.randint(50, 400))]
                params = SamplingParams(max_tokens=rng.randint(30, 150), ignore_eos=True, temperature=0.7, seed=count)
                slo_class = rng.choice(["interactive", "standard", "standard"])
                engine.add(Submission(f"chat-{count}", prompt, params, slo_class=slo_class))
                next_chat = now + rng.expovariate(1.0)
            if now >= next_long:
                count += 1
                prompt = [rng.randrange(first, last) for _ in range(long_tokens)]
                engine.add(Submission(f"long-{count}", prompt, SamplingParams(max_tokens=20, ignore_eos=True)))
                next_long = now + 12
        if engine.has_work:
            steps.append(engine.step())
        else:
            time.sleep(0.005)
    return [step for step in steps if step.batch]


def kind_of(work: StepWork) -> str:
    if not work.prefill_tokens:
        return "decodes only"
    return "mixed" if work.decodes else "chunks only"


def report_mix(steps: Sequence[Step], at_start: StepCost) -> None:
    online, start = defaultdict(list), defaultdict(list)
    for step in steps:
        for kind in (kind_of(step.batch.work), "all"):
            online[kind].append((step.predicted - step.seconds) / step.seconds)
            start[kind].append((at_start.seconds(step.batch.work) - step.seconds) / step.seconds)
    for title, residuals in (("refined online", online), ("as measured at start", start)):
        print(f"\nserved mix, {title}")
        for kind in sorted(residuals):
            print_errors(kind, residuals[kind])


def print_errors(name: str, residuals: Sequence[float]) -> None:
    if not residuals:
        return
    errors = np.abs(residuals)
    p50, p90 = np.quantile(errors, [0.5, 0.9])
    print(f"{name:20} n {len(errors):5}  p50 {p50:6.1%}  p90 {p90:6.1%}  median residual {median(residuals):+6.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub name; default: the embedded model")
    parser.add_argument("--seconds", type=float, default=60, help="of the served mix")
    parser.add_argument("--long-tokens", type=int, default=4096, help="of a long prompt (default: %(default)s)")
    parser.add_argument("--cpu-seconds", action="store_true", help="of one thread, in place of seconds")
    parser.add_argument("--ranks", type=int, default=1, help="that divide each layer (default: %(default)s)")
    parser.add_argument("--whole-experts", action="store_true", help="on each rank, in place of slices")
    arguments = parser.parse_args()

    config = EngineConfig.model_validate({"kv_cache_memory": "2GiB", "admission": "queue"})
    spec = ReplicaSpec(
        config.model_spec(arguments.model),
        config,
        num_threads=1 if arguments.cpu_seconds else os.cpu_count() or 1,
        tensor_parallel_size=arguments.ranks,
        enable_expert_parallel=arguments.whole_experts,
        device="cpu",
    )
    with local_engine(spec) as engine:
        if arguments.cpu_seconds:
            engine = Engine(engine.executor, clock_of_ranks(arguments.ranks))
        report(engine, arguments)


def report(engine: Engine, arguments: argparse.Namespace) -> None:
    started = time.perf_counter()
    profile = warm_up(engine)
    print(f"warm-up: {time.perf_counter() - started:.1f} s; load {os.getloadavg()[0]:.2f}")
    print(profile.cost)
    assert engine.cost_fit is not None
    swept = [(profile.cost.seconds(work) - seconds) / seconds for work, seconds in engine.cost_fit.sweep]
    print_errors("the sweep itself", swept)
    report_unseen(engine, profile.cost)
    steps = serve_a_mix(engine, arguments.seconds, arguments.long_tokens)
    report_mix(steps, profile.cost)
    print(f"\nnow {engine.cost_fit.cost}; load {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
