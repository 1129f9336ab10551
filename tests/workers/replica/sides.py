"""Two replicas without their processes, and requests that go from one to the other."""

import asyncio
import importlib.util
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
from pydantic import ByteSize

from crossdock.kvtransfer.events import Event, Figures
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.replica.config import EngineConfig, TransferConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.serving.engine_thread import EngineThread
from crossdock.workers.replica.serving.kv_events import open_publisher
from crossdock.workers.replica.transfer.fetches import OnFigures
from crossdock.workers.replica.transfer.handover import Handover, connect
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import Leg, SamplingParams, Submission
from tests.waiting import PATIENCE_S, until
from tests.workers.architectures import build
from tests.workers.replica.driven import hold, posted

_HAS_NIXL = importlib.util.find_spec("nixl") is not None
NEEDS_NIXL = pytest.mark.skipif(not _HAS_NIXL, reason="needs NIXL: pip install nixl")
NIXL_IN_SOAK = ["tcp", pytest.param("nixl", marks=[NEEDS_NIXL, pytest.mark.soak])]
Answer = TypeVar("Answer")


class Side:
    """One replica without its process: engine, engine thread, dock."""

    def __init__(
        self,
        transport: str,
        model: str = "tiny",
        deadline_s: float = 60.0,
        engine: Engine | None = None,
        patience_s: float = PATIENCE_S,
        checksum: bool = False,
        **config: object,
    ) -> None:
        self.patience_s = patience_s  # of `next`
        torch.manual_seed(0)
        settings = {"max_num_batched_tokens": 80, "max_num_seqs": 8, "kv_cache_memory": ByteSize(4 << 20)} | config
        if engine is None:
            wanted = EngineConfig(**settings)  # type: ignore[arg-type]
            engine = new_engine(
                wrap_module(build("llama", {}), LoadOptions(kv_cache_dtype=wanted.kv_cache_dtype)), wanted
            )
        self.engine = engine
        self.ended: list[tuple[str, bool, Figures, str]] = []
        self.fetched: list[tuple[str, bool, Figures, str]] = []  # fetches of prefixes, at either side
        times = {"deadline_s": deadline_s, "grace_s": 0.1}
        transfer = TransferConfig(transport=transport, checksum=checksum, **times)  # type: ignore[arg-type]

        arguments = self.engine, model, "test", transfer

        def recorded(on_event: Callable[[Event], None], on_figures: OnFigures) -> Handover:
            def record(request_id: str, direction: str, figures: Figures, outcome: str) -> None:
                ended = self.fetched if direction in ("fetched", "lent") else self.ended
                ended.append((request_id, direction in ("sent", "lent"), figures, outcome))
                on_figures(request_id, direction, figures, outcome)

            return connect(*arguments, on_event, record)

        self.thread = EngineThread(self.engine, recorded, open_publisher(self.engine.config))
        self.channel = self.thread.channel("test")
        self.deltas: dict[str, asyncio.Queue[TokenDelta]] = {}
        self.pump = asyncio.create_task(self._pump())

    @property
    def handover(self) -> Handover:
        [found] = self.thread.handovers
        return found

    @property
    def blob(self) -> bytes:
        return self.handover.dock.blob

    async def _pump(self) -> None:
        async for message in self.channel.messages():
            for delta in message.deltas:
                self.deltas.setdefault(delta.request_id, asyncio.Queue()).put_nowait(delta)

    async def next(self, name: str) -> TokenDelta:
        """Return the next delta of a request."""
        return await asyncio.wait_for(self.deltas.setdefault(name, asyncio.Queue()).get(), self.patience_s)

    async def generate(self, submission: Submission) -> list[int]:
        """Return the tokens of a request that runs here alone."""
        await self.thread.submit("test", submission)
        return await self.rest(submission.id)

    async def rest(self, name: str) -> list[int]:
        """Return the tokens of a request from now to its end."""
        tokens: list[int] = []
        while True:
            delta = await self.next(name)
            tokens += delta.token_ids
            if delta.finish_reason is not None:
                return tokens

    async def on_engine(self, function: Callable[[], Answer]) -> Answer:
        """Call `function` in the engine's thread."""
        found: list[Answer] = []
        await self.thread.call(lambda: found.append(function()))
        return found[0]

    async def computed(self, name: str) -> int:
        """Return how many tokens of a request are computed here, or have arrived here; 0 where it is not here."""
        return await self.on_engine(lambda: self.num_computed(name))

    def num_computed(self, name: str) -> int:
        """As `computed`, in the engine's thread or while it is held."""
        request = self.engine.scheduler.table.get(name)
        return request.num_computed_tokens if request is not None else 0

    async def is_clean(self) -> bool:
        """Wait until nothing is owned, quarantined or being transferred. Returns True."""

        async def is_clean() -> bool:
            counts = await self.on_engine(self.engine.pages.counts)
            num_open = sum(side.dock.counts().num_open for side in self.thread.handovers)
            return counts.owned == counts.quarantined == num_open == 0

        await until(is_clean)
        return True

    async def close(self) -> None:
        await self.thread.close()
        await self.pump

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens computed here since the start."""
        return int(self.thread.metrics.registry.get_sample_value("crossdock_prompt_tokens_total") or 0)


@asynccontextmanager
async def pair(transport: str, **config: object) -> AsyncIterator[tuple[Side, Side]]:
    async with closing(Side(transport, **config), Side(transport, **config)) as sides:  # type: ignore[arg-type]
        yield sides


@asynccontextmanager
async def closing(*sides: Side) -> AsyncIterator[tuple[Side, Side]]:
    """Yield two sides, check that both are clean in the end, and close them."""
    try:
        yield sides[0], sides[1]
        for side in sides:
            assert await side.is_clean()
    finally:
        for side in sides:
            await side.close()


def submission(prompt: list[int], num_tokens: int = 12, **params: object) -> Submission:
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **({"temperature": 0.0} | params))  # type: ignore[arg-type]
    return Submission(uuid.uuid4().hex, prompt, sampling)


def local(work: Submission) -> Submission:
    """Return a copy of the request under another id, to run on one side alone."""
    return replace(work, id=f"local {work.id}")


async def start(prefill: Side, decode: Side, work: Submission) -> None:
    """Submit both legs of a request."""
    await decode.thread.submit("test", replace(work, leg=Leg.RECEIVE, peer=prefill.blob))
    await prefill.thread.submit("test", replace(work, leg=Leg.SEND, peer=decode.blob))


async def start_and_hold(prefill: Side, decode: Side, work: Submission) -> threading.Event:
    """Submit both legs, and keep the prefill engine's thread after its first chunk until the returned event is set.

    So the transfer is under way, however late the test's event loop is.
    """
    gate = await hold(prefill.thread)
    starting = asyncio.create_task(start(prefill, decode, work))
    await posted(prefill.thread, 1)
    while not prefill.num_computed(work.id):
        gate = await hold(prefill.thread, gate)
    await starting
    return gate


async def ship(prefill: Side, decode: Side, work: Submission) -> list[int]:
    """Return the tokens of a request that is computed by both."""
    await start(prefill, decode, work)
    first = await prefill.next(work.id)
    if first.finish_reason is not None:
        await decode.thread.abort([(work.id, work.epoch)])
        return list(first.token_ids)
    rest = await decode.rest(work.id)
    assert (await prefill.next(work.id)).finish_reason is FinishReason.SHIPPED
    return [*first.token_ids, *rest]


def prompts(count: int = 50) -> list[list[int]]:
    """Return prompts of 1 to 240 tokens. After the tenth, two tokens would be equally likely but for the 1."""
    begins = [13 * number + (number == 10) for number in range(count)]
    return [[(begins[n] + 7 * at * at) % 90 + 3 for at in range(1 + 37 * n % 240)] for n in range(count)]
