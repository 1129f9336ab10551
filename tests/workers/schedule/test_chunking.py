"""The policies of a step, one by one: how much room, whose turn, who waits, who is refused."""

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.schedule.chunking import (
    MARGIN,
    ChunkBudget,
    adaptive_chunk_budget,
    chunk_tokens,
    next_due,
    order_prefills,
    predicted_ttft,
    prefill_reason,
    reserved_slots,
    skip_decodes,
)
from crossdock.workers.schedule.cost import StepCost, StepWork
from crossdock.workers.schedule.request import Request, SamplingParams
from crossdock.workers.schedule.slo import DEFAULT_CLASSES

COST = StepCost(base=6e-3, per_prefill_token=5e-4, per_attended=5e-8, per_decode=8e-4, per_context=1.5e-7)


def request(name: str, num_tokens: int, **fields: Any) -> Request:
    return Request(name, [1] * num_tokens, SamplingParams(), **fields)


# -- how much --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 300), st.integers(0, 300), st.integers(1, 20))
def test_chunk_tokens(pages: int, remaining: int, budget: int, threshold: int, size: int) -> None:
    start, end = pages * size, pages * size + remaining
    tokens = chunk_tokens(start, end, budget, threshold, size)
    assert 0 <= tokens <= min(remaining, budget, threshold or remaining)
    assert tokens == remaining or (start + tokens) % size == 0
    if min(budget, threshold or budget) >= size:
        assert tokens > 0  # a page of budget always makes progress


@given(
    contexts=st.lists(st.integers(1, 4000), max_size=64),
    slack=st.floats(-1, 2),
    start=st.integers(0, 500).map(lambda page: page * 16),
    length=st.integers(1, 20_000),
)
def test_an_adaptive_chunk_keeps_the_step_inside_the_slack(
    contexts: list[int], slack: float, start: int, length: int
) -> None:
    room = adaptive_chunk_budget(2048, 32, contexts, slack if contexts else inf, 0.5, COST)
    tokens = room.chunk(start, start + length, 0, False, 0, 16)
    assert tokens <= 2048 - len(contexts)
    assert tokens >= min(length, 32), "prompts never stand still"
    step = COST.seconds(StepWork.of([(start, tokens)], contexts))
    allowed = min(MARGIN * slack, 0.5) if contexts else 0.5
    assert step <= allowed + 1e-9 or tokens <= 32
    larger = COST.seconds(StepWork.of([(start, tokens + 16)], contexts))
    assert tokens == length or larger > allowed or tokens + 16 > 2048 - len(contexts), "the largest such chunk"


def test_the_deeper_the_context_the_smaller_the_chunk() -> None:
    sizes = [
        adaptive_chunk_budget(2048, 32, [100] * 8, 0.1, 0.5, COST).chunk(start, 10**7, 0, False, 0, 16)
        for start in (0, 4096, 16_384, 65_536, 10**6)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[3]
    assert sizes[-1] == 32


def test_a_room_says_what_bounds_it() -> None:
    assert "slack of 80 ms, 2 decodes" in adaptive_chunk_budget(512, 32, [9, 9], 0.08, 0.5, COST).reason
    assert "idle" in adaptive_chunk_budget(512, 32, [], inf, 0.5, COST).reason


def test_the_less_steps_can_be_predicted_the_smaller_the_chunk() -> None:
    """A step that overruns by half is in time all the same; one that is never in time does not stop prompts."""
    for overrun in (1.0, 1.2, 1.5, 2.0):
        tokens = adaptive_chunk_budget(2048, 32, [100] * 4, 0.1, 0.5, COST, overrun=overrun).chunk(
            0, 10**5, 0, False, 0, 16
        )
        step = COST.seconds(StepWork.of([(0, tokens)], [100] * 4))
        assert step * overrun <= MARGIN * 0.1
        assert COST.seconds(StepWork.of([(0, tokens + 16)], [100] * 4)) * overrun > MARGIN * 0.1
    assert (
        adaptive_chunk_budget(2048, 32, [100] * 4, 0.1, 0.5, COST, overrun=90).chunk(0, 10**5, 0, False, 0, 16)
        == tokens
    )


@given(st.integers(16, 4096), st.floats(0, 1, exclude_max=True), st.integers(0, 5000), st.floats(0.01, 2))
def test_the_short_lane_keeps_no_more_than_is_wanted(tokens: int, share: float, wanted: int, seconds: float) -> None:
    room = ChunkBudget(tokens, seconds, 16, cost=COST)
    room.keep_lane(share, wanted)
    assert 0 <= room.lane_tokens <= share * tokens
    assert 0 <= room.lane_seconds <= share * seconds
    for_long = room.chunk(0, 10**6, 0, True, 0, 16)
    for_short = room.chunk(0, 10**6, 0, False, 0, 16)
    assert for_long <= for_short
    if not wanted:
        assert for_long == for_short


def test_a_floor_of_a_long_prompt_does_not_take_the_time_of_short_ones() -> None:
    """At 100,000 tokens of context a page costs 88 ms, more than the slack: it waits while a short prompt is there."""
    room = adaptive_chunk_budget(2048, 32, [100] * 4, 0.08, 0.5, COST)
    assert room.chunk(100_000, 120_000, 0, True, 0, 16) == 32
    room.keep_lane(0.5, 50)
    assert room.chunk(100_000, 120_000, 0, True, 0, 16) == 0
    assert room.chunk(0, 50, 0, False, 0, 16) == 50
    room.take(0, 50, False)
    room.end_lane()
    assert room.chunk(100_000, 120_000, 0, True, 0, 16) == 0, "the floor is of the step, and has been given"


def test_the_floor_is_for_prompts_as_urgent_as_the_streams() -> None:
    room = adaptive_chunk_budget(2048, 32, [100] * 4, 0.02, 0.5, COST, floor_priority=1)
    assert room.chunk(100_000, 120_000, 0, False, 0, 16) == 32
    assert room.chunk(100_000, 120_000, 1, False, 0, 16) == 32
    assert room.chunk(100_000, 120_000, 2, False, 0, 16) == 0, "batch waits: no stream of another class is late for it"


# -- who skips -------------------------------------------------------------------------------------------------------


def stream(name: str, priority: int, due: float, context: int = 100) -> Request:
    return Request(name, [7] * context, SamplingParams(), priority=priority, due=due)


def test_nobody_skips_while_there_is_time() -> None:
    streams = [stream("a", 0, 0.05), stream("b", 2, 2.0)]
    assert skip_decodes(streams, 0.0, COST) == set()


def test_batch_streams_skip_for_an_interactive_one() -> None:
    streams = [stream("a", 0, 0.03), *(stream(f"b{n}", 2, 2.0 - n / 100) for n in range(60))]
    skipped = skip_decodes(streams, 0.0, COST)
    left = [it for it in streams if it.id not in skipped]
    assert "a" not in skipped
    assert COST.base + COST.decode_seconds(len(left), 100 * len(left)) <= 0.03
    assert "b0" in skipped, "the latest due goes first"
    assert "b59" not in skipped, "no more than is needed"


def test_a_stream_whose_own_promise_is_near_does_not_skip() -> None:
    streams = [stream("a", 0, 0.03), *(stream(f"b{n}", 2, 0.05) for n in range(60))]
    assert skip_decodes(streams, 0.0, COST) == set()


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-1, 3), st.integers(1, 5000)), max_size=40))
def test_the_most_urgent_class_never_skips(streams: list[tuple[int, float, int]]) -> None:
    all_of_them = [stream(f"{n}", *it) for n, it in enumerate(streams)]
    skipped = skip_decodes(all_of_them, 0.0, COST)
    top = min((it.priority for it in all_of_them), default=0)
    assert all(it.priority > top for it in all_of_them if it.id in skipped)
    assert skipped == skip_decodes(list(reversed(all_of_them)), 0.0, COST), "whatever order they come in"


def test_what_a_stream_banks_is_bounded_and_what_it_owes_is_forgiven() -> None:
    assert next_due(0.0, 10.0, 0.1) == pytest.approx(10.1)  # late, or its first token: from now
    assert next_due(10.05, 10.0, 0.1) == pytest.approx(10.125)  # early by half: a quarter is kept
    assert next_due(10.01, 10.0, 0.1) == pytest.approx(10.11)


# -- whose -----------------------------------------------------------------------------------------------------------


def test_classes_come_before_ratios() -> None:
    old = request("old", 10, priority=2)
    new = request("new", 1000, priority=0, arrival_work=50_000)
    assert order_prefills([old, new], 1.0, 50_000, 60.0) == [new, old]


def test_the_highest_response_ratio_on_uncached_tokens() -> None:
    """A long prompt most of which is cached is a short one."""
    long = request("long", 4000)
    cached = request("cached", 4000, expected_cached_tokens=3900)
    short = request("short", 200)
    assert order_prefills([long, short, cached], 1.0, 1000, 60.0) == [cached, short, long]
    assert prefill_reason(cached, 1.0, 1000, 60.0) == "response ratio 11.00"


def test_a_long_prompt_ages_past_short_ones_that_have_just_come() -> None:
    long = request("long", 4000)
    short = request("short", 200, arrival_work=3900)
    assert order_prefills([short, long], 1.0, 4000, 60.0) == [long, short]  # 2.0 against 1.5


def test_who_starves_goes_first_and_the_oldest_of_them() -> None:
    batch = request("batch", 4000, priority=2, queued_at=0.0, arrival_time=0.0)
    later = request("later", 10, priority=2, queued_at=1.0, arrival_time=1.0)
    urgent = request("urgent", 10, priority=0, queued_at=61.0, arrival_time=61.0)
    assert order_prefills([urgent, later, batch], 61.5, 0, 60.0) == [batch, later, urgent]
    assert prefill_reason(batch, 61.5, 0, 60.0) == "waited 62 s"


def test_what_was_promised_for_later_is_not_urgent_yet() -> None:
    """A minute is nothing to a batch prompt that may take ten: it goes before no class until these are over."""
    batch = request("batch", 4000, priority=2, queued_at=0.0, arrival_time=0.0, patience=600.0)
    urgent = request("urgent", 10, priority=0, queued_at=599.0, arrival_time=599.0, patience=1.0)
    assert order_prefills([batch, urgent], 599.5, 0, 60.0) == [urgent, batch]
    assert order_prefills([urgent, batch], 600.0, 0, 60.0) == [batch, urgent]


def test_ties_go_by_arrival_then_id() -> None:
    requests = [request("b", 10), request("a", 10), request("c", 10, arrival_time=-1.0, queued_at=-1.0)]
    assert [it.id for it in order_prefills(requests, 1.0, 0, 60.0)] == ["c", "a", "b"]


def test_places_are_kept_for_the_urgent() -> None:
    kept = int(DEFAULT_CLASSES[0].decode_share * 64)
    assert kept > 0
    assert reserved_slots(DEFAULT_CLASSES, 64, [], 0) == 0
    assert reserved_slots(DEFAULT_CLASSES, 64, [2] * 10, 2) == kept
    assert reserved_slots(DEFAULT_CLASSES, 64, [0] * 2, 1) == kept - 2
    assert reserved_slots(DEFAULT_CLASSES, 64, [0] * 60, 2) == 0


# -- admission -------------------------------------------------------------------------------------------------------


def test_a_prompt_waits_for_the_more_urgent_and_shares_with_its_equals() -> None:
    assert predicted_ttft(1.0, 1, [], 1.0) == 1.0
    assert predicted_ttft(1.0, 1, [(0, 5.0)], 1.0) == 6.0
    assert predicted_ttft(1.0, 1, [(1, 5.0), (1, 0.2)], 1.0) == pytest.approx(2.2)
    assert predicted_ttft(1.0, 1, [(2, 5.0)], 1.0) == 1.0
    assert predicted_ttft(1.0, 1, [], 0.5) == 2.0
    assert predicted_ttft(1.0, 1, [], 0.0) < 100, "streams never stop prompts for good"
