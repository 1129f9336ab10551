"""Do chunks of equal time leave pipeline stages less idle than prompts computed whole?

    python benchmarks/pipeline.py                          # live on 2 stages, then simulated on 4 and 8: 10 minutes

Prints the idle share of the stages' time for each setting, live and simulated, and the live tokens per second.

Live: the default model on two processes of one thread each. A stage is busy while it computes, and idle while it waits
for another stage. Simulated: the real scheduler in virtual time; a step takes the seconds that `StepCost` predicts, as
measured by the live part's warm-up, and each stage an equal share of them. All settings have the same requests, of
which `--streams` are open at a time; one prompt in every `--chats` is long.
"""

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ByteSize
from tables import hardware, today

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.stage import PipelineStage
from crossdock.workers.model.weights.checkpoint import resolve_model
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.ranks.gang import Gang
from crossdock.workers.replica.serving.follower import follow
from crossdock.workers.schedule.batch import Batch, SampledToken
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.request import Request
from crossdock.workers.schedule.scheduler import Scheduler
from crossdock.workers.schedule.submission import SamplingParams, Submission

SETTINGS: dict[str, dict[str, Any]] = {
    "prompts whole": {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192},
    "chunks of 512 tokens": {"chunk_policy": "fixed", "max_num_batched_tokens": 512},
    "chunks of equal time": {"chunk_policy": "adaptive", "max_num_batched_tokens": 2048},
}


def requests(count: int, chats: int, seed: int = 1) -> list[Submission]:
    """Return chats of 60 to 500 tokens in and 8 to 64 out; every `chats`-th prompt has 2,000 to 4,000 tokens."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        is_long = number % chats == chats - 1
        length = rng.randint(2000, 4000) if is_long else rng.randint(60, 500)
        sampling = SamplingParams(max_tokens=rng.randint(8, 64), temperature=0.0, ignore_eos=True)
        found.append(Submission(f"{number}", [rng.randrange(100, 40_000) for _ in range(length)], sampling))
    return found


@dataclass
class BusyTimes:
    """The times at which a stage computed: (began, ended), seconds."""

    spans: list[tuple[float, float]] = field(default_factory=list)

    def idle(self, since: float, until: float) -> float:
        """Return the share of that time in which the stage did not compute."""
        busy = sum(max(min(end, until) - max(begin, since), 0.0) for begin, end in self.spans)
        return 1 - busy / (until - since)


# -- live ------------------------------------------------------------------------------------------------------------


@contextmanager
def watched(busy: BusyTimes) -> Iterator[None]:
    """Record when this process's stage computes: from receiving its input to sending its output or sampling."""
    run, receive = PipelineStage.run, Collectives.receive
    began = 0.0

    def timed_receive(self: Collectives, *args: Any) -> Any:
        nonlocal began
        hidden = receive(self, *args)
        began = time.monotonic()
        return hidden

    def timed_run(self: PipelineStage, *args: Any) -> Any:
        nonlocal began
        began = time.monotonic()
        answer = run(self, *args)
        busy.spans.append((began, time.monotonic()))
        return answer

    PipelineStage.run, Collectives.receive = timed_run, timed_receive  # type: ignore[method-assign]
    try:
        yield
    finally:
        PipelineStage.run, Collectives.receive = run, receive  # type: ignore[method-assign]


def follower(spec: ReplicaSpec, rank: int, address: Any, file: str) -> None:
    """Run one stage in this process and write its busy times to `file`."""
    busy = BusyTimes()
    with watched(busy):
        follow(spec, rank, address)
    Path(file).write_text(json.dumps(busy.spans))


def live(args: argparse.Namespace, settings: dict[str, Any]) -> tuple[list[float], float, StepCost]:
    """Return the idle share of each of two stages, tokens per second, and the measured cost of steps."""
    config = EngineConfig.model_validate({"kv_cache_memory": ByteSize(600 << 20), "admission": "queue"} | settings)
    model = config.model_spec(args.model, max_model_len=8192)
    spec = ReplicaSpec(model, config, num_threads=1, pipeline_parallel_size=2)
    busy = BusyTimes()
    with tempfile.TemporaryDirectory() as folder, watched(busy):
        gang = Gang(spec, "127.0.0.1", lambda why: os._exit(f"lost: {why}" != ""))
        file = f"{folder}/busy"
        process = multiprocessing.get_context("spawn").Process(target=follower, args=(spec, 0, gang.address, file))
        process.start()
        engine = new_engine(gang.load(), config, gang=gang)
        cost = warm_up(engine).cost
        submissions = requests(args.requests, args.chats)
        since = time.monotonic()
        until = feed(engine.add, engine.step, lambda: len(engine.scheduler.table.requests()), submissions, args.streams)
        gang.close()
        process.join()
        stages = [BusyTimes([(begin, end) for begin, end in json.loads(Path(file).read_text())]), busy]
    tokens = sum(len(request.prompt_token_ids) + request.sampling.max_tokens for request in submissions)
    return [stage.idle(since, until) for stage in stages], tokens / (time.monotonic() - since), cost


def feed(
    add: Callable[[Submission], None],
    step: Callable[[], Any],
    num_open: Callable[[], int],
    submissions: Sequence[Submission],
    streams: int,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Keep `streams` requests open until all have ended. Return the time at which the last of them began.

    After that time the pipeline empties, which no setting can prevent.
    """
    waiting = deque(submissions)
    until = clock()
    while waiting or num_open():
        while waiting and num_open() < streams:
            add(waiting.popleft())
            until = clock()
        step()
    return until


# -- simulated -------------------------------------------------------------------------------------------------------


class SimulatedPipeline:
    """Stages in virtual time under a real scheduler.

    A batch enters when the batch before it has left the first stage; at most one batch per stage is in flight.
    """

    def __init__(self, config: EngineConfig, cost: StepCost, num_stages: int) -> None:
        self.now = 0.0
        self.busy = [BusyTimes() for _ in range(num_stages)]
        self.scheduler = Scheduler(config, PagePool(20_000, config.page_size), 8192, cost=cost, depth=num_stages)
        self._cost = cost
        self._free = [0.0] * num_stages  # the time at which each stage is free
        self._flights: deque[tuple[Batch, float]] = deque()

    def add(self, submission: Submission) -> None:
        self.scheduler.add(Request.from_submission(submission, self.now))

    def step(self) -> None:
        while len(self._flights) < len(self._free) and (batch := self.scheduler.schedule(self.now)):
            self._flights.append((batch, self._run(batch)))
        batch, ended = self._flights.popleft()
        self.now = max(self.now, ended)
        self.scheduler.update(
            batch, {part.request.id: SampledToken(5) for part in batch.scheduled if part.samples}, ended
        )

    def _run(self, batch: Batch) -> float:
        ready, share = self.now, self._cost.seconds(batch.work) / len(self._free)
        for stage, busy in enumerate(self.busy):
            begin = max(ready, self._free[stage])
            ready = self._free[stage] = begin + share
            busy.spans.append((begin, ready))
        return ready


def simulated(args: argparse.Namespace, settings: dict[str, Any], cost: StepCost, num_stages: int) -> list[float]:
    """Return the idle share of each stage."""
    config = EngineConfig.model_validate({"admission": "queue", "enable_prefix_caching": False} | settings)
    pipeline = SimulatedPipeline(config, cost, num_stages)
    until = feed(
        pipeline.add,
        pipeline.step,
        lambda: len(pipeline.scheduler.table.requests()),
        requests(10 * args.requests, args.chats),
        args.streams * num_stages // 2,
        lambda: pipeline.now,
    )
    return [stage.idle(0.0, until) for stage in pipeline.busy]


# -- both ------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub name; default: the embedded model")
    parser.add_argument("--requests", type=int, default=60, help="live; ten times as many are simulated")
    parser.add_argument("--chats", type=int, default=6, help="of so many prompts one is long")
    parser.add_argument("--streams", type=int, default=12, help="open at a time on two stages; more on more")
    parser.add_argument("--stages", type=int, nargs="*", default=[4, 8], help="to simulate")
    args = parser.parse_args()
    args.model = str(resolve_model(args.model))
    print(f"{Path(args.model).name}; {hardware()}; {today()}")
    idle: dict[str, list[float]] = {}
    columns = ["2, live", "2", *(str(stages) for stages in args.stages)]
    cost: StepCost | None = None
    rates = {}
    for name, settings in SETTINGS.items():
        shares, rates[name], measured = live(args, settings)
        cost = cost or measured  # one for all settings
        idle[name] = [sum(shares) / 2]
        print(f"{name}: stages idle {', '.join(f'{share:.1%}' for share in shares)}, {rates[name]:.0f} tokens/s")
        for stages in (2, *args.stages):
            idle[name].append(sum(simulated(args, settings, cost, stages)) / stages)
    print(f"\n| idle share of stages | {' | '.join(columns)} | live tokens/s |\n|---{'|---' * (len(columns) + 1)}|")
    for name, shares in idle.items():
        print(f"| {name} | {' | '.join(f'{share:.1%}' for share in shares)} | {rates[name]:.0f} |")
    whole, equal = idle["prompts whole"], idle["chunks of equal time"]
    print("| fewer bubbles | " + " | ".join(f"{a / b:.2f}x" for a, b in zip(whole, equal, strict=True)) + " | |")


if __name__ == "__main__":
    main()
