"""An engine thread around a tiny engine, driven by a test: one reader, timelines, and the metrics as numbers."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

from prometheus_client.parser import text_string_to_metric_families
from pydantic import ByteSize

from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine import calibrate
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.serving.engine_thread import EngineThread
from crossdock.workers.replica.serving.kv_events import open_publisher
from crossdock.workers.schedule.request.slo import SloClass
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.known_seconds import known_sweep
from tests.waiting import until
from tests.workers.architectures import build

CLASSES = (
    SloClass(name="urgent", ttft_s=1e-9, tpot_s=1e-9),  # no replica can keep these promises
    SloClass(name="standard", ttft_s=1e3, tpot_s=1e3),
)


class Driven:
    """The thread, the reader of its channel, and an event for the end of each request."""

    def __init__(self, *, is_warm: bool = True, **config: Any) -> None:
        settings = {
            "kv_cache_memory": ByteSize(4 << 20),
            "chunk_policy": "fixed",
            "max_num_batched_tokens": 32,
            "max_num_seqs": 4,
            "slo_classes": CLASSES,
            "admission": "queue",
        }
        self.engine = new_engine(wrap_module(build("llama", {})), EngineConfig.model_validate(settings | config))
        if is_warm:
            with patch.object(calibrate, "remembered_sweep", known_sweep):
                calibrate.warm_up(self.engine)
        self.thread = EngineThread(self.engine, kv_events=open_publisher(self.engine.config))
        self.reader = self.thread.channel("test")
        self.ended: dict[str, asyncio.Event] = {}
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.reader.messages():
            for delta in message.deltas:
                if delta.finish_reason is not None:
                    self.ended[delta.request_id].set()

    async def submit(self, name: str, num_tokens: int, max_tokens: int = 3, slo_class: str = "standard") -> None:
        self.ended[name] = asyncio.Event()
        first = 3 + len(self.ended)  # prompts differ from their first token on
        tokens = [first, *(3 + i % 100 for i in range(num_tokens - 1))]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        await self.thread.submit("test", Submission(name, tokens, sampling, slo_class=slo_class, request_id=name))

    async def run(self, name: str, num_tokens: int, max_tokens: int = 3, slo_class: str = "standard") -> None:
        await self.submit(name, num_tokens, max_tokens, slo_class)
        await self.ended[name].wait()

    async def hold(self) -> threading.Event:
        return await hold(self.thread)

    def timeline(self, name: str) -> dict[str, Any]:
        [found] = self.thread.timelines.find(name, None, self.engine.clock())
        return found

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that have these labels."""
        samples = [
            sample
            for family in text_string_to_metric_families(self.thread.metrics.text())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert samples, f"no sample {name} {labels}"
        return sum(sample.value for sample in samples)


@asynccontextmanager
async def driving(**config: Any) -> AsyncIterator[Driven]:
    """Yield a driven engine, and close it in the end."""
    driven = Driven(**config)
    try:
        yield driven
    finally:
        await driven.thread.close()
        await driven.reading


_holding: set[asyncio.Task[None]] = set()


async def hold(thread: EngineThread, before: threading.Event | None = None) -> threading.Event:
    """Keep the engine's thread between two steps until the returned event is set.

    `before`: the event of the last call, which is set now. So the thread takes one step and no more.
    """
    gate, is_held = threading.Event(), threading.Event()

    def wait() -> None:
        is_held.set()
        gate.wait(240)

    holding = asyncio.create_task(thread.call(wait))
    _holding.add(holding)
    holding.add_done_callback(_holding.discard)
    if before is not None:
        await asyncio.sleep(0)  # until `holding` has posted its wait
        before.set()
    await until(is_held.is_set)
    return gate


async def posted(thread: EngineThread, count: int) -> None:
    """Wait until `count` actions wait for the engine's thread."""
    await until(lambda: thread.num_posted >= count)
