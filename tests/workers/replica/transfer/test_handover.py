"""A prompt computed by one engine and decoded by another, over every transport: the same tokens, and no page lost."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from msgspec import msgpack

from crossdock.kvtransfer.calls import DockCall, FinishCall
from crossdock.kvtransfer.transport import TransportEvent
from crossdock.workers.replica.engine.engine import Engine, Step
from crossdock.workers.schedule.request.request import FinishReason, Status
from crossdock.workers.schedule.request.submission import Leg
from tests.workers.replica.driven import posted
from tests.workers.replica.sides import (
    NEEDS_NIXL,
    NIXL_IN_SOAK,
    Side,
    closing,
    local,
    pair,
    prompts,
    ship,
    start,
    start_and_hold,
    submission,
)

LONG = prompts()[6]  # 223 tokens: 13 pages and a part of one


@pytest.mark.parametrize(("transport", "budget"), [("tcp", 24), pytest.param("nixl", 80, marks=NEEDS_NIXL)])
async def test_shipped_requests_have_the_tokens_of_local_ones(transport: str, budget: int) -> None:
    """20 prompts, at once, greedy and sampled, at several chunk sizes, some from cached prefixes at either side."""
    async with pair(transport, max_num_batched_tokens=budget) as (prefill, decode):
        works = [submission(prompt, temperature=0.8 * (n % 2), seed=n) for n, prompt in enumerate(prompts(20))]
        expected = await asyncio.gather(*(prefill.generate(local(work)) for work in works[:10]))
        await prefill.on_engine(prefill.engine.pages.block_pool.clear_cache)
        expected += await asyncio.gather(*(decode.generate(local(work)) for work in works[10:]))  # stay cached
        found = await asyncio.gather(*(ship(prefill, decode, work) for work in works))
        assert found == expected


async def test_shipped_e4m3_pages_give_the_tokens_of_local_ones() -> None:
    """Each side has found its scales itself; the pages travel as they are."""
    async with pair("tcp", max_num_batched_tokens=24, kv_cache_dtype="fp8") as (prefill, decode):
        works = [submission(prompt) for prompt in prompts(8)]
        expected = await asyncio.gather(*(decode.generate(local(work)) for work in works))
        await decode.on_engine(decode.engine.pages.block_pool.clear_cache)
        assert await asyncio.gather(*(ship(prefill, decode, work) for work in works)) == expected
        page_bytes = prefill.engine.model.layout(16).page_bytes
        sent = [figures for _, is_sent, figures, _ in prefill.ended if is_sent]
        assert all(figures.num_bytes == figures.num_pages * page_bytes for figures in sent)


async def test_decode_side_reports_its_grant_before_any_token_and_once_it_has_a_place() -> None:
    """The ingress shows no token of the prefill side before that: see `RequestLife`."""
    async with closing(Side("tcp"), Side("tcp", max_num_seqs=1)) as (prefill, decode):
        stream, work = submission(prompts()[3], 200), submission(LONG)
        await decode.thread.submit("test", stream)
        await decode.next(stream.id)
        await start(prefill, decode, work)
        assert len((await prefill.next(work.id)).token_ids) == 1
        assert decode.deltas.get(work.id) is None
        await decode.thread.abort([(stream.id, stream.epoch)])
        grant = await decode.next(work.id)
        assert (grant.token_ids, grant.finish_reason, grant.epoch) == ([], None, work.epoch)
        assert len(await decode.rest(work.id)) == 11


async def test_pages_that_the_decode_side_has_are_not_sent() -> None:
    async with pair("tcp") as (prefill, decode):
        work = submission(LONG)
        await ship(prefill, decode, work)
        await ship(prefill, decode, replace(work, id="again"))
        sent = {name: figures.num_pages for name, is_sent, figures, _ in prefill.ended if is_sent}
        assert sent == {work.id: 14, "again": 1}


async def test_shipped_pages_are_found_under_their_own_salt_alone() -> None:
    """On neither side does a request find the pages of another owner's equal prompt."""
    async with pair("tcp") as (prefill, decode):
        computed = [0]
        for name, salt in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b")):
            await ship(prefill, decode, replace(submission(LONG), id=name, cache_salt=salt))
            computed.append(prefill.num_prompt_tokens)
        sent = {name: figures.num_pages for name, is_sent, figures, _ in prefill.ended if is_sent}
        assert sent == {"a1": 14, "b1": 14, "a2": 1, "b2": 1}, "the decode side has those of its owner"
        last = len(LONG) % 16
        each = [after - before for before, after in pairwise(computed)]
        assert each == [len(LONG), len(LONG), last, last], "the prefill side has computed those of its owner"
        decoded = decode.num_prompt_tokens
        await decode.generate(replace(submission(LONG), id="c", cache_salt="c"))
        assert decode.num_prompt_tokens - decoded == len(LONG)
        await decode.generate(replace(submission(LONG), id="a3", cache_salt="a"))
        assert decode.num_prompt_tokens - decoded == len(LONG) + last


async def test_replica_whose_dock_has_failed_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes local requests still, but the router goes on to place pairs on it: Serve must replace it."""

    def broken(seconds: float) -> list[TransportEvent]:
        raise KeyError("beyond repair")

    side = Side("tcp")
    assert side.thread.is_alive
    monkeypatch.setattr(side.handover.dock._own._transport, "poll", broken)
    side.handover.dock._own._transport.wake()
    while side.thread.is_alive:
        await asyncio.sleep(0.01)
    assert side.thread._thread.is_alive(), "nothing has called the dock meanwhile"
    await side.close()


async def test_pages_travel_while_the_next_chunk_is_computed() -> None:
    async with pair("tcp", max_num_batched_tokens=24) as (prefill, decode):
        await ship(prefill, decode, submission(prompts()[3]))  # the two docks meet
        await ship(prefill, decode, submission(LONG))
        *_, (_, _, figures, outcome) = [end for end in prefill.ended if end[1]]
        assert outcome == "shipped"
        assert figures.num_writes > 1
        assert figures.hidden_bytes > 0  # how many depends on the machine


async def test_request_that_is_offered_during_a_step_has_pages_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the pages that the other replica has computed meanwhile would wait for the end of two steps."""
    async with pair("tcp", max_num_batched_tokens=24) as (prefill, decode):
        begun: list[tuple[Status, bool]] = []
        step, work = Engine.step, submission(LONG)

        def watched(engine: Engine, *given: Any) -> Step:
            request = engine.scheduler.table.get(work.id) if engine is decode.engine else None
            begun.extend([(request.status, request.is_offered)] if request is not None else [])
            return step(engine, *given)

        monkeypatch.setattr(Engine, "step", watched)
        own = asyncio.create_task(decode.generate(submission(prompts()[13], 100)))
        while not decode.engine.scheduler.table.running:
            await asyncio.sleep(0)
        await ship(prefill, decode, work)
        await own
        assert begun
        assert (Status.WAITING, True) not in begun


@pytest.mark.parametrize("transport", NIXL_IN_SOAK)
@pytest.mark.parametrize("when", ["at once", "after a chunk", "after the first token"])
async def test_abort_of_both_legs_frees_both_sides(transport: str, when: str) -> None:
    async with pair(transport, max_num_batched_tokens=24) as (prefill, decode):
        for number in range(5):
            work = replace(submission(LONG, 200), id=f"{number}")
            if when == "after a chunk":
                gate = await start_and_hold(prefill, decode, work)
                await prefill.thread.abort([(work.id, work.epoch)])
                gate.set()
            else:
                await start(prefill, decode, work)
            if when == "after the first token":
                await prefill.next(work.id)
            await prefill.thread.abort([(work.id, work.epoch)])
            await decode.thread.abort([(work.id, work.epoch)])
            assert await prefill.is_clean()
            assert await decode.is_clean()


@pytest.mark.parametrize("transport", NIXL_IN_SOAK)
async def test_decode_side_whose_partner_stops_finishes_alone(transport: str) -> None:
    """Tokens that had arrived are not computed again."""
    async with pair(transport, max_num_batched_tokens=24, deadline_s=1.0) as (prefill, decode):
        expected = await decode.generate(submission(LONG))
        await decode.on_engine(decode.engine.pages.block_pool.clear_cache)
        work = submission(LONG)
        gate = await start_and_hold(prefill, decode, work)
        while not (committed := await decode.computed(work.id)):
            await asyncio.sleep(0)
        await prefill.thread.abort([(work.id, work.epoch)])
        gate.set()
        before = decode.num_prompt_tokens
        assert await decode.rest(work.id) == expected
        assert decode.num_prompt_tokens - before <= len(LONG) - committed


async def test_pools_of_different_models_are_refused_with_both_printed() -> None:
    async with closing(Side("tcp", model="tiny"), Side("tcp", model="another")) as (one, other):
        work = replace(submission([1, 2, 3]), leg=Leg.SEND, peer=other.blob)
        with pytest.raises(RuntimeError, match=r"model +tiny +another") as refused:
            await one.thread.submit("test", work)
        assert "page_size" in str(refused.value)
        assert await one.is_clean()
        assert await one.generate(submission([1, 2, 3], 3))


async def test_peer_that_is_no_replica_is_refused() -> None:
    async with pair("tcp") as (one, _):
        for peer in (b"", b"\xc1", msgpack.encode("x"), msgpack.encode(["x"]), msgpack.encode({})):
            with pytest.raises(RuntimeError, match="not a replica's docks"):
                await one.thread.submit("test", replace(submission([1, 2, 3]), leg=Leg.SEND, peer=peer))
            assert await one.is_clean()


async def test_late_events_of_a_lost_placement_do_not_end_the_next() -> None:
    """The first decode side is lost during the transfer. The prefill side ships at once to a second one, from the pages
    it has computed, while the end of the first transfer is still being reported."""
    prefill, lost, second = (Side("tcp", max_num_batched_tokens=24) for _ in range(3))
    async with closing(prefill, lost, second):
        work = submission(LONG)
        expected = await second.generate(local(work))
        await second.on_engine(second.engine.pages.block_pool.clear_cache)
        gate = await start_and_hold(prefill, lost, work)
        aborting = asyncio.create_task(prefill.thread.abort([(work.id, work.epoch)]))
        shipping = asyncio.create_task(ship(prefill, second, replace(work, epoch=1)))
        await posted(prefill.thread, 2)
        gate.set()
        await aborting
        assert await shipping == expected
        ((_, _, _, outcome),) = [end for end in second.ended if end[0] == work.id]
        assert outcome == "arrived", "the second side did not have to finish alone"
        await lost.thread.abort([(work.id, work.epoch)])


async def test_peer_that_sends_no_token_ends_its_request_alone() -> None:
    """Another process's bytes are checked: the engine's thread goes on, and the pages are given back."""
    async with pair("tcp") as (prefill, decode):
        dock = prefill.handover.dock
        call = dock.call
        for result in (b"", b"\xc1", *map(msgpack.encode, ("x", True, -1, 1 << 30))):

            def lie(made: DockCall, result: bytes = result) -> None:
                call(msgspec.structs.replace(made, result=result) if isinstance(made, FinishCall) else made)

            dock.call = lie  # type: ignore[method-assign]
            work = submission(prompts()[5])
            await start(prefill, decode, work)
            assert not (await decode.next(work.id)).token_ids, "it has granted pages"
            last = await decode.next(work.id)
            assert (last.finish_reason, last.token_ids) == (FinishReason.ERROR, []), result
        dock.call = call  # type: ignore[method-assign]
        assert len(await ship(prefill, decode, submission(LONG))) == 12
