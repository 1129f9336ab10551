"""A prompt computed by a replica of several ranks and decoded by one of one, or the other way round."""

import asyncio
from pathlib import Path

import pytest

from tests.workers.architectures import build
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.sides import Side, closing, local, prompts, ship, start_and_hold, submission
from tests.workers.worker_groups import engine_of_ranks


@pytest.mark.parametrize(("division", "is_prefill_whole"), [((2, 1), True), ((1, 2), False), ((2, 2), True)])
async def test_requests_shipped_between_unequal_shards_have_the_tokens_of_local_ones(
    ranks: Ranks, tmp_path: Path, division: tuple[int, int], is_prefill_whole: bool
) -> None:
    """Chunk by chunk, and from cached prefixes at either side."""
    path = saved(build("llama", {}), tmp_path)

    with engine_of_ranks(ranks, path, *division, max_num_batched_tokens=80) as engine:
        whole, divided = Side("tcp"), Side("tcp", engine=engine)
        sides = (whole, divided) if is_prefill_whole else (divided, whole)
        async with closing(*sides) as (prefill, decode):
            works = [submission(prompt, temperature=0.8 * (n % 2), seed=n) for n, prompt in enumerate(prompts(8))]
            expected = await asyncio.gather(*(whole.generate(local(work)) for work in works[:4]))
            await whole.on_engine(whole.engine.pages.block_pool.clear_cache)
            expected += await asyncio.gather(*(whole.generate(local(work)) for work in works[4:]))
            found = await asyncio.gather(*(ship(prefill, decode, work) for work in works))
            assert found == expected
            assert {outcome for _, is_sent, _, outcome in prefill.ended if is_sent} == {"shipped"}


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "partner stops"])
async def test_transfer_to_ranks_that_ends_early_frees_all(ranks: Ranks, tmp_path: Path, is_cancelled: bool) -> None:
    """A token has arrived when every rank has it; no page is free before all ranks' writers have stopped."""
    path = saved(build("llama", {}), tmp_path)

    with engine_of_ranks(ranks, path, 2, 2, max_num_batched_tokens=24) as engine:
        async with closing(Side("tcp", max_num_batched_tokens=24), Side("tcp", engine=engine)) as (prefill, decode):
            prompt = prompts()[6]
            expected = await prefill.generate(submission(prompt))
            await prefill.on_engine(prefill.engine.pages.block_pool.clear_cache)
            work = submission(prompt)
            gate = await start_and_hold(prefill, decode, work)
            while not (committed := await decode.computed(work.id)):
                await asyncio.sleep(0)
            if is_cancelled:
                await decode.thread.abort([(work.id, work.epoch)])
            before = decode.num_prompt_tokens
            await prefill.thread.abort([(work.id, work.epoch)])
            gate.set()
            if not is_cancelled:
                assert await decode.rest(work.id) == expected
                assert decode.num_prompt_tokens - before <= len(prompt) - committed
