"""Sums over chunks at full size and exactly: tokens, query-key pairs, bytes of pages. No model."""

from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.scheduler import Scheduler
from tests.workers.schedule.model_free_replica import ModelFreeReplica, chunk_sizes

PAGE_SIZE = 16


def new_replica(max_num_batched_tokens: int, max_num_seqs: int = 8, pages: PagePool | None = None) -> ModelFreeReplica:
    """Without a StepCost chunks are fixed: as many tokens as the budget leaves."""
    pages = pages or PagePool(8192, PAGE_SIZE)
    config = SchedulerConfig.model_validate(
        {
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "page_size": pages.page_size,
        }
    )
    return ModelFreeReplica(Scheduler(config, pages, pages.num_pages * pages.page_size), sample=lambda token_ids: 1)


def test_256_decodes_in_a_budget_of_4096_leave_chunks_of_3840() -> None:
    """The worked example: a 20,000-token prompt takes five chunks of 3,840 and one of 800."""
    replica = new_replica(4096, max_num_seqs=300)
    for number in range(256):
        replica.add(f"stream {number}", range(number, number + 3), max_tokens=1000)
    replica.step()
    replica.add("long", range(20_000))
    batches = [replica.step().batch for _ in range(6)]
    assert chunk_sizes(batches, "long") == [3840] * 5 + [800]
    assert [batch.num_tokens for batch in batches] == [4096] * 5 + [256 + 800]
    assert all(batch.num_decodes == 256 for batch in batches)


@settings(deadline=None, max_examples=25)
@given(pages_per_chunk=st.integers(2, 700))
def test_45000_cached_tokens_of_50000_take_no_steps(pages_per_chunk: int) -> None:
    """ceil(5,000 / chunk) steps are left.

    Pages have 8 tokens, so that 45,000 ends one. Otherwise the last page is not shared and is computed again.
    """
    chunk, pages = 8 * pages_per_chunk, PagePool(12_000, page_size=8)
    earlier = new_replica(50_000, pages=pages)
    earlier.add("earlier", range(45_000))
    earlier.run()

    replica = new_replica(chunk, pages=pages)
    long = replica.add("long", range(50_000))
    batches = replica.run()
    assert long.num_cached_tokens == 45_000
    assert sum(chunk_sizes(batches, "long")) == 5_000
    assert len(batches) == -(-5_000 // chunk)


def test_scheduled_chunks_attend_to_the_pairs_of_the_whole_prompt() -> None:
    for budget in (64, 1000, 4096, 32_768):
        replica = new_replica(budget)
        replica.add("long", range(20_000))
        works = [batch.work for batch in replica.run()]
        assert sum(work.prefill_tokens for work in works) == 20_000
        assert sum(work.attended for work in works) == 20_000**2 / 2
