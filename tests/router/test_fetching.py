"""The router lets a replica fetch pages where that is predicted to be sooner, from a replica that has them."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from crossdock.router.fleet import Fleet
from crossdock.router.legs import submits_of
from crossdock.router.placement import Placement
from crossdock.workers.report.link import LinkCost
from crossdock.workers.report.live_profile import PageChanges, Prompts
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.request.page_hashes import hash_pages
from crossdock.workers.schedule.request.submission import Leg, Submission
from tests.router.replicas import COST, PAGE_SIZE, fleet_of, live, profile, query

PROMPT = list(range(3000))  # of 0.3 s of prefill, and 187 full pages
BUSY = (Prompts(0, 6, 4, 40_000, 20.0),)  # 20 s of prompts of a more urgent class


def holding(profiles: dict[str, SchedulingProfile], holders: dict[str, int], **config: Any) -> Fleet:
    """Return a router whose `holders` have reported so many pages of `PROMPT`, and are busy for 20 s."""
    fleet = fleet_of(profiles, **config)
    for name, num_pages in holders.items():
        fleet.hear(name, live(2, prompts=BUSY), 0.0)
        fleet.hear_pages(name, PageChanges("first life", 1, hash_pages(PROMPT, PAGE_SIZE)[:num_pages]))
    return fleet


def choose(fleet: Fleet, **fields: Any) -> Placement:
    return fleet.choose(query("q", prompt=PROMPT, **fields), 0.0)


def test_idle_replica_fetches_the_prefix_of_a_busy_one() -> None:
    found = choose(holding({name: profile() for name in "ab"}, {"a": 187}))
    assert (found.decode, found.source, found.source_tokens) == ("b", "a", 187 * PAGE_SIZE)
    assert found.reason.split()[:2] == ["local", "fetched"]
    assert found.predicted_ttft == pytest.approx(found.alternatives["fetch"], rel=1e-3)
    assert found.alternatives["fetch"] < found.alternatives["compute"] < found.alternatives["holder"]
    assert found.prefill_seconds < 0.02, "eight tokens are left to compute"


def test_idle_holder_serves_its_own_prefix() -> None:
    fleet = holding({name: profile() for name in "ab"}, {"a": 187})
    fleet.hear("a", live(3), 0.0)
    found = choose(fleet)
    assert (found.decode, found.source) == ("a", None)


def test_lone_replica_with_the_prefix_has_no_alternatives() -> None:
    found = choose(holding({"a": profile()}, {"a": 187}), may_refuse=False)
    assert (found.decode, found.source, found.cached_tokens) == ("a", None, 187 * PAGE_SIZE)
    assert not found.alternatives


def test_equal_prefixes_everywhere_are_not_fetched() -> None:
    found = choose(holding({name: profile() for name in "ab"}, {"a": 187, "b": 187}), may_refuse=False)
    assert found.source is None
    assert found.alternatives.keys() == {"holder"}


def test_without_a_holder_nothing_is_fetched() -> None:
    assert choose(holding({name: profile() for name in "ab"}, {})).source is None


@pytest.mark.parametrize("unlike", [{"compatibility": "model B"}, {"peer": b""}], ids=["another model", "no dock"])
def test_replica_that_cannot_exchange_pages_fetches_none(unlike: dict[str, Any]) -> None:
    found = choose(holding({"a": profile(**unlike), "b": profile()}, {"a": 187}))
    assert (found.decode, found.source) == ("b", None)


def test_slow_link_lets_the_prompt_be_computed() -> None:
    """187 pages of 100 kB take 0.19 s at 100 MB/s, and 1.9 s at 10 MB/s; computing takes 0.3 s."""
    for rate, source in ((100e6, "a"), (10e6, None)):
        found = choose(holding({name: profile(bytes_per_second=rate) for name in "ab"}, {"a": 187}))
        assert (found.decode, found.source) == ("b", source)


def test_link_whose_transfers_take_long_whatever_their_bytes_lets_the_prompt_be_computed() -> None:
    """187 pages of 100 kB take 0.02 s at 1 GB/s; computing takes 0.3 s."""
    for transfer_s, source in ((0.1, "a"), (0.4, None)):
        fleet = holding({name: profile() for name in "ab"}, {"a": 187})
        fleet.hear("a", live(3, prompts=BUSY, link=LinkCost(transfer_s, 1e9)), 0.0)
        found = choose(fleet)
        assert (found.decode, found.source) == ("b", source)
        if source:
            assert found.predicted_ttft > transfer_s


def test_source_whose_link_is_asked_for_more_than_computing_takes_is_left_alone() -> None:
    """Each fetch takes 0.19 s of the link."""
    fleet = holding({name: profile(bytes_per_second=100e6) for name in "abcde"}, {"a": 187})
    sources = []
    for number in range(4):
        request = query(f"{number}", prompt=PROMPT)
        found = fleet.choose(request, 0.0, ["a", *"bcde"[:number]])
        sources.append(found.source)
    assert sources == [None] * 4, "a source that the request was lost at is not asked"
    for number in range(4):
        request = query(f"again {number}", prompt=PROMPT)
        found = fleet.choose(request, 0.0, "bcde"[:number])
        fleet.book(request, found)
        sources.append(found.source)
    assert sources[4:] == ["a", None, None, None]


@pytest.mark.parametrize("config", [{"shipping": "never"}, {"policy": "prefix-affinity"}], ids=str)
def test_configured_router_fetches_nothing(config: dict[str, str]) -> None:
    assert choose(holding({name: profile() for name in "ab"}, {"a": 187}, **config)).source is None


def test_request_that_may_not_ship_fetches_nothing() -> None:
    assert choose(holding({name: profile() for name in "ab"}, {"a": 187}), may_ship=False).source is None


def test_silent_replica_is_no_source() -> None:
    fleet = holding({name: profile() for name in "ab"}, {"a": 187})
    fleet.hear("b", live(2), 100.0)
    assert fleet.choose(query("q", prompt=PROMPT), 100.0).source is None


def test_pages_on_their_way_to_a_replica_are_not_fetched() -> None:
    """Another prompt with this prefix was placed on the replica, which has not reported the pages."""
    fleet = fleet_of({name: profile() for name in "ab"})
    first = query("first", prompt=PROMPT)
    fleet.book(first, fleet.choose(first, 0.0))
    assert choose(fleet).source is None


def test_prefill_replica_fetches_from_a_decode_replica() -> None:
    """The decode replica has made the last answer of a conversation."""
    profiles = {"p": profile(role="prefill"), "d": profile(role="decode")}
    fleet = fleet_of(profiles, shipping="always")
    fleet.hear_pages("d", PageChanges("first life", 1, hash_pages(PROMPT, PAGE_SIZE)))
    found = choose(fleet)
    assert (found.prefill, found.decode, found.source) == ("p", "d", "d")
    assert found.alternatives["ship"] == pytest.approx(found.predicted_ttft, rel=1e-3)
    receive, send = submits_of(found, Submission("q", PROMPT))
    assert (receive.submission.leg, receive.source, receive.submission.source_tokens) == (Leg.RECEIVE, None, 0)
    assert (send.submission.leg, send.source, send.submission.source_tokens) == (Leg.SEND, "d", 187 * PAGE_SIZE)


@given(
    tokens=st.integers(0, 187),
    here=st.integers(0, 187),
    rate=st.floats(1e6, 1e11),
    slowness=st.floats(0.01, 10.0),
)
def test_fetch_is_chosen_only_where_it_is_predicted_to_be_sooner(
    tokens: int, here: int, rate: float, slowness: float
) -> None:
    """Sending pages and computing the rest take less time than computing all."""
    profiles = {"a": profile(bytes_per_second=rate), "b": profile(slowness)}
    fleet = holding(profiles, {"a": tokens})
    assume(slowness * COST.prefill_seconds(0, len(PROMPT), 512) < 10.0)
    fleet.hear_pages("b", PageChanges("first life", 1, hash_pages(PROMPT, PAGE_SIZE)[:here]))
    found = choose(fleet)
    assume(found.source is not None)
    assert (found.decode, found.source) == ("b", "a"), "the other one is busy for 20 s"
    assert tokens > here
    assert found.source_seconds == pytest.approx((tokens - here) * 100_000 / rate)
    computed = slowness * COST.prefill_seconds(here * PAGE_SIZE, len(PROMPT), 512)
    rest = slowness * COST.prefill_seconds(tokens * PAGE_SIZE, len(PROMPT), 512)
    assert rest + found.source_seconds < computed
    assert found.predicted_ttft >= max(rest, found.source_seconds)
