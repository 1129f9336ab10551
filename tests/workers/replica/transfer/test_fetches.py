"""A prefix fetched from another engine: the same tokens as without, whatever happens to either side meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from crossdock.kvtransfer.calls import DockCall, FinishCall
from crossdock.workers.replica.transfer.replica_dock import ReplicaDock
from crossdock.workers.schedule.request.submission import Submission
from tests.waiting import until
from tests.workers.replica.sides import NEEDS_NIXL, Side, closing, local, pair, prompts, submission
from tests.workers.replica.transfer.test_handover_groups import side
from tests.workers.replica.transfer.test_handover_groups import submission as group_submission

LONG = prompts()[6]  # 223 tokens: 13 full pages of 16


def fetching(work: Submission, source: Side) -> Submission:
    """Return the request with a source that is believed to have all of its prompt."""
    return replace(work, source=source.blob, source_tokens=len(work.prompt_token_ids))


def outcomes(target: Side) -> list[tuple[str, int]]:
    """Return the outcome and the pages of each fetch that has ended at the target."""
    return [(outcome, figures.num_pages) for _, is_sent, figures, outcome in target.fetched if not is_sent]


@contextmanager
def sending_nothing() -> Iterator[threading.Event]:
    """Let sources offer prefixes, and never send one. The event is set at the first that was to be sent."""
    call, tried = ReplicaDock.call, threading.Event()

    def without_finish(self: ReplicaDock, made: DockCall) -> None:
        if isinstance(made, FinishCall):
            tried.set()
        else:
            call(self, made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaDock, "call", without_finish)
        yield tried


@pytest.mark.parametrize("transport", ["tcp", pytest.param("nixl", marks=NEEDS_NIXL)])
async def test_fetched_prefix_gives_the_tokens_of_a_computed_one(transport: str) -> None:
    async with pair(transport) as (source, target):
        work = submission(LONG)
        expected = await source.generate(local(work))
        assert await target.generate(fetching(work, source)) == expected
        assert target.num_prompt_tokens == len(LONG) - 13 * 16, "the rest alone is computed"
        assert outcomes(target) == [("arrived", 13)]
        assert source.num_prompt_tokens == len(LONG), "the source computes nothing"


@pytest.mark.parametrize("family", ["gemma3_text", "llama4_text", "mistral", "gemma3_text 3:1", "lfm3 conv"])
async def test_prefix_of_every_kind_of_layers_gives_the_tokens_of_a_computed_one(family: str) -> None:
    source, target = side(family), side(family)
    async with closing(source, target):
        work = group_submission(LONG[:90])
        expected = await source.generate(local(work))
        assert await target.generate(fetching(work, source)) == expected
        assert [outcome for outcome, _ in outcomes(target)] == ["arrived"]
        assert target.num_prompt_tokens < 90


async def test_pages_that_the_target_has_are_not_sent() -> None:
    async with pair("tcp") as (source, target):
        work = submission(LONG)
        await target.generate(submission(LONG[:70]))
        expected = await source.generate(local(work))
        assert await target.generate(fetching(work, source)) == expected
        assert outcomes(target) == [("arrived", 13 - 4)]
        assert target.engine.scheduler.awaited.num_tokens == {"replica": (13 - 4) * 16}


@pytest.mark.parametrize("has", [0, 50])
async def test_source_that_has_evicted_pages_sends_the_others(has: int) -> None:
    """The router's index is older than the source's cache."""
    async with pair("tcp") as (source, target):
        work = submission(LONG)
        expected = await source.generate(local(work))
        await source.on_engine(source.engine.pages.block_pool.clear_cache)
        if has:
            await source.generate(submission(LONG[:has]))
        assert await target.generate(fetching(work, source)) == expected
        assert outcomes(target) == [("arrived", has // 16) if has else ("peer_stopped", 0)]


async def test_target_with_more_than_the_source_starts_at_once() -> None:
    async with pair("tcp") as (source, target):
        work = submission(LONG)
        await source.generate(submission(LONG[:50]))
        expected = await target.generate(local(work))
        assert await target.generate(fetching(work, source)) == expected
        assert outcomes(target) == [("declined", 0)]


async def test_prefix_of_another_salt_is_not_sent() -> None:
    async with pair("tcp") as (source, target):
        work = submission(LONG)
        expected = await source.generate(replace(local(work), cache_salt="another owner"))
        assert await target.generate(fetching(replace(work, cache_salt="one owner"), source)) == expected
        assert outcomes(target) == [("peer_stopped", 0)]


async def test_source_that_sends_nothing_delays_a_request_only() -> None:
    """Without a cost of steps the request waits for `deadline_s`."""
    async with pair("tcp", deadline_s=0.3) as (source, target):
        work = submission(LONG)
        expected = await source.generate(local(work))
        with sending_nothing() as tried:
            assert await target.generate(fetching(work, source)) == expected
            assert tried.is_set()
        assert outcomes(target) in ([("late", 0)], [("deadline", 0)])


async def test_source_that_dies_in_mid_fetch_costs_no_token() -> None:
    source, target = Side("tcp", deadline_s=30.0), Side("tcp", deadline_s=30.0)
    try:
        work = submission(LONG)
        expected = await source.generate(local(work))
        with sending_nothing() as tried:
            await target.thread.submit("test", fetching(work, source))
            await until(tried.is_set)
            await source.close()
            await target.thread.peer_dead(source.blob)
        assert await target.rest(work.id) == expected
        assert outcomes(target) == [("peer_lost", 0)]
        assert await target.is_clean()
    finally:
        await target.close()


async def test_target_that_dies_in_mid_fetch_frees_the_pages_of_the_source() -> None:
    source, target = Side("tcp", deadline_s=30.0), Side("tcp", deadline_s=30.0)
    try:
        work = submission(LONG)
        await source.generate(local(work))
        with sending_nothing() as tried:
            await target.thread.submit("test", fetching(work, source))
            await until(tried.is_set)
            await target.close()
            await source.thread.peer_dead(target.blob)
        assert await source.is_clean()
    finally:
        await source.close()


async def test_abort_in_mid_fetch_frees_both_sides() -> None:
    async with pair("tcp", deadline_s=30.0) as (source, target):
        work = submission(LONG)
        await source.generate(local(work))
        with sending_nothing() as tried:
            await target.thread.submit("test", fetching(work, source))
            await until(tried.is_set)
            await target.thread.abort([(work.id, work.epoch)])
        assert await target.is_clean()


async def test_source_of_another_model_is_not_asked() -> None:
    async with closing(Side("tcp", model="other"), Side("tcp")) as (source, target):
        work = submission(LONG)
        expected = await target.generate(local(work))
        await target.on_engine(target.engine.pages.block_pool.clear_cache)
        assert await target.generate(fetching(work, source)) == expected
        assert not outcomes(target)
