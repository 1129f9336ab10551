"""The cached pages: the least recently used one goes first, and what one more eviction costs."""

import random
from collections import OrderedDict
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.memory.cached_pages import CachedPages, EvictionPrice
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.request.page_hashes import hash_pages

SIZE = 4
COST = StepCost(base=0.0, per_prefill_token=1e-3, per_attended=1e-5)


def serve(pool: PagePool, owner: str, tokens: list[int]) -> tuple[int, int]:
    """Serve one request, and return how many of its pages were cached, and how many others it evicted."""
    hashes = hash_pages(tokens, SIZE)
    hit = pool.prefixes.match(hashes)
    num_new = len(hashes) - hit.num_pages
    num_evicted = max(num_new - pool.block_pool.num_empty, 0)
    pool.share(owner, hit)
    pool.allocate(owner, num_new)
    pool.index(owner, hashes, hit.num_pages)
    pool.release(owner)
    return hit.num_pages, num_evicted


def num_found(pool: PagePool, tokens: list[int]) -> int:
    return pool.prefixes.match(hash_pages(tokens, SIZE)).num_pages


def prompt(name: int, num_pages: int) -> list[int]:
    return [1000 * name + position for position in range(num_pages * SIZE)]


def test_shared_beginning_outlives_the_older_end() -> None:
    """The system prompt's last use is by the later session."""
    pool, system = PagePool(12, SIZE), prompt(9, 4)
    serve(pool, "a", system + prompt(1, 4))
    serve(pool, "b", system + prompt(2, 4))
    serve(pool, "c", prompt(3, 4))
    assert [num_found(pool, system + prompt(name, 4)) for name in (1, 2)] == [4, 8]


def test_price_is_the_share_of_old_pages_that_are_used_again_times_their_seconds() -> None:
    """Play sessions of 4 pages, of which 8 fit. Half are used again after 7 others."""
    rng, pool = random.Random(3), PagePool(32, SIZE)
    pool.block_pool.price.learn(StepCost(base=0.0, per_prefill_token=1e-3))
    num_used, num_evicted = 0, 0
    recent: list[int] = []
    for number in range(400):
        pool.block_pool.cached.pass_time(number + 1.0)
        name = recent[-8] if len(recent) > 8 and rng.random() < 0.5 else 1000 + number
        recent.append(name)
        used, evicted = serve(pool, str(number), prompt(name, 4))
        if number > 300:
            num_used, num_evicted = num_used + used, num_evicted + evicted
    assert num_evicted > 50
    assert pool.block_pool.cached.price() == pytest.approx(SIZE * 1e-3 * num_used / (num_used + num_evicted), rel=0.5)


@pytest.mark.parametrize(("load_s", "again_s"), [(inf, SIZE * 1e-3), (2e-3, 2e-3), (1.0, SIZE * 1e-3)])
def test_price_above_a_tier_is_at_most_the_seconds_to_load_a_page(load_s: float, again_s: float) -> None:
    price = EvictionPrice(100, SIZE)
    price.learn(StepCost(base=0.0, per_prefill_token=1e-3), load_s)
    price.evicted(10.0)
    price.used(0, 6.0)
    assert price.at(1.0) == pytest.approx(again_s / 2)  # one of two old pages was used again


PAGES = st.lists(st.integers(0, 7), max_size=5, unique=True)


@given(st.lists(st.tuples(st.sampled_from(("add", "share", "evict")), PAGES), max_size=40))
def test_pages_leave_in_the_order_of_their_last_use(events: list[tuple[str, list[int]]]) -> None:
    cached, model = CachedPages(EvictionPrice(8, SIZE), 8), OrderedDict[int, float]()
    for number, (event, pages) in enumerate(events):
        cached.pass_time(float(number))
        if event == "add":
            cached.add(pages)
            for page in pages:
                model[page] = float(number)
                model.move_to_end(page)
        elif event == "share":
            cached.share(pages)
            for page in pages:
                model.pop(page, None)
        elif model:
            assert cached.evict() == model.popitem(last=False)[0]
        assert (len(cached), cached.newest_first()) == (len(model), [*reversed(model)])
        assert [page in cached for page in range(8)] == [page in model for page in range(8)]


def test_price_is_zero_before_any_eviction_and_falls_with_the_age_of_the_oldest() -> None:
    price = EvictionPrice(100, SIZE)
    price.learn(COST)
    price.used(3, 5.0)
    assert price.at(1.0) == 0.0
    price.evicted(10.0)
    price.used(0, 6.0)
    expected = SIZE * COST.per_prefill_token / 2
    assert [price.at(oldest) for oldest in (0.0, 10.0, 40.0)] == pytest.approx([expected, expected, expected / 4])
    price.used(0, 4.0)  # a page that is not old
    assert price.at(10.0) == pytest.approx(expected)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.1, 1000.0), st.integers(0, 50)), max_size=60))
def test_price_is_that_of_a_list_of_all_uses_and_evictions(events: list[tuple[bool, float, int]]) -> None:
    """While all pages are remembered, the price is a mean over the uses of old pages and the evictions."""
    price = EvictionPrice(1000, SIZE)
    price.learn(COST)
    ages, saved, counted = list[float](), 0.0, 0
    for is_used, age, number in events:
        mean = sum(ages) / len(ages) if ages else inf
        if is_used and age != pytest.approx(mean / 2):  # rounding decides whether such a page is old
            price.used(number, age)
            if age > mean / 2:
                saved += SIZE * (COST.per_prefill_token + COST.per_attended * SIZE * number)
                counted += 1
        elif not is_used:
            price.evicted(age)
            ages.append(age)
            counted += 1
    assert price.at(0.0) == pytest.approx(saved / counted if ages else 0.0, rel=1e-6)
