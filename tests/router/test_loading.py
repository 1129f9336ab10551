"""The router knows which pages lie in tiers below a replica's pool, and what loading them takes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.router.fleet import Fleet
from crossdock.router.placement import Placement
from crossdock.workers.report.live_profile import PageChanges, Prompts
from crossdock.workers.schedule.request.page_hashes import hash_pages
from tests.router.replicas import COST, LONG_STEPS, PAGE_SIZE, changed, fleet_of, live, place, profile, query

PROMPT = list(range(3000))  # of 0.3 s of prefill, and 187 full pages
HASHES = hash_pages(PROMPT, PAGE_SIZE)


def tiered(
    stored: list[int], load_s: tuple[float, ...], in_pool: int = 0, profiled: Any = None, **fields: Any
) -> Fleet:
    """Return a router of two idle replicas. Of `PROMPT`, `a` has the first pages in its pool, and so many in tiers."""
    fleet = fleet_of({name: profile(peer=b"", **profiled or {}) for name in "ab"})
    fleet.hear("a", live(2, load_seconds=load_s, **fields), 0.0)
    held = [HASHES[:num_pages] for num_pages in stored]
    fleet.hear_pages("a", PageChanges("first life", 1, HASHES[:in_pool], stored=held, lost=[[] for _ in held]))
    return fleet


def choose(fleet: Fleet, exclude: str = "") -> Placement:
    return fleet.choose(query("q", prompt=PROMPT), 0.0, exclude)


def test_prompt_goes_where_its_pages_lie_in_a_tier() -> None:
    found = choose(tiered([187], (1e-4,)))
    assert (found.decode, found.reason.split()[:2]) == ("a", ["local", "loaded"])
    assert found.predicted_ttft == pytest.approx(found.alternatives["load"], rel=1e-3)
    assert found.prefill_seconds < 0.04, "few tokens are left to compute"
    assert 0.0187 < found.predicted_ttft < 0.04


def test_prompt_that_is_loaded_is_booked_with_all_of_its_pages() -> None:
    """Those of the pool, too, which no request holds: no others are evicted for these. And with its output's pages."""
    fleet = tiered([187], (1e-4,), in_pool=40)
    place(fleet, query("q", prompt=PROMPT))
    (in_flight,) = fleet.table.by_name["a"].pending.values()
    assert (in_flight.pages, in_flight.idle_pages) == (188 + 8, 40)


def test_pages_that_are_slow_to_load_are_computed_anywhere() -> None:
    """Layers with windows wait for all of their pages."""
    windows = {"windows": (None, 64)}
    found = choose(tiered([187], (3e-3,), profiled=windows))
    assert "loaded" not in found.reason
    assert not found.alternatives
    assert found.predicted_ttft == pytest.approx(choose(tiered([187], (3e-3,), profiled=windows), "a").predicted_ttft)


def test_loads_that_have_begun_are_waited_for() -> None:
    free, busy = (choose(tiered([187], (1e-4,), load_queue=seconds), "b") for seconds in (0.0, 0.1))
    assert 0.05 < busy.predicted_ttft - free.predicted_ttft < 0.1, "some of it is computed meanwhile"
    assert "loaded" not in choose(tiered([187], (1e-4,), load_queue=1.0), "b").reason


def test_pages_in_the_pool_and_in_two_tiers_are_one_prefix() -> None:
    """Each page is counted at the seconds of the fastest place that has it: 80 in memory, 67 in files."""
    found = choose(tiered([120, 187], (1e-4, 1e-3), in_pool=40))
    assert found.cached_tokens == 187 * PAGE_SIZE
    loaded, computed = 80 * 1e-4 + 67 * 1e-3, COST.prefill_seconds(40 * PAGE_SIZE, 187 * PAGE_SIZE, 512)
    both = loaded * computed / (loaded + computed)
    assert both < found.predicted_ttft < both + 0.02


def test_page_that_a_tier_has_lost_is_computed() -> None:
    fleet = tiered([187], (1e-4,))
    fleet.hear_pages("a", PageChanges("first life", 2, [], stored=[[]], lost=[HASHES[10:11]]))
    assert choose(fleet, "b").cached_tokens == 10 * PAGE_SIZE


def test_replica_that_has_left_holds_nothing() -> None:
    fleet = tiered([187], (1e-4,))
    fleet.leave("a")
    assert not any(map(len, fleet.in_tiers))


@pytest.mark.parametrize("is_fetched", [False, True], ids=["loaded", "fetched"])
def test_pages_that_come_need_as_much_room_as_computed_ones(is_fetched: bool) -> None:
    """Ten streams leave no page free. The prompt has 187 pages, of 0.3 s of prefill."""
    full = {"streams": (10, 0, 0), "context_tokens": 30_000, "ends": ((1000, 200),)}
    fleet = fleet_of({name: profile(bytes_per_second=1e10) for name in "ab"})
    waits = []
    for sequence, free in ((2, 4000), (4, 0)):
        for name in "ab":
            is_busy = name == ("a" if is_fetched else "b")
            prompts = (Prompts(0, 6, 4, 40_000, 20.0),) * is_busy
            report = live(sequence, load_seconds=(1e-5,), prompts=prompts, **full)
            fleet.hear(name, changed(report, free_pages=(free,) * 3), 0.0)
        held = HASHES if is_fetched else []
        fleet.hear_pages("a", PageChanges("first life", sequence, held, stored=[[] if is_fetched else HASHES]))
        found = choose(fleet)
        assert (found.source is None) is (free == 0 or not is_fetched), "pages are not offered where there is no room"
        waits.append(found.predicted_ttft)
    assert waits[0] < 0.1 < waits[1]


@given(num_pages=st.integers(0, 187), in_pool=st.integers(0, 187), load_s=st.floats(1e-6, 1e-2))
def test_load_and_computation_are_predicted_to_meet(num_pages: int, in_pool: int, load_s: float) -> None:
    found = choose(tiered([num_pages], (load_s,), in_pool, {"cost": LONG_STEPS}), "b")
    cached, held = in_pool * PAGE_SIZE, max(in_pool, num_pages) * PAGE_SIZE
    computed, rest = (LONG_STEPS.prefill_seconds(start, len(PROMPT), 512) for start in (cached, held))
    seconds = max(num_pages - in_pool, 0) * load_s
    both = seconds * (computed - rest) / max(seconds + computed - rest, 1e-12)  # until loading and computing meet
    assert found.predicted_ttft == pytest.approx(rest + both)


@pytest.mark.parametrize("is_held", [False, True], ids=["cached alone", "held by a stream"])
def test_cached_pages_that_no_request_holds_are_no_room_beside_themselves(is_held: bool) -> None:
    """150 pages are free, all of them cached; the prompt has 187 cached pages."""
    fleet = fleet_of({"a": profile()})
    fleet.hear_pages("a", PageChanges("first life", 1, HASHES))
    if is_held:
        place(fleet, query("stream", prompt=PROMPT))
        fleet.taken("stream", "a", 1)
    full = live(2, streams=(0, 2, 0), context_tokens=6000, ends=((60, 187),))
    fleet.hear("a", changed(full, free_pages=(150,) * 3), 0.0)
    waits = choose(fleet).predicted_ttft
    assert (waits < 0.1) is is_held


def test_load_begins_when_the_prompt_has_pages() -> None:
    """So a slow load delays a prompt that waits for pages by as much as one that has them."""
    full, delays = {"streams": (0, 1, 0), "context_tokens": 3000, "ends": ((1000, 250),)}, []
    for free in (4000, 0):
        waits = []
        for load_s in (1e-6, 1e-3):
            fleet = tiered([187], (load_s,), **full)
            fleet.hear("a", live(3, load_seconds=(load_s,), **full | {"free_pages": (free,) * 3}), 0.0)
            waits.append(choose(fleet, "b").predicted_ttft)
        delays.append(waits[1] - waits[0])
    assert delays[1] == pytest.approx(delays[0])
    assert delays[0] > 0.05
