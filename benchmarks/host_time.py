"""How much CPU time does the host take for a step, beside the model's own? Needs no GPU.

    python benchmarks/host_time.py --streams 64,256,1024
    python benchmarks/host_time.py --streams 256 --longest 131000

An engine decodes many streams. The forward pass is left out: random logits take its place. What remains is the work of
a GPU's host in each step: schedule, inputs, padding to a recorded step, draw, update; with `--ahead` also to assume
that the step before has ended, and to read its tokens. What the device computes is left out: the table of pages, and
all but 8 tokens of the vocabulary, so that to find the largest of a row is as little as a launch. With `--longest` one
stream is that long. Prints each part's median in ms of the thread's CPU time, which other processes hardly disturb.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tables import hardware, markdown, today
from transformers import AutoConfig, AutoModelForCausalLM

from crossdock.workers.model import inputs
from crossdock.workers.model.graphs import decode_graphs
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine import engine as engine_module
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.step_sampler import StepSampler, _DrawnStep
from crossdock.workers.replica.serving.interpreter import prepare_interpreter
from crossdock.workers.schedule.ahead import assume_ended
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from crossdock.workers.schedule.scheduler import Scheduler

VOCAB = 8
STEP_S = 0.02
PAGE_BYTES = 16 * 2 * 16 * 4  # tokens, keys and values, elements of the one head, float32
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1 << 17,
}
PARTS = {
    "schedule": (Scheduler, "schedule"),
    "inputs": (StepInputs, "of"),
    "padding": (decode_graphs, "padded"),
    "copy to device": (StepInputs, "on"),
    "draw": (StepSampler, "sample"),
    "draw ahead": (StepSampler, "draw"),
    "read ahead": (_DrawnStep, "read"),
    "update": (Scheduler, "update"),
    "learn": (Engine, "_learn"),
}


class Seconds:
    """CPU seconds of the thread in each part of a step."""

    def __init__(self) -> None:
        self.of_step: dict[str, float] = defaultdict(float)

    def measure(self, name: str, owner: Any, method: str) -> None:
        """Count the seconds of every call of a method from now on."""
        raw = owner.__dict__[method]
        function: Callable[..., Any] = raw.__func__ if isinstance(raw, classmethod) else raw

        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.of_step[name] += time.thread_time() - began

        setattr(owner, method, classmethod(measured) if isinstance(raw, classmethod) else measured)

    @contextmanager
    def assuming(self, *args: Any) -> Iterator[None]:
        """Do as `assume_ended`, and count the seconds of its begin and of its end."""
        began = time.thread_time()
        with assume_ended(*args):
            self.of_step["assume ahead"] += time.thread_time() - began
            yield
            began = time.thread_time()
        self.of_step["assume ahead"] += time.thread_time() - began


class Clock:
    """A clock by which each step takes as long as its streams expect, whatever the host takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += STEP_S / 2  # read when a step begins, and when it ends
        return self.now


def make_engine(streams: int, tokens: int, is_ahead: bool) -> Engine:
    """Return an engine whose steps cost what an 8B model takes on a GPU, by a formula, and compute nothing."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    pages = streams * ((tokens + 2_000) // 16 + 2) + TINY["max_position_embeddings"] // 16 + 8
    config = {
        "max_num_seqs": streams,
        "kv_cache_memory": pages * PAGE_BYTES,
        "async_scheduling": is_ahead,
        "admission": "queue",
        "max_num_batched_tokens": 8192,
    }
    clock = Clock()
    engine = new_engine(wrap_module(module), EngineConfig.model_validate(config), clock=clock)
    logits = torch.randn(8192, VOCAB)

    table = torch.zeros(streams, 1, dtype=torch.int32)

    def run(self: StepInputs, model: LoadedModel, previous_tokens: torch.Tensor | None = None) -> torch.Tensor:
        is_recorded = self.max_query_len == 1
        step = decode_graphs.padded(self, -(-len(self.kv_len) // 8) * 8) if is_recorded else self
        step.on(model.device, previous_tokens)
        return logits[: len(self.wanted)]

    StepInputs.run = run  # type: ignore[method-assign]
    inputs.table_of = lambda *_: table  # the device's work
    sweep = [
        (StepWork(decodes=n, context=n * c), 4e-3 + 1e-5 * n + 4e-8 * n * c)
        for n in (1, 8, 64)
        for c in (100, 1000, 4000)
    ]
    sweep += [(StepWork.of([(0, n)]), 5e-3 + 2e-5 * n) for n in (16, 64, 256, 1024)]
    engine.calibrate(sweep)
    return engine


def steps(engine: Engine, lengths: Sequence[int], num_steps: int) -> dict[str, float]:
    """Return the median ms of each part of a decode step of streams whose prompts have these lengths."""
    seconds = Seconds()
    for number, tokens in enumerate(lengths):
        params = SamplingParams(max_tokens=20_000, ignore_eos=True, temperature=0.0)
        engine.add(
            Submission(f"stream {number}", [i * 7 % VOCAB for i in range(tokens)], params, slo_class="interactive")
        )
    while any(not request.is_decoding for request in engine.scheduler.table.requests()):
        step = engine.step()
    for name, (owner, method) in PARTS.items():
        seconds.measure(name, owner, method)
    engine_module.assume_ended = seconds.assuming
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(num_steps):
        seconds.of_step.clear()
        began = time.thread_time()
        step = engine.step()
        whole = time.thread_time() - began
        for name, took in seconds.of_step.items():
            found[name].append(1e3 * took)
        found["other"].append(1e3 * (whole - sum(seconds.of_step.values())))
        found["step"].append(1e3 * whole)
        found["decodes"].append(step.batch.num_decodes)
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", default="64,256,1024")
    parser.add_argument("--tokens", type=int, default=200, help="of each prompt")
    parser.add_argument("--longest", type=int, default=0, help="tokens of the prompt of one stream; 0: as all others")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ahead", action="store_true", help="steps begin before the tokens of the last are known")
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepare_interpreter()  # as a replica does once its model is loaded
    originals = {key: owner.__dict__[method] for key, (owner, method) in PARTS.items()}
    rows = {}
    for streams in map(int, args.streams.split(",")):
        engine = make_engine(streams, args.tokens, args.ahead)
        lengths = [args.longest or args.tokens] + [args.tokens] * (streams - 1)
        rows[streams] = steps(engine, lengths, args.steps)
        for key, (owner, method) in PARTS.items():
            setattr(owner, method, originals[key])
    names = [*PARTS, "assume ahead", "other", "step", "decodes"]
    lines = [["streams", *names]]
    lines += [[str(n), *(f"{row[name]:.2f}" if name in row else "-" for name in names)] for n, row in rows.items()]
    print(f"CPU ms of a step on the host, {hardware()}, {today()}")
    print(markdown(lines))


if __name__ == "__main__":
    main()
