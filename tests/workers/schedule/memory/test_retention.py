"""Which cached page is evicted first: by value the page that is least worth its memory, never a page before another."""

import random
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.memory.prefix_index import PageHash, hash_pages
from crossdock.workers.schedule.memory.retention import (
    NO_HINT,
    EvictionPrice,
    LeastRecentlyUsed,
    LeastValuable,
    ReturnHint,
    retention,
    why_no_values,
)
from crossdock.workers.schedule.memory.returns import Returns, chances

SIZE = 4
COST = StepCost(base=0.0, per_prefill_token=1e-3, per_attended=1e-5)


class Sessions:
    """A pool that keeps pages by value, and requests that take their pages at one time and release them at another."""

    def __init__(self, num_pages: int) -> None:
        self.cached = LeastValuable(num_pages, SIZE)
        self.cached.learn(COST)
        self.pool = PagePool(num_pages, SIZE, cached=self.cached)
        self.count = 0

    def run(self, tokens: list[int], now: float, seconds: float = 0.0, hint: ReturnHint = NO_HINT) -> int:
        """Serve one request, and return how many of its pages were cached."""
        self.cached.pass_time(now)
        hashes = self.hashes(tokens)
        self.count += 1
        owner = str(self.count)
        hits = self.pool.match_prefix(hashes)
        self.pool.share(owner, hits)
        self.pool.allocate(owner, len(hashes) - hits.num_pages)
        self.pool.index(owner, hashes, hits.num_pages)
        self.cached.pass_time(now + seconds)
        self.pool.release(owner, hint)
        return hits.num_pages

    def num_found(self, tokens: list[int]) -> int:
        return self.pool.match_prefix(self.hashes(tokens)).num_pages

    def hashes(self, tokens: list[int]) -> list[PageHash]:
        return hash_pages(tokens, SIZE)


def prompt(name: int, num_pages: int) -> list[int]:
    return [1000 * name + position for position in range(num_pages * SIZE)]


def test_without_observations_the_last_used_stays() -> None:
    sessions = Sessions(8)
    sessions.run(prompt(1, 4), now=0.0)
    sessions.run(prompt(2, 4), now=100.0)
    sessions.run(prompt(3, 4), now=101.0)
    assert [sessions.num_found(prompt(name, 4)) for name in (1, 2, 3)] == [0, 4, 4]


def test_prefix_is_evicted_from_its_end() -> None:
    sessions = Sessions(8)
    sessions.run(prompt(1, 6), now=0.0)
    sessions.run(prompt(2, 5), now=1.0)
    assert sessions.num_found(prompt(1, 6)) == 3
    assert sessions.pool.counts().cached == 8


def test_shared_beginning_outlives_both_ends() -> None:
    """The system prompt's last use is by the session that is evicted first."""
    sessions = Sessions(12)
    system = prompt(9, 4)
    sessions.run(system + prompt(1, 4), now=0.0)
    sessions.run(system + prompt(2, 4), now=50.0)
    sessions.run(prompt(3, 6), now=51.0)
    assert sessions.num_found(system + prompt(1, 4)) == 4
    assert sessions.num_found(system + prompt(2, 4)) == 6


def test_session_that_returns_is_kept_and_single_prompts_are_not() -> None:
    """Sessions return 10 s after each turn, prompts of another length never. Then a prompt comes that needs room: it
    takes that of the single prompt, though this was used after the session."""
    sessions = Sessions(40)
    session: list[int] = []
    for turn in range(12):
        session += prompt(100 + turn, 1)
        sessions.run(session, 10.0 * turn)
        sessions.run(prompt(200 + turn, 16), 10.0 * turn + 5.0)
    sessions.run(prompt(300, 16), now=119.0)
    assert sessions.num_found(session) == 12
    assert sessions.num_found(prompt(211, 16)) < 16


def test_deeper_page_is_worth_more_where_attention_costs() -> None:
    cached = LeastValuable(64, SIZE)
    cached.learn(COST)
    pool = PagePool(64, SIZE, cached=cached)
    for owner, num_pages in (("long", 40), ("short", 4)):
        hashes = hash_pages(prompt(len(owner), num_pages), SIZE)
        pool.allocate(owner, num_pages)
        pool.index(owner, hashes, 0)
    pool.release("short")
    pool.release("long")
    pool.allocate("new", 24)
    assert pool.counts().cached == 40
    assert pool.match_prefix(hash_pages(prompt(5, 4), SIZE)).num_pages == 0


def test_hazard_estimate_is_the_rate_of_returns() -> None:
    """Half of the pages return, after exponential times of mean 20 s; the others are evicted after 30 s."""
    rng, returns = random.Random(0), Returns()
    for _ in range(400):
        age = rng.expovariate(1 / 20)
        returns.observe(min(age, 30.0), age < 30.0)
    hazards = returns.hazards([0.1] * 16)
    assert hazards[6] == pytest.approx(1 / 20, rel=0.35)  # 8 to 16 s
    assert hazards[7] == pytest.approx(1 / 20, rel=0.35)


def test_chance_looks_ahead_to_the_usual_pause() -> None:
    """Nothing returns in the first 8 s, most pages from 8 to 16 s: a page is worth more the nearer that time is."""
    hazards = [1e-6] * 6 + [0.5] + [1e-6] * 9
    found = chances(hazards)
    assert found[0] < found[3] < found[5] < found[6]
    assert found[6] == pytest.approx(0.5)
    assert found[7] < 1e-5


def test_prefix_used_again_and_again_takes_no_more_memory() -> None:
    sessions = Sessions(8)
    for turn in range(2000):
        sessions.run(prompt(1, 4), now=float(turn))
    assert sum(map(len, sessions.cached._ends.values())) <= 200


@given(st.integers(0, 2**32), st.integers(4, 30))
def test_any_history_keeps_prefixes_whole_and_every_page_in_one_state(seed: int, num_pages: int) -> None:
    """Every cached page can be found from the beginning of its prompt, while no page is owned."""
    rng, sessions, now = random.Random(seed), Sessions(num_pages), 0.0
    prompts = [prompt(rng.randrange(3), rng.randint(1, 3)) + prompt(n, rng.randint(1, 3)) for n in range(5, 15)]
    prompts = [tokens for tokens in prompts if len(tokens) // SIZE <= num_pages]
    for _ in range(40):
        now += rng.choice((0.0, 0.3, 5.0, 700.0))
        if prompts:
            hint = ReturnHint(rng.choice("ab"), rng.choice((0.0, 300.0, 3600.0)))
            sessions.run(rng.choice(prompts), now, rng.choice((0.0, 2.0)), hint)
        if rng.random() < 0.03:
            sessions.pool.clear_cache()
        hinted = [sessions.cached._hints._num_pages[tenant] for tenant in "ab"]
        assert all(0 <= pages <= num_pages // 4 for pages in hinted)
        assert 0 <= sessions.cached.price() <= max(sessions.cached._page_seconds[:6])
        counts = sessions.pool.counts()
        assert (counts.owned, counts.free + counts.cached) == (0, num_pages)
        found = {page for tokens in prompts for page in sessions.pool.match_prefix(sessions.hashes(tokens)).pages}
        assert len(found) == counts.cached == len(sessions.pool.findable())


def test_hinted_session_is_kept_until_its_hints_have_not_come_true() -> None:
    """No session returns. At first a hinted prompt outlives one that is used after it, at last it does not."""
    sessions, kept = Sessions(24), list[bool]()
    for turn in range(300):
        now = 100.0 * turn
        sessions.run(prompt(1000 + turn, 6), now, hint=ReturnHint("a", 300.0))
        sessions.run(prompt(2000 + turn, 6), now + 1.0)
        for number in range(3):
            sessions.run(prompt(3000 + 3 * turn + number, 6), now + 2.0 + number)
        kept.append(sessions.num_found(prompt(1000 + turn, 6)) > sessions.num_found(prompt(2000 + turn, 6)))
    assert any(kept[:100])
    assert not any(kept[-100:])


def test_hints_of_one_tenant_keep_at_most_a_quarter_of_the_pages() -> None:
    sessions = Sessions(40)
    for number in range(10):
        sessions.run(prompt(100 + number, 4), float(number), hint=ReturnHint("greedy", 3600.0))
    assert sessions.cached._hints._num_pages["greedy"] == 8
    sessions.pool.clear_cache()
    assert sessions.cached._hints._num_pages["greedy"] == 0


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, LeastValuable])
def test_price_is_the_share_of_old_pages_that_are_used_again_times_their_seconds(policy: type) -> None:
    """Play sessions of 4 pages, of which 8 fit. Half are used again after 7 others."""
    rng, cost = random.Random(3), StepCost(base=0.0, per_prefill_token=1e-3)
    price = EvictionPrice(32, SIZE)
    cached = policy(price) if policy is LeastRecentlyUsed else policy(32, SIZE)
    cached.learn(cost)
    pool, num_used, num_evicted, now = PagePool(32, SIZE, cached=cached), 0, 0, 0.0
    recent: list[int] = []
    for number in range(400):
        now += 1.0
        cached.pass_time(now)
        name = recent[-8] if len(recent) > 8 and rng.random() < 0.5 else 1000 + number
        recent.append(name)
        hashes = hash_pages(prompt(name, 4), SIZE)
        hit = pool.match_prefix(hashes)
        evicted = max(4 - hit.num_pages - pool.num_empty, 0)
        if number > 300:
            num_used, num_evicted = num_used + hit.num_pages, num_evicted + evicted
        pool.share(str(number), hit)
        pool.allocate(str(number), 4 - hit.num_pages)
        pool.index(str(number), hashes, hit.num_pages)
        pool.release(str(number))
    assert num_evicted > 50
    assert cached.price() == pytest.approx(SIZE * 1e-3 * num_used / (num_used + num_evicted), rel=0.5)


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


@pytest.mark.parametrize(
    ("windows", "state_pages", "reason"),
    [((None,), 0, ""), ((None, None), 0, ""), ((None, 16), 0, "windows"), ((16,), 0, "windows"), ((None,), 2, "state")],
)
def test_pages_go_by_value_unless_a_reason_is_named(
    windows: tuple[int | None, ...], state_pages: int, reason: str
) -> None:
    kind = LeastRecentlyUsed if reason else LeastValuable
    assert isinstance(retention("value", 8, SIZE, windows, state_pages), kind)
    assert isinstance(retention("lru", 8, SIZE, windows, state_pages), LeastRecentlyUsed)
    named = why_no_values(windows, state_pages)
    assert reason in named if reason else not named


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
