"""A prompt computed by one engine and decoded by another, over every transport: the same tokens, and no page lost."""

import asyncio
import importlib.util
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec

import msgpack
import pytest
import torch
from pydantic import ByteSize

from crossdock.kvtransfer.events import Figures
from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.config import EngineConfig, TransferConfig
from crossdock.workers.replica.engine import Engine, Step
from crossdock.workers.replica.engine_thread import Channel, EngineThread
from crossdock.workers.replica.handover import CannotPair, connect
from crossdock.workers.schedule.request import FinishReason, Leg, SamplingParams, Status, Submission, TokenDelta
from tests.workers.architectures import build
from tests.workers.gangs import ganged
from tests.workers.ranks import DIVISIONS, Ranks, saved

HAS_NIXL = importlib.util.find_spec("nixl") is not None
TRANSPORTS = [
    "tcp",
    pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason="the nixl extra is not installed")),
]
Test = ParamSpec("Test")


def story(test: Callable[Test, Coroutine[Any, Any, None]]) -> Callable[Test, None]:
    """A test that is a coroutine."""

    @wraps(test)
    def run(*args: Test.args, **kwargs: Test.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Side:
    """One replica without its process: engine, loop, docks."""

    def __init__(
        self,
        transport: str,
        model: str = "tiny",
        deadline_s: float = 5.0,
        engine: Engine | None = None,
        **config: object,
    ) -> None:
        torch.manual_seed(0)
        settings = {"max_num_batched_tokens": 80, "max_num_seqs": 8, "kv_cache_memory": ByteSize(4 << 20)} | config
        if engine is None:
            wanted = EngineConfig(**settings)  # type: ignore[arg-type]
            engine = Engine(wrap_module(build("llama", {}), kv_cache_dtype=wanted.kv_cache_dtype), wanted)
        self.engine = engine
        self.ended: list[tuple[str, bool, Figures, str]] = []
        transfer = TransferConfig(transport=transport, deadline_s=deadline_s, grace_s=0.1)  # type: ignore[arg-type]

        self.loop = EngineThread(self.engine, partial(connect, self.engine, model, "test", transfer))
        assert self.loop.handover is not None
        told = self.loop.handover.on_figures

        def on_figures(*end: Any) -> None:
            self.ended.append(end)
            told(*end)

        self.loop.handover.on_figures = on_figures
        self.channel: Channel = self.loop.channel("test")
        self.deltas: dict[str, asyncio.Queue[TokenDelta]] = {}
        self.pump = asyncio.create_task(self._pump())

    @property
    def blob(self) -> bytes:
        assert self.loop.handover is not None
        return self.loop.handover.dock.blob

    async def _pump(self) -> None:
        async for message in self.channel.messages():
            for delta in message.deltas:
                self.deltas.setdefault(delta.request_id, asyncio.Queue()).put_nowait(delta)

    async def next(self, name: str) -> TokenDelta:
        return await asyncio.wait_for(self.deltas.setdefault(name, asyncio.Queue()).get(), 20)

    async def generate(self, submission: Submission) -> list[int]:
        await self.loop.submit("test", submission)
        return await self.rest(submission.id)

    async def rest(self, name: str) -> list[int]:
        tokens: list[int] = []
        while True:
            delta = await self.next(name)
            tokens += delta.token_ids
            if delta.finish_reason is not None:
                return tokens

    async def on_engine(self, function: Callable[[], object]) -> object:
        found: list[object] = []
        await self.loop.call(lambda: found.append(function()))
        return found[0]

    async def is_clean(self) -> bool:
        """Whether nothing is owned, quarantined or under way, now or within five seconds."""
        assert self.loop.handover is not None
        for _ in range(500):
            counts = await self.on_engine(self.engine.pages.counts)
            if counts.owned == counts.quarantined == self.loop.handover.dock.counts().num_open == 0:  # type: ignore[attr-defined]
                return True
            await asyncio.sleep(0.01)
        return False


@asynccontextmanager
async def pair(transport: str, **config: object) -> AsyncIterator[tuple[Side, Side]]:
    async with closed(Side(transport, **config), Side(transport, **config)) as sides:  # type: ignore[arg-type]
        yield sides


@asynccontextmanager
async def closed(*sides: Side) -> AsyncIterator[tuple[Side, Side]]:
    """Both in order, clean in the end."""
    try:
        yield sides[0], sides[1]
        for side in sides:
            assert await side.is_clean()
    finally:
        for side in sides:
            await side.loop.close()
            await side.pump


def submission(prompt: list[int], num_tokens: int = 12, **params: object) -> Submission:
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **({"temperature": 0.0} | params))  # type: ignore[arg-type]
    return Submission(uuid.uuid4().hex, prompt, sampling)


async def ship(prefill: Side, decode: Side, work: Submission) -> list[int]:
    """The request's tokens by way of both."""
    await decode.loop.submit("test", replace(work, leg=Leg.RECEIVE, peer=prefill.blob))
    await prefill.loop.submit("test", replace(work, leg=Leg.SEND, peer=decode.blob))
    first = await prefill.next(work.id)
    if first.finish_reason is not None:
        await decode.loop.abort([work.id])
        return list(first.token_ids)
    rest = await decode.rest(work.id)
    assert (await prefill.next(work.id)).finish_reason is FinishReason.SHIPPED
    return [*first.token_ids, *rest]


def prompts(count: int = 50) -> list[list[int]]:
    return [[(13 * number + 7 * at * at) % 90 + 3 for at in range(1 + 37 * number % 240)] for number in range(count)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("budget", [24, 80, 512])
@story
async def test_the_same_tokens_by_either_way(transport: str, budget: int) -> None:
    """50 prompts, at once, greedy and sampled, at several chunk sizes, some from cached prefixes at either side."""
    async with pair(transport, max_num_batched_tokens=budget) as (prefill, decode):
        works = [submission(prompt, temperature=0.8 * (n % 2), seed=n) for n, prompt in enumerate(prompts())]
        expected = [await prefill.generate(replace(work, id=f"local {work.id}")) for work in works[:25]]
        await prefill.on_engine(prefill.engine.pages.clear_cache)
        expected += [await decode.generate(replace(work, id=f"local {work.id}")) for work in works[25:]]  # stay cached
        found = await asyncio.gather(*(ship(prefill, decode, work) for work in works))
        assert list(found) == expected


@pytest.mark.parametrize("transport", TRANSPORTS)
@story
async def test_e4m3_pages_travel_as_they_are(transport: str) -> None:
    """Each side has found its scales itself."""
    async with pair(transport, max_num_batched_tokens=24, kv_cache_dtype="fp8") as (prefill, decode):
        works = [submission(prompt) for prompt in prompts(8)]
        expected = [await decode.generate(replace(work, id=f"local {work.id}")) for work in works]
        await decode.on_engine(decode.engine.pages.clear_cache)
        assert [await ship(prefill, decode, work) for work in works] == expected
        page_bytes = prefill.engine.model.layout(16).page_bytes
        figures = [figures for _, sending, figures, _ in prefill.ended if sending]
        assert all(it.num_bytes == it.num_pages * page_bytes for it in figures)


@pytest.mark.parametrize("transport", TRANSPORTS)
@story
async def test_only_what_the_decode_side_lacks_is_sent(transport: str) -> None:
    async with pair(transport) as (prefill, decode):
        prompt = prompts()[6]  # 223 tokens: 13 pages and a part
        work = submission(prompt)
        await ship(prefill, decode, work)
        await ship(prefill, decode, replace(work, id="again"))
        sent = {name: figures.num_pages for name, sending, figures, _ in prefill.ended if sending}
        assert sent == {work.id: 14, "again": 1}


@pytest.mark.parametrize("transport", TRANSPORTS)
@story
async def test_pages_travel_while_the_next_chunk_is_computed(transport: str) -> None:
    async with pair(transport, max_num_batched_tokens=24) as (prefill, decode):
        work = submission(prompts()[6])
        await ship(prefill, decode, work)
        ((_, _, figures, how),) = [end for end in prefill.ended if end[1]]
        assert how == "shipped"
        assert figures.num_writes > 1
        assert figures.hidden_bytes > figures.num_bytes / 2


@story
async def test_who_comes_during_a_step_has_pages_before_the_next() -> None:
    """Or what the other replica has computed meanwhile waits for the end of two steps."""
    async with pair("tcp", max_num_batched_tokens=24) as (prefill, decode):
        begun: list[Status] = []
        step, expected = decode.loop._step, submission(prompts()[6])

        def watched() -> Step | None:
            request = decode.engine.scheduler.get(expected.id)
            begun.extend([request.status] if request is not None else [])
            return step()

        decode.loop._step = watched  # type: ignore[method-assign]
        own = asyncio.create_task(decode.generate(submission(prompts()[13], 100)))
        while not decode.engine.scheduler.running:
            await asyncio.sleep(0)
        await ship(prefill, decode, expected)
        await own
        assert begun
        assert Status.WAITING not in begun


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("when", ["at once", "after a chunk", "after the first token"])
@story
async def test_a_client_that_leaves_frees_both_sides(transport: str, when: str) -> None:
    async with pair(transport, max_num_batched_tokens=24) as (prefill, decode):
        for number in range(5):
            work = replace(submission(prompts()[6], 200), id=f"{number}")
            await decode.loop.submit("test", replace(work, leg=Leg.RECEIVE, peer=prefill.blob))
            await prefill.loop.submit("test", replace(work, leg=Leg.SEND, peer=decode.blob))
            if when == "after a chunk":
                while not await prefill.on_engine(lambda name=work.id: _computed(prefill, name)):
                    await asyncio.sleep(0)
            elif when == "after the first token":
                await prefill.next(work.id)
            await prefill.loop.abort([work.id])
            await decode.loop.abort([work.id])
            assert await prefill.is_clean()
            assert await decode.is_clean()


@pytest.mark.parametrize("transport", TRANSPORTS)
@story
async def test_what_arrives_behind_its_client_s_leave_is_free(transport: str) -> None:
    """The last pages are here and nobody writes any more, but the engine, busy until now, hears of the abort first."""
    async with pair(transport, max_num_batched_tokens=24) as (prefill, decode):
        work = submission(prompts()[6], 200)
        await decode.loop.submit("test", replace(work, leg=Leg.RECEIVE, peer=prefill.blob))
        await prefill.loop.submit("test", replace(work, leg=Leg.SEND, peer=decode.blob))
        while not await decode.on_engine(partial(_committed, decode, work.id)):  # type: ignore[call-overload]
            await asyncio.sleep(0)
        go_on = threading.Event()
        busy = asyncio.create_task(decode.on_engine(go_on.wait))
        leaving = asyncio.create_task(decode.loop.abort([work.id]))
        assert decode.loop.handover is not None
        while decode.loop.handover.dock.counts().num_open:
            await asyncio.sleep(0.001)
        go_on.set()
        await asyncio.gather(busy, leaving)
        assert await decode.is_clean()
        await prefill.loop.abort([work.id])


def _computed(side: Side, name: str) -> int:
    request = side.engine.scheduler.get(name)
    return request.num_computed_tokens if request is not None else 1


@pytest.mark.parametrize("transport", TRANSPORTS)
@story
async def test_a_decode_side_whose_partner_stops_finishes_alone(transport: str) -> None:
    """What had arrived is not computed again."""
    async with pair(transport, max_num_batched_tokens=24, deadline_s=1.0) as (prefill, decode):
        prompt = prompts()[6]
        expected = await decode.generate(submission(prompt))
        await decode.on_engine(decode.engine.pages.clear_cache)
        work = submission(prompt)
        await decode.loop.submit("test", replace(work, leg=Leg.RECEIVE, peer=prefill.blob))
        await prefill.loop.submit("test", replace(work, leg=Leg.SEND, peer=decode.blob))
        committed = 0
        while not committed:
            committed = int(await decode.on_engine(partial(_committed, decode, work.id)))  # type: ignore[call-overload]
            await asyncio.sleep(0)
        await prefill.loop.abort([work.id])
        before = _prompt_tokens(decode)
        assert await decode.rest(work.id) == expected
        assert _prompt_tokens(decode) - before <= len(prompt) - committed


def _committed(side: Side, name: str) -> int:
    request = side.engine.scheduler.get(name)
    return request.num_computed_tokens if request is not None else 0


def _prompt_tokens(side: Side) -> int:
    return int(side.loop.metrics.registry.get_sample_value("crossdock_prompt_tokens_total") or 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
@story
async def test_a_grant_waits_for_pages_and_prefill_is_not_blind(transport: str) -> None:
    """The decode side is full; the prompt is computed meanwhile and its pages follow when there is room."""
    async with pair(transport, deadline_s=0.6, kv_cache_memory=ByteSize(1 << 20)) as (prefill, decode):
        blockers = [submission([number + 5] * 200, num_tokens=50) for number in range(6)]
        work = submission(prompts()[6])
        expected = await prefill.generate(replace(work, id="local"))
        running = [asyncio.create_task(decode.generate(blocker)) for blocker in blockers]
        await decode.next(blockers[5].id)
        assert decode.engine.pages.num_available < 14
        assert await ship(prefill, decode, work) == expected
        for task in running:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await decode.loop.abort([blocker.id for blocker in blockers])


@story
async def test_pools_that_do_not_fit_are_refused_with_both_printed() -> None:
    one, other = Side("tcp", model="tiny"), Side("tcp", model="another")
    try:
        work = replace(submission([1, 2, 3]), leg=Leg.SEND, peer=other.blob)
        with pytest.raises(CannotPair, match=r"model +tiny +another") as refused:
            await one.loop.submit("test", work)
        assert "page_size" in str(refused.value)
        assert await one.is_clean()
        assert await one.generate(submission([1, 2, 3], 3))
    finally:
        for side in (one, other):
            await side.loop.close()
            await side.pump


@story
async def test_e4m3_pages_and_others_are_not_exchanged() -> None:
    async with closed(Side("tcp", kv_cache_dtype="fp8"), Side("tcp")) as (one, other):
        with pytest.raises(
            CannotPair, match=r"dtype +float8_e4m3fn, scales [0-9a-f]{8} \(1 bytes\) +float32 \(4 bytes\)"
        ):
            await one.loop.submit("test", replace(submission([1, 2, 3]), leg=Leg.SEND, peer=other.blob))


@story
async def test_late_words_of_a_lost_placement_end_nothing_of_the_next() -> None:
    """The first decode side is lost on the way; the same prefill side ships to a second one at once, from what it has
    computed, while the end of the first transfer is still being told."""
    prefill, lost, second = (Side("tcp", max_num_batched_tokens=24) for _ in range(3))
    try:
        work = submission(prompts()[6])
        expected = await second.generate(replace(work, id="local"))
        await second.on_engine(second.engine.pages.clear_cache)
        await lost.loop.submit("test", replace(work, leg=Leg.RECEIVE, peer=prefill.blob))
        await prefill.loop.submit("test", replace(work, leg=Leg.SEND, peer=lost.blob))
        while not await prefill.on_engine(lambda: _computed(prefill, work.id)):
            await asyncio.sleep(0)
        aborting = asyncio.create_task(prefill.loop.abort([work.id]))
        again = replace(work, epoch=1)
        shipping = asyncio.create_task(ship(prefill, second, again))
        await aborting
        assert await shipping == expected
        ((_, _, _, how),) = [end for end in second.ended if end[0] == work.id]
        assert how == "arrived", "decode did not have to finish alone"
        await lost.loop.abort([work.id])
        for side in (prefill, lost, second):
            assert await side.is_clean()
    finally:
        for side in (prefill, lost, second):
            await side.loop.close()
            await side.pump


@pytest.mark.parametrize(
    "state", [b"", b"\xc1", msgpack.packb("x"), msgpack.packb(True), msgpack.packb(-1), msgpack.packb(1 << 30)]
)
def test_a_peer_that_sends_no_token_ends_its_request_alone(state: bytes) -> None:
    """What a peer says is checked: the engine's thread goes on, and the pages are given back."""

    async def run() -> None:
        async with pair("tcp") as (prefill, decode):
            sender = prefill.loop.handover
            assert sender is not None
            finish = sender.dock.finish
            sender.dock.finish = lambda *args: finish(*args[:-1], state)  # type: ignore[method-assign]
            work = submission(prompts()[5])
            await decode.loop.submit("test", replace(work, leg=Leg.RECEIVE, peer=prefill.blob))
            await prefill.loop.submit("test", replace(work, leg=Leg.SEND, peer=decode.blob))
            last = await decode.next(work.id)
            assert (last.finish_reason, last.token_ids) == (FinishReason.ERROR, [])
            sender.dock.finish = finish  # type: ignore[method-assign]
            again = submission(prompts()[6])
            assert len(await ship(prefill, decode, again)) == 12

    asyncio.run(run())


# -- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("is_prefill_whole", [True, False])
@pytest.mark.parametrize("division", DIVISIONS)
@story
async def test_between_unequal_shards(
    ranks: Ranks, tmp_path: Path, transport: str, division: tuple[int, int], is_prefill_whole: bool
) -> None:
    """One rank to several, several to one: the same tokens, chunk by chunk, from cached prefixes at either side."""
    path = saved(build("llama", {}), tmp_path)
    with ganged(ranks, path, *division, max_num_batched_tokens=80) as engine:
        whole, divided = Side(transport), Side(transport, engine=engine)
        sides = (whole, divided) if is_prefill_whole else (divided, whole)
        async with closed(*sides) as (prefill, decode):
            works = [submission(prompt, temperature=0.8 * (n % 2), seed=n) for n, prompt in enumerate(prompts(20))]
            expected = [await whole.generate(replace(work, id=f"local {work.id}")) for work in works[:10]]
            await whole.on_engine(whole.engine.pages.clear_cache)
            expected += [await whole.generate(replace(work, id=f"local {work.id}")) for work in works[10:]]
            found = await asyncio.gather(*(ship(prefill, decode, work) for work in works))
            assert list(found) == expected
            sent = {how for _, sending, _, how in prefill.ended if sending}
            assert sent == {"shipped"}


@pytest.mark.parametrize("when", ["it is cancelled", "its partner stops"])
@story
async def test_a_transfer_to_several_ranks_that_ends_on_the_way(ranks: Ranks, tmp_path: Path, when: str) -> None:
    """What has arrived is what every rank has; no page is free before all ranks' writers have stopped."""
    path = saved(build("llama", {}), tmp_path)
    with ganged(ranks, path, 2, 2, max_num_batched_tokens=24) as engine:
        async with closed(Side("tcp", max_num_batched_tokens=24), Side("tcp", engine=engine)) as (prefill, decode):
            prompt = prompts()[6]
            expected = await prefill.generate(submission(prompt))
            await prefill.on_engine(prefill.engine.pages.clear_cache)
            work = submission(prompt)
            await decode.loop.submit("test", replace(work, leg=Leg.RECEIVE, peer=prefill.blob))
            await prefill.loop.submit("test", replace(work, leg=Leg.SEND, peer=decode.blob))
            committed = 0
            while not committed:
                committed = int(await decode.on_engine(partial(_committed, decode, work.id)))  # type: ignore[call-overload]
                await asyncio.sleep(0)
            if when == "it is cancelled":
                await decode.loop.abort([work.id])
                await prefill.loop.abort([work.id])
            else:
                before = _prompt_tokens(decode)
                await prefill.loop.abort([work.id])
                assert await decode.rest(work.id) == expected
                assert _prompt_tokens(decode) - before <= len(prompt) - committed
