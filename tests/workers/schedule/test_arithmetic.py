"""What chunks add up to, at full size and exactly: the scheduler alone, no model."""

from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.kvtransfer.layout import LayerShape, PoolLayout
from crossdock.workers.schedule.batch import Batch, SampledToken
from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.cost import StepWork
from crossdock.workers.schedule.pages import PagePool
from crossdock.workers.schedule.request import Request, SamplingParams
from crossdock.workers.schedule.scheduler import Scheduler

PAGE_SIZE = 16
SMOLLM2 = PoolLayout([LayerShape(num_kv_heads=3, key_dim=64, value_dim=64)] * 30, PAGE_SIZE, itemsize=2)


def scheduler(max_num_batched_tokens: int, max_num_seqs: int = 8, pages: PagePool | None = None) -> Scheduler:
    """Without a StepCost chunks are fixed: as many tokens as the budget leaves."""
    pages = pages or PagePool(8192, PAGE_SIZE)
    config = SchedulerConfig.model_validate(
        {
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "page_size": pages.page_size,
        }
    )
    return Scheduler(config, pages, pages.num_pages * pages.page_size)


def add(scheduler: Scheduler, name: str, prompt: range, max_tokens: int = 1) -> Request:
    request = Request(name, list(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> Batch:
    batch = scheduler.schedule(0.0)
    scheduler.update(batch, {part.request.id: SampledToken(1) for part in batch.scheduled if part.samples}, 0.0)
    return batch


def run(scheduler: Scheduler) -> list[Batch]:
    batches = []
    while scheduler.has_work:
        batches.append(step(scheduler))
    return batches


def chunks(batches: list[Batch], name: str) -> list[int]:
    return [part.num_tokens for batch in batches for part in batch.scheduled if part.request.id == name]


def test_256_decodes_leave_chunks_of_3840_in_a_budget_of_4096() -> None:
    """The worked example: a 20,000-token prompt takes five chunks of 3,840 and one of 800."""
    it = scheduler(4096, max_num_seqs=300)
    for number in range(256):
        add(it, f"stream {number}", range(number, number + 3), max_tokens=1000)
    step(it)
    add(it, "long", range(20_000))
    batches = [step(it) for _ in range(6)]
    assert chunks(batches, "long") == [3840] * 5 + [800]
    assert [batch.num_tokens for batch in batches] == [4096] * 5 + [256 + 800]
    assert all(batch.num_decodes == 256 for batch in batches)


@settings(deadline=None, max_examples=25)
@given(pages_per_chunk=st.integers(2, 700))
def test_45000_cached_tokens_of_50000_cost_no_iterations(pages_per_chunk: int) -> None:
    """ceil(5,000 / chunk) iterations are left. With pages of 8 tokens, so that 45,000 ends one; where it does not, the
    last page is not shared and its tokens are computed again."""
    chunk, pages = 8 * pages_per_chunk, PagePool(12_000, page_size=8)
    earlier = scheduler(50_000, pages=pages)
    add(earlier, "earlier", range(45_000))
    run(earlier)

    it = scheduler(chunk, pages=pages)
    long = add(it, "long", range(50_000))
    batches = run(it)
    assert long.num_cached_tokens == 45_000
    assert sum(chunks(batches, "long")) == 5_000
    assert len(batches) == -(-5_000 // chunk)


def test_cancelled_after_seven_chunks_every_byte_comes_back() -> None:
    it = scheduler(512)
    before = it.pages.counts()
    add(it, "long", range(20_000))
    for _ in range(7):
        step(it)
    cancelled = it.get("long")
    assert cancelled is not None
    assert cancelled.num_computed_tokens == 7 * 512
    held = len(it.pages.pages_of("long"))
    assert held * SMOLLM2.page_bytes == 1250 * 368_640 == 460_800_000  # of the whole prompt: reserved at the start
    assert cancelled.num_computed_tokens * SMOLLM2.token_bytes == 82_575_360  # of these, written

    it.abort("long")
    after = it.pages.counts()
    assert not it.pages.pages_of("long")
    assert (after.free + after.cached) * SMOLLM2.page_bytes == before.free * SMOLLM2.page_bytes
    assert after.owned == after.quarantined == 0
    # The seven chunks' full pages may still serve another prompt that begins so, until someone wants the room.
    assert after.cached * PAGE_SIZE == 7 * 512
    it.pages.clear_cache()
    assert it.pages.counts() == before


@given(start=st.integers(0, 100_000), sizes=st.lists(st.integers(1, 8192), min_size=1, max_size=40))
def test_chunks_attend_to_what_the_whole_prompt_does(start: int, sizes: list[int]) -> None:
    """No query-key pair is computed twice and none is left out: n * (context + n / 2) of them, whatever the cuts."""
    total, attended, position = sum(sizes), 0.0, start
    for size in sizes:
        attended += StepWork.of([(position, size)]).attended
        position += size
    assert attended == total * (start + total / 2)


def test_the_scheduler_cuts_a_prompt_so() -> None:
    for budget in (64, 1000, 4096, 32_768):
        it = scheduler(budget)
        add(it, "long", range(20_000))
        works = [batch.work for batch in run(it)]
        assert sum(work.prefill_tokens for work in works) == 20_000
        assert sum(work.attended for work in works) == 20_000**2 / 2
