"""When pages will be free on a replica whose requests end and whose waiting requests start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.router.query import Query
from crossdock.router.room import free_later
from crossdock.router.work import InFlightLoad
from crossdock.workers.report.live_profile import MOST_ENDS, LiveProfile
from tests.router.replicas import live_profile

GAP, SHARE = 0.01, 0.5  # so that a token takes twice as long beside a prompt


def live(**fields: object) -> LiveProfile:
    return live_profile("one", 1, **fields)


def test_streams_beside_a_started_prompt_end_later_and_free_their_pages() -> None:
    report = live(ends=((10, 5), (30, 7)), started_seconds=0.15)
    assert free_later(report, report.room.lacking, (), 2.0, GAP, SHARE) == [
        (pytest.approx(0.2), 7.0),
        (pytest.approx(0.45), 14.0),
    ]


def test_waiting_prompt_takes_pages_that_an_end_frees_and_slows_the_streams_that_go_on() -> None:
    report = live(ends=((10, 5), (30, 7)), lacking=((6, 0.1, 50),))
    assert free_later(report, report.room.lacking, (), 2.0, GAP, SHARE) == [
        (pytest.approx(0.1), 1.0),
        (pytest.approx(0.4), 8.0),
        (pytest.approx(0.8), 14.0),  # 10 tokens beside its prompt, then 50 of its own
    ]


def test_request_on_its_way_passes_one_that_waits_for_more_pages() -> None:
    booked = InFlightLoad(Query("a", 40, max_tokens=5), 1, 0.1, pages=3, decodes=True)
    report = live(ends=((40, 5),), lacking=((9, 0.1, 50),))
    (first_s, first), (second_s, second), *_ = free_later(report, report.room.lacking, (booked,), 4.0, GAP, SHARE)
    assert (first_s, first) == (pytest.approx(0.25), 4.0), "it ends first: 10 tokens of others pass beside its prompt"
    assert (second_s, second) == (pytest.approx(0.5), 0.0), "then the stream, and the one that waits has room"


def test_request_on_its_way_passes_one_from_elsewhere_that_waits_for_more_pages() -> None:
    booked = InFlightLoad(Query("a", 40, max_tokens=5), 1, 0.1, pages=3, decodes=True)
    report = live(ends=((40, 5),), lacking=((9, 0.0, 50),))
    assert free_later(report, report.room.lacking, (booked,), 4.0, GAP, SHARE)[:2] == [
        (pytest.approx(0.25), 4.0),  # 10 tokens of the stream pass beside its prompt, then 5 of its own
        (pytest.approx(0.5), 0.0),  # then the stream ends, and the one from elsewhere takes all pages
    ]


def test_streams_end_later_where_prompts_took_much_of_the_time_recently() -> None:
    """A token of 10 ms, and as many of prompts: those that are known end soon, but others will follow."""
    for prompts, seconds in ((0.25, 0.4 / 3), (0.5, 0.2), (0.9, 0.2)):
        report = live(ends=((10, 5),), prompt_shares=(prompts,))
        assert free_later(report, report.room.lacking, (), 2.0, GAP, SHARE) == [(pytest.approx(seconds), 7.0)]


def test_waiting_request_with_room_slows_the_streams_and_ends_after_its_prompt_and_output() -> None:
    report = live(ends=((10, 5),), starting=((6, 0.1, 5),))
    assert free_later(report, report.room.lacking, (), 2.0, GAP, SHARE) == [
        (pytest.approx(0.2), 7.0),
        (pytest.approx(0.25), 13.0),  # 10 tokens pass beside its prompt, then 5 of its own
    ]


def test_stream_that_no_report_includes_has_its_pages_until_it_ends() -> None:
    booked = InFlightLoad(Query("a", 40, max_tokens=5), 1, 0.1, pages=3, decodes=True, has_first=True)
    assert free_later(live(ends=((10, 5),)), (), (booked,), 4.0, GAP, SHARE) == [
        (pytest.approx(0.05), 4.0),
        (pytest.approx(0.1), 9.0),
    ]


counts = st.integers(1, 100)


@given(
    ends=st.lists(st.tuples(counts, counts), max_size=MOST_ENDS),
    lacking=st.lists(st.tuples(counts, st.floats(0, 10), counts), max_size=MOST_ENDS),
    free=st.integers(-50, 100),
    share=st.floats(0, 1),
)
def test_times_rise_and_pages_are_neither_lost_nor_taken_twice(
    ends: list[tuple[int, int]], lacking: list[tuple[int, float, int]], free: int, share: float
) -> None:
    report = live(ends=tuple(ends), lacking=tuple(lacking))
    found = free_later(report, report.room.lacking, (), free, GAP, share)
    times = [at for at, _ in found]
    assert times == sorted(times)
    assert len(found) <= MOST_ENDS
    assert all(pages <= free + sum(pages for _, pages in ends) for _, pages in found)
    has_started_all = all(pages <= free + sum(each for _, each in ends) for pages, _, _ in lacking)
    if has_started_all and len(ends) + len(lacking) <= MOST_ENDS and found:
        assert found[-1][1] == free + sum(pages for _, pages in ends)


def test_cost_without_a_base_is_no_error() -> None:
    in_flight = InFlightLoad(Query("a", 40, max_tokens=5), 1, 0.1, pages=3, decodes=True)
    assert free_later(live(), (), [in_flight], 10.0, 0.0, SHARE)
