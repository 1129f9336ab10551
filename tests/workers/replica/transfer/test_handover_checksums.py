"""Pages that are damaged on their way are computed by the replica that decodes: the tokens are those without damage."""

import asyncio
from pathlib import Path

import pytest

from crossdock.workers.schedule.request.submission import Submission
from tests.kvtransfer.damage import damage_pages
from tests.sweeps import SOAK
from tests.workers.architectures import build
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.sides import NIXL_IN_SOAK, Side, closing, local, pair, prompts, ship, start, submission
from tests.workers.worker_groups import engine_of_ranks


def some_works() -> list[Submission]:
    """Return requests of 1 to 223 tokens, greedy and sampled."""
    return [submission(prompt, temperature=0.8 * (n % 2), seed=n) for n, prompt in enumerate(prompts(12))]


def number_of(side: Side, outcome: str) -> float:
    labels = {"direction": "received", "outcome": outcome}
    return side.thread.metrics.registry.get_sample_value("crossdock_transfers_total", labels) or 0.0


async def check_damaged(prefill: Side, decode: Side, works: list[Submission], expected: list[list[int]]) -> None:
    """Ship the requests, with a bit flipped in each message of every second one that brings pages."""
    chosen = {work.id for work in works[::2]}
    damaged = damage_pages(decode.handover.dock._own, lambda message: message.request in chosen)

    async def shipped(work: Submission) -> list[int]:
        if work.id not in chosen:
            return await ship(prefill, decode, work)
        await start(prefill, decode, work)
        return await decode.rest(work.id)

    assert await asyncio.gather(*(shipped(work) for work in works)) == expected
    assert {message.request for message in damaged} == chosen
    outcomes = {name: outcome for name, is_sent, _, outcome in decode.ended if not is_sent}
    assert outcomes == {work.id: "checksum" if work.id in chosen else "arrived" for work in works}
    assert number_of(decode, "checksum") == len(chosen)
    assert await prefill.is_clean()
    again = await asyncio.gather(*(decode.generate(local(work)) for work in works))
    assert again == expected, "no page that the decode side keeps is damaged"


async def test_tokens_of_damaged_prompts_are_those_of_local_ones() -> None:
    async with pair("tcp", max_num_batched_tokens=24, checksum=True) as (prefill, decode):
        works = some_works()
        expected = await asyncio.gather(*(prefill.generate(local(work)) for work in works))
        await prefill.on_engine(prefill.engine.pages.block_pool.clear_cache)
        await check_damaged(prefill, decode, works, expected)


@pytest.mark.parametrize(
    ("division", "is_prefill_whole"), [((2, 1), True), pytest.param((2, 1), False, marks=SOAK), ((1, 2), False)]
)
async def test_damage_between_unequal_shards_is_found_by_the_rank_that_it_meets(
    ranks: Ranks, tmp_path: Path, division: tuple[int, int], is_prefill_whole: bool
) -> None:
    """The other ranks of a replica give up their part of the transfer too."""
    path = saved(build("llama", {}), tmp_path)

    with engine_of_ranks(ranks, path, *division, max_num_batched_tokens=80) as engine:
        whole, divided = Side("tcp", checksum=True), Side("tcp", engine=engine, checksum=True)
        sides = (whole, divided) if is_prefill_whole else (divided, whole)
        async with closing(*sides) as (prefill, decode):
            works = some_works()[:8]
            expected = await asyncio.gather(*(whole.generate(local(work)) for work in works))
            await whole.on_engine(whole.engine.pages.block_pool.clear_cache)
            await check_damaged(prefill, decode, works, expected)


@pytest.mark.parametrize("transport", NIXL_IN_SOAK)
async def test_checksums_agree_where_nothing_is_damaged(transport: str) -> None:
    """Many prompts at once in both directions, from cached prefixes too, while both sides decode."""
    async with pair(transport, max_num_batched_tokens=24, checksum=True) as sides:
        works = some_works()
        expected = await asyncio.gather(*(sides[0].generate(local(work)) for work in works))
        await sides[0].on_engine(sides[0].engine.pages.block_pool.clear_cache)
        found = await asyncio.gather(*(ship(sides[n % 2], sides[1 - n % 2], work) for n, work in enumerate(works)))
        assert found == expected
        assert {outcome for side in sides for _, _, _, outcome in side.ended} == {"arrived", "shipped"}


async def test_damage_after_the_first_token_has_gone_out_changes_no_token() -> None:
    """The prefill side has sent its token. The decode side computes the last pages, and gives the same token."""
    async with pair("tcp", max_num_batched_tokens=24, checksum=True) as (prefill, decode):
        work = submission(prompts()[6], temperature=0.8, seed=3)
        expected = await prefill.generate(local(work))
        await prefill.on_engine(prefill.engine.pages.block_pool.clear_cache)
        damaged = damage_pages(decode.handover.dock._own, lambda message: message.result is not None)
        await start(prefill, decode, work)
        assert (await prefill.next(work.id)).token_ids == expected[:1]
        assert await decode.rest(work.id) == expected
        assert len(damaged) == 1
