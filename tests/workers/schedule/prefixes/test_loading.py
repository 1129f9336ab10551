"""Pages are stored and loaded where that saves seconds, as counted and predicted."""

from dataclasses import replace
from typing import Any

import pytest

from crossdock.workers.schedule.prefixes.loading import PrefixLoad
from crossdock.workers.schedule.prefixes.tier_pages import PageKey, PageTier, ReturnShare, TierPages
from crossdock.workers.schedule.request.coming_pages import ArrivingTail
from tests.workers.schedule.model_free_replica import COST, ModelFreeReplica, chunk_sizes, new_timed_replica

PROMPT = [*range(1, 43)]  # ten full pages of four tokens, and two tokens
OTHER = [*range(51, 93)]
PAGE_S = 4e-3  # to compute, by `COST`
ONE_STEP = replace(COST, base=5e-3)
"""A cost whose knee of throughput is beyond `PROMPT`."""
WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 4000}  # prompts wait for all of their pages


def replica_with(load_s: float, **config: Any) -> ModelFreeReplica:
    """Return a replica whose tier has the pages of `PROMPT`, and of `OTHER`."""
    tier = PageTier("host", store_s=0.0, load_s=load_s)
    replica = new_timed_replica(ONE_STEP, tiers=TierPages([tier]), **config)
    for prompt in (PROMPT, OTHER):
        hashes = replica.add("first", prompt).prefix_hashes(len(prompt), 4)
        replica.scheduler.abort("first")
        tier.hold(PageKey(0, each) for each in hashes)
    return replica


def test_prompt_is_loaded_where_that_is_sooner() -> None:
    replica = replica_with(load_s=PAGE_S / 100)
    replica.add("a", PROMPT)
    assert not replica.step().batch
    (load,) = replica.scheduler.loading.take_begun()
    assert [each.number for each in load.pages] == [*range(10)]
    filled(load, 10)
    replica.scheduler.loading.end(load)
    assert chunk_sizes(replica.run(), "a") == [2]
    assert replica.scheduler.awaited.num_tokens == {"host": 40}


def test_prompt_is_computed_where_that_is_sooner() -> None:
    replica = replica_with(load_s=PAGE_S * 40)
    replica.add("a", PROMPT)
    assert sum(chunk_sizes(replica.run(), "a")) == len(PROMPT)
    assert not replica.scheduler.loading.take_begun()


def test_load_that_would_wait_behind_others_is_not_begun() -> None:
    replica = replica_with(load_s=PAGE_S * 0.8, **WHOLE)
    replica.add("a", PROMPT)
    replica.add("b", OTHER)
    batch = replica.step().batch
    assert [load.prefix.request.id for load in replica.scheduler.loading.take_begun()] == ["a"]
    assert [part.request.id for part in batch.scheduled] == ["b"]


def test_short_prompt_is_loaded_while_a_longer_one_before_it_lacks_pages() -> None:
    replica = replica_with(load_s=PAGE_S / 100, num_pages=16, max_model_len=60, **WHOLE)
    replica.add("stream", [*range(100, 142)], max_tokens=9)
    replica.step()
    replica.add("long", PROMPT)
    replica.add("short", OTHER[:10])
    replica.step()
    assert [load.prefix.request.id for load in replica.scheduler.loading.take_begun()] == ["short"]


def filled(load: PrefixLoad, count: int) -> None:
    """Fill the next `count` pages of a load, as the thread of the tiers does."""
    for _ in range(count):
        assert load.take() is not None
        load.land()


WAYS = ["overdue", "aborted", "failed"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_landed", [0, 3])
@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("is_tail", [False, True])
def test_load_that_no_request_waits_for_is_taken_back(way: str, num_landed: int, is_taken: bool, is_tail: bool) -> None:
    """Pages that the tier has filled are cached. The page that it is filling is used again when it has ended."""
    replica = replica_with(load_s=PAGE_S / 2, **({} if is_tail else WHOLE))
    request = replica.add("a", PROMPT)
    replica.step()
    (load,) = replica.scheduler.loading.take_begun()
    assert (load.tail is not None) == is_tail
    filled(load, num_landed)
    assert not is_taken or load.take() is not None
    if way == "aborted":
        replica.scheduler.abort("a")
    elif way == "failed":
        replica.scheduler.fail(request, "a reason")
    else:
        while replica.scheduler.table.has_work:
            replica.now += 1.0
            replica.run()
        num_of_use = 0 if is_tail and is_taken else num_landed  # behind a page that lacks, none is of use
        assert sum(chunk_sizes(replica.batches, "a")) == len(PROMPT) - 4 * num_of_use
    counts = replica.scheduler.pages.counts()
    assert counts.owned == 0
    assert counts.quarantined == int(is_taken)
    assert load.take() is None
    replica.scheduler.loading.end(load)
    counts = replica.scheduler.pages.counts()
    assert counts.owned == counts.quarantined == 0
    assert counts.cached >= num_landed
    assert replica.scheduler.awaited.num_tokens["host"] == 4 * num_landed


def test_no_load_begins_while_a_tier_does_not_answer() -> None:
    replica = replica_with(load_s=PAGE_S / 2, **WHOLE)
    replica.add("a", PROMPT)
    replica.step()
    (load,) = replica.scheduler.loading.take_begun()
    load.take()
    replica.now = 1.0
    replica.add("b", OTHER)
    assert {part.request.id for batch in replica.run() for part in batch.scheduled} == {"a", "b"}
    assert not replica.scheduler.loading.take_begun()
    assert replica.scheduler.loading.queued_s > 1000, "routers expect no load"
    replica.scheduler.loading.end(load)
    assert replica.scheduler.loading.queued_s == 0.0
    replica.scheduler.pages.block_pool.clear_cache()
    replica.add("c", OTHER)
    replica.step()
    assert len(replica.scheduler.loading.take_begun()) == 1


def test_stream_does_not_wait_for_a_page_that_a_tier_may_never_give_back() -> None:
    """Two streams fill the pool. One is preempted for the other, although a quarantined page may come back."""
    replica = replica_with(load_s=PAGE_S / 100, num_pages=16, max_model_len=60, **WHOLE)
    replica.add("lost", PROMPT[:10])
    replica.step()
    (load,) = replica.scheduler.loading.take_begun()
    load.take()
    replica.scheduler.abort("lost")
    assert replica.scheduler.pages.counts().quarantined == 1
    for name in "ab":
        replica.add(name, [*range(60, 80)], max_tokens=30)
    replica.run()
    assert not replica.scheduler.table.has_work
    assert replica.scheduler.pages.counts().quarantined == 1


def test_prompt_with_a_prefix_that_is_loaded_for_another_waits_for_it_too() -> None:
    replica = replica_with(load_s=PAGE_S / 2, **WHOLE)
    replica.add("a", PROMPT)
    replica.add("b", [*PROMPT[:40], 7, 7])
    assert not replica.step().batch
    (load,) = replica.scheduler.loading.take_begun()
    filled(load, 10)
    replica.scheduler.loading.end(load)
    assert sum(sum(chunk_sizes(batches, name)) for batches in [replica.run()] for name in "ab") == 4


def begun(load_s: float = PAGE_S) -> tuple[ModelFreeReplica, PrefixLoad, ArrivingTail]:
    """Return a replica that has begun to load `PROMPT` and to compute its first pages."""
    replica = replica_with(load_s)
    replica.add("a", PROMPT)
    replica.step()
    (load,) = replica.scheduler.loading.take_begun()
    assert load.tail is not None
    return replica, load, load.tail


def test_prompt_is_computed_from_its_beginning_and_loaded_from_its_end_until_both_meet() -> None:
    replica, load, tail = begun()
    first = tail.claimed
    assert 3 <= first <= 5, "loading takes as long as computing"
    filled(load, 10 - first)
    assert load.take() is None
    assert load.landed_from == first
    assert not replica.step().batch
    replica.scheduler.loading.end(load)
    assert sum(chunk_sizes(replica.run(), "a")) == 2
    assert sum(chunk_sizes(replica.batches, "a")) == len(PROMPT) - 4 * (10 - first)
    assert load.prefix.request.num_cached_tokens == 4 * (10 - first)
    assert replica.scheduler.pages.counts().owned == 0


def test_pages_that_are_loaded_too_late_are_computed() -> None:
    """Only one is loaded, and nothing is heard of it until all others are computed."""
    replica, load, tail = begun()
    filled(load, 1)
    while tail.num_pending:
        replica.step()
        replica.now += 0.001
    assert tail.claimed == 9
    replica.scheduler.loading.end(load)
    replica.run()
    assert sum(chunk_sizes(replica.batches, "a")) == len(PROMPT) - 4


def test_page_that_is_lost_is_computed_and_those_behind_it_are_not() -> None:
    replica, load, _ = begun()
    filled(load, 2)
    assert load.take() is not None
    replica.scheduler.loading.end(load)
    replica.run()
    assert sum(chunk_sizes(replica.batches, "a")) == len(PROMPT) - 8


def test_load_that_hangs_is_given_up_and_the_page_that_it_fills_is_not_reused() -> None:
    replica, load, _ = begun()
    filled(load, 1)
    assert load.take() is not None
    replica.now = 1.0
    while replica.step().batch or replica.now < 2.0:
        replica.now += 0.1
    replica.run()
    assert load.prefix.request.num_preemptions == 1
    assert sum(chunk_sizes(replica.batches, "a")) == len(PROMPT)
    counts = replica.scheduler.pages.counts()
    assert (counts.owned, counts.quarantined) == (0, 1), "it may still be written to"
    replica.scheduler.loading.end(load)
    assert replica.scheduler.pages.counts().quarantined == 0


def test_page_that_gives_way_to_those_that_its_load_evicts_is_lost() -> None:
    """The pool is full of another prompt, and memory has room for few pages."""
    tier = PageTier("host", store_s=0.0, load_s=PAGE_S / 100)
    small = {"num_pages": 16, "max_model_len": 60, "on_evict": lambda *_: tier.drop([*tier.pages])}
    replica = new_timed_replica(tiers=TierPages([tier]), **small)
    replica.add("other", OTHER)
    replica.run()
    request = replica.add("a", PROMPT)
    tier.hold(PageKey(0, each) for each in request.prefix_hashes(len(PROMPT), 4))
    replica.step()
    (load,) = replica.scheduler.loading.take_begun()
    assert not tier.pages
    assert load.take() is not None
    replica.scheduler.loading.end(load)
    replica.run()
    assert sum(chunk_sizes(replica.batches, "a")) == len(PROMPT)


def test_prompt_without_a_full_page_in_a_tier_is_computed_at_once() -> None:
    replica = replica_with(load_s=0.0)
    replica.add("a", [9, *PROMPT])
    assert replica.step().batch.num_tokens == 1 + len(PROMPT)


@pytest.mark.parametrize(("store_s", "is_worth"), [(PAGE_S * 0.3, True), (PAGE_S * 0.5, False)])
def test_page_is_stored_if_half_of_what_it_saves_exceeds_its_cost(store_s: float, is_worth: bool) -> None:
    """Before any page was counted, half of all pages are expected to return."""
    tiers = TierPages([PageTier("files", store_s=store_s, load_s=PAGE_S * 0.2)])
    assert bool(tiers.worth_storing(PageKey(0, b"page"), PAGE_S)) == is_worth


def test_pages_that_no_request_wants_again_are_no_longer_stored() -> None:
    tiers = TierPages([PageTier("files", store_s=PAGE_S * 0.1, load_s=PAGE_S * 0.1)])
    for number in range(100):
        tiers.returns.evicted(number.to_bytes(16, "big"))
    assert not tiers.worth_storing(PageKey(0, b"page"), PAGE_S)
    tiers.returns.wanted(number.to_bytes(16, "big") for number in range(50))
    assert tiers.worth_storing(PageKey(0, b"page"), PAGE_S)


def test_page_that_is_wanted_twice_counts_once() -> None:
    returns = ReturnShare()
    before = returns.share
    returns.evicted(b"page")
    returns.wanted([b"page", b"page", b"another"])
    assert returns.share == pytest.approx((2 * before + 1) / 3)
