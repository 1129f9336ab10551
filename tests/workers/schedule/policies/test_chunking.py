"""How many prompt tokens a step computes: chunks within a budget of tokens and seconds, a lane for short prompts."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.schedule.cost.cost import AdapterWork, StepCost, StepWork
from crossdock.workers.schedule.policies.chunking import (
    FREE_SHARE,
    KNEE,
    LARGE_CHUNK,
    SLACK_SHARE,
    Candidate,
    ChunkBudget,
    adaptive_chunk_budget,
    chunk_tokens,
    floor_beside,
    idle_step,
)

COST = StepCost(base=6e-3, per_prefill_token=5e-4, per_attended=5e-8, per_decode=8e-4, per_context=1.5e-7)


@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 300), st.integers(0, 300), st.integers(1, 20))
def test_chunk_fits_budget_and_ends_on_a_page(
    pages: int, remaining: int, budget: int, threshold: int, size: int
) -> None:
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
def test_adaptive_chunk_keeps_the_step_within_the_slack(
    contexts: list[int], slack: float, start: int, length: int
) -> None:
    budget = adaptive_chunk_budget(2048, 32, StepWork.of([], contexts), slack if contexts else inf, 0.5, COST)
    tokens = budget.chunk(Candidate(start, start + length, 0, False), 0, 16)
    assert tokens <= 2048 - len(contexts)
    assert tokens >= min(length, 32), "prompts never stand still"
    step = COST.seconds(StepWork.of([(start, tokens)], contexts))
    allowed = min(SLACK_SHARE * slack, 0.5) if contexts else 0.5
    least = COST.seconds(StepWork.of([(start, 32)], contexts))  # the floor, and what takes hardly longer
    assert step <= max(allowed, (1 + FREE_SHARE) * least) + 1e-9
    larger = COST.seconds(StepWork.of([(start, tokens + 16)], contexts))
    assert tokens == length or larger > allowed or tokens + 16 > 2048 - len(contexts), "the largest such chunk"


def test_chunk_beside_adapters_or_with_one_is_shorter_and_keeps_the_step_within_the_slack() -> None:
    cost = replace(COST, per_adapter=4e-10, per_adapted=2e-10)
    size, found = 10_000_000, []
    for beside, own in ((0, 0), (8, 0), (0, 1), (8, 1)):
        streams = AdapterWork(beside * size, beside * size)
        budget = adaptive_chunk_budget(2048, 32, StepWork.of_streams(8, 800, streams), 0.25, 0.5, cost)
        tokens = budget.chunk(Candidate(0, 4000, adapter_weights=own * size), 0, 16)
        step = StepWork.of_streams(8, 800, streams).plus_chunk(0, tokens, own * size)
        assert cost.seconds(step) <= SLACK_SHARE * 0.25 < cost.seconds(step.plus_chunk(0, 16, own * size))
        found.append(tokens)
    assert found[0] > found[1] > found[2] > found[3], "eight rows take 0.05 s more, each of a chunk's 2 ms"


def test_less_urgent_prompt_goes_on_by_a_part_of_a_page_where_no_page_fits() -> None:
    """Beside four streams a page of a slow machine takes longer than the streams' slack."""
    cost = StepCost(base=17e-3, per_prefill_token=2.5e-3, per_attended=0.0, per_decode=1.6e-3, per_context=0.0)
    budget = adaptive_chunk_budget(2048, 16, StepWork.of([], [100] * 4), 0.05, 0.5, cost, floor_priority=0)
    whole, split = (Candidate(0, 100, 2, may_split_page=which) for which in (False, True))
    assert budget.chunk(whole, 0, 16) == 0
    tokens = budget.chunk(split, 0, 16)
    assert 4 <= tokens < 16
    assert cost.seconds(StepWork.of([(0, tokens)], [100] * 4)) <= SLACK_SHARE * 0.05
    budget.take(split, tokens)
    assert budget.chunk(split, 0, 16) == 0, "one such chunk in a step"
    assert budget.chunk(Candidate(0, 100, 0, may_split_page=True), 0, 16) in (0, 16), "the floor is for urgent prompts"


def test_chunk_whose_tokens_are_scored_keeps_the_step_within_the_slack_too() -> None:
    """Its seconds are 1.5 times those of others, also for the chunks after it in the same step."""
    allowed, fixed = SLACK_SHARE * 0.1, COST.decode_step_seconds(8, 800)
    budget = adaptive_chunk_budget(2048, 32, StepWork.of([], [100] * 8), 0.1, 0.5, COST)
    plain, scored = (
        budget.chunk(Candidate(0, 10_000, 0, False), 0, 1),
        budget.chunk(Candidate(0, 10_000, 0, False, 1.5), 0, 1),
    )
    assert 32 < scored < plain
    assert fixed + 1.5 * COST.chunk_seconds(0, scored) <= allowed < fixed + 1.5 * COST.chunk_seconds(0, scored + 1)
    budget.take(Candidate(0, 10_000, factor=1.5), scored - 40)
    after = budget.chunk(Candidate(0, 10_000, 0, False), 0, 1)
    assert fixed + 1.5 * COST.chunk_seconds(0, scored - 40) + COST.chunk_seconds(0, after) <= allowed + 1e-9


def test_chunk_shrinks_with_the_depth_of_its_context() -> None:
    sizes = [
        adaptive_chunk_budget(2048, 32, StepWork.of([], [100] * 8), 0.1, 0.5, COST).chunk(
            Candidate(start, 10**7, 0, False), 0, 16
        )
        for start in (0, 4096, 16_384, 65_536, 10**6)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[3]
    assert sizes[-1] == 32


LAUNCHED = StepCost(
    base=6e-3, per_prefill_token=3e-5, per_attended=6e-10, per_decode=4e-5, per_context=5e-8, least_with_chunk=20e-3
)
FLAT = StepCost(base=21e-3, per_prefill_token=1e-4, per_decode=2e-4, breakpoint_rows=64, per_early_row=-1e-4)


@given(st.sampled_from([LAUNCHED, FLAT]), st.lists(st.integers(1, 2000), min_size=1, max_size=20), st.floats(-1, 0.015))
def test_smallest_chunk_is_as_large_as_costs_nothing(cost: StepCost, contexts: list[int], slack: float) -> None:
    """Streams are late, and the step has a chunk all the same: one of 16 tokens would take as long."""
    budget = adaptive_chunk_budget(2048, 16, StepWork.of([], contexts), slack, 0.5, cost)
    tokens = budget.chunk(Candidate(0, 10_000), 0, 16)
    least = cost.seconds(StepWork.of([(0, 16)], contexts))
    assert tokens >= 32
    assert cost.seconds(StepWork.of([(0, tokens)], contexts)) <= (1 + FREE_SHARE) * least
    assert cost.seconds(StepWork.of([(0, tokens + 16)], contexts)) > least
    assert budget.chunk(Candidate(0, 10), 0, 16) == 10


def test_chunk_beside_others_counts_the_rows_they_fill() -> None:
    """The first chunk takes the rows before the breakpoint; the second pays for all of its own."""
    budget = ChunkBudget(2048, 23e-3, cost=FLAT)
    assert budget.chunk(Candidate(0, 10_000), 0, 1) in (83, 84)
    budget.take(Candidate(0, 64), 64)
    assert budget.chunk(Candidate(0, 10_000), 0, 1) in (19, 20)
    budget.take(Candidate(0, 10_000), 19)
    assert budget.chunk(Candidate(0, 10_000), 0, 16) == 0


def test_chunk_that_cannot_be_launched_in_time_waits() -> None:
    """Without a floor: on a GPU a step of 10 tokens takes as long as one of 400."""
    budget = ChunkBudget(2048, 19e-3, cost=LAUNCHED)
    assert budget.chunk(Candidate(0, 10_000), 0, 16) == 0
    assert ChunkBudget(2048, 21e-3, cost=LAUNCHED).chunk(Candidate(0, 10_000), 0, 16) > 400


@given(st.sampled_from([COST, LAUNCHED, FLAT]), st.integers(0, 100_000), st.floats(0.05, 5))
def test_step_without_streams_is_the_shortest_whose_fixed_part_is_a_tenth(
    cost: StepCost, start: int, longest: float
) -> None:
    step = idle_step(cost, start, longest)
    assert step <= longest
    if step < longest:
        tokens = int(cost.tokens_within(step, start))
        assert cost.fixed_seconds(start) <= FREE_SHARE * step * (1 + 1e-9)
        assert tokens >= int(cost.breakpoint_rows), "below the breakpoint, more tokens cost less than their price"
        at_breakpoint = step <= cost.breakpoint_seconds(start)
        assert at_breakpoint or cost.fixed_seconds(start) == pytest.approx(FREE_SHARE * step)
        assert idle_step(cost, start, longest, 1e9) == longest, "a long queue takes all that the promises allow"


def test_budget_names_what_bounds_it() -> None:
    assert (
        "slack of 80 ms, 2 decodes" in adaptive_chunk_budget(512, 32, StepWork.of([], [9, 9]), 0.08, 0.5, COST).reason
    )
    assert "idle" in adaptive_chunk_budget(512, 32, StepWork.of([], []), inf, 0.5, COST).reason


def test_budget_says_when_a_chunk_took_the_floor() -> None:
    prompt = Candidate(0, 10_000)
    late = adaptive_chunk_budget(512, 32, StepWork.of([], [9, 9]), 0.01, 0.5, COST)
    late.take(prompt, late.chunk(prompt, 0, 16))
    assert late.reason == "floor of 32 tokens, slack of 10 ms, 2 decodes"
    in_time = adaptive_chunk_budget(512, 32, StepWork.of([], [9, 9]), 0.08, 0.5, COST)
    in_time.take(prompt, in_time.chunk(prompt, 0, 16))
    assert in_time.reason == "slack of 80 ms, 2 decodes"


def test_chunk_shrinks_with_the_overrun_of_steps() -> None:
    """A step that overruns by half is in time all the same; steps that are never in time do not stop prompts."""
    for overrun in (1.0, 1.2, 1.5, 2.0):
        budget = adaptive_chunk_budget(2048, 32, StepWork.of([], [100] * 4), 0.1, 0.5, COST, overrun=overrun)
        tokens = budget.chunk(Candidate(0, 10**5, 0, False), 0, 16)
        step = COST.seconds(StepWork.of([(0, tokens)], [100] * 4))
        assert step * overrun <= SLACK_SHARE * 0.1
        assert COST.seconds(StepWork.of([(0, tokens + 16)], [100] * 4)) * overrun > SLACK_SHARE * 0.1
    unpredictable = adaptive_chunk_budget(2048, 32, StepWork.of([], [100] * 4), 0.1, 0.5, COST, overrun=90)
    assert unpredictable.chunk(Candidate(0, 10**5, 0, False), 0, 16) == tokens


@given(st.integers(16, 4096), st.floats(0, 1, exclude_max=True), st.integers(0, 5000), st.floats(0.01, 2))
def test_short_lane_reserves_no_more_than_short_prompts_need(
    tokens: int, share: float, wanted: int, seconds: float
) -> None:
    budget = ChunkBudget(tokens, seconds, 16, cost=COST)
    budget.reserve_lane(share, wanted)
    assert 0 <= budget.lane_tokens <= share * tokens
    assert 0 <= budget.lane_seconds <= share * seconds
    for_long = budget.chunk(Candidate(0, 10**6, 0, True), 0, 16)
    for_short = budget.chunk(Candidate(0, 10**6, 0, False), 0, 16)
    assert for_long <= for_short
    if not wanted:
        assert for_long == for_short


def test_floor_of_a_long_prompt_does_not_take_the_time_of_short_ones() -> None:
    """At 100,000 tokens of context a page costs 88 ms, more than the slack: it waits while a short prompt is there."""
    budget = adaptive_chunk_budget(2048, 32, StepWork.of([], [100] * 4), 0.08, 0.5, COST)
    assert budget.chunk(Candidate(100_000, 120_000, 0, True), 0, 16) == 32
    budget.reserve_lane(0.5, 50)
    assert budget.chunk(Candidate(100_000, 120_000, 0, True), 0, 16) == 0
    assert budget.chunk(Candidate(0, 50, 0, False), 0, 16) == 50
    budget.take(Candidate(0, 50), 50)
    budget.lane_tokens = 0
    assert budget.chunk(Candidate(100_000, 120_000, 0, True), 0, 16) == 0, (
        "the floor belongs to the step, and is used up"
    )


def test_floor_is_for_prompts_as_urgent_as_the_streams() -> None:
    budget = adaptive_chunk_budget(2048, 32, StepWork.of([], [100] * 4), 0.02, 0.5, COST, floor_priority=1)
    assert budget.chunk(Candidate(100_000, 120_000, 0, False), 0, 16) == 32
    assert budget.chunk(Candidate(100_000, 120_000, 1, False), 0, 16) == 32
    assert budget.chunk(Candidate(100_000, 120_000, 2, False), 0, 16) == 0, "batch waits: no other class is late for it"


def test_floor_beside_streams_whose_promise_can_be_kept_is_the_given_one() -> None:
    streams = StepWork(decodes=8, context=800)
    alone = COST.seconds(streams)
    assert floor_beside(COST, streams, (1.01 * alone, 9.0), 1.0, 16) == 16
    assert floor_beside(COST, streams, (), 1.0, 16) == 16
    assert floor_beside(COST, streams, (0.5 * alone,), 1.0, 0) == 0


def test_floor_beside_streams_whose_promise_is_beyond_the_machine_takes_as_long_as_they_do() -> None:
    streams = StepWork(decodes=8, context=800)
    alone = COST.seconds(streams)
    floor = floor_beside(COST, streams, (alone,), 1.0, 16)
    assert KNEE * alone * 0.95 < COST.seconds(streams.plus_chunk(0, floor)) <= KNEE * alone


def test_floor_beside_unlike_promises_breaks_none_that_can_be_kept() -> None:
    streams = StepWork(decodes=8, context=800)
    alone = COST.seconds(streams)
    floor = floor_beside(COST, streams, (0.5 * alone, 1.5 * alone), 1.1, 1)
    step = COST.seconds(streams.plus_chunk(0, floor))
    assert alone < step <= SLACK_SHARE * 1.5 * alone / 1.1


@given(
    num_decodes=st.integers(0, 300),
    start=st.integers(0, 500).map(lambda page: page * 16),
    length=st.integers(1, 20_000),
    budget=st.integers(16, 8192),
)
def test_large_chunk_ends_where_the_rows_of_a_step_fill_the_tiles_of_products(
    num_decodes: int, start: int, length: int, budget: int
) -> None:
    """2,048 tokens beside 64 streams take the time of 17 tiles of 128 rows, and 1,984 that of 16."""
    plain = ChunkBudget(budget).chunk(Candidate(start, start + length), 0, 16)
    tiled = ChunkBudget(budget, row_tile=128, work=StepWork(decodes=num_decodes))
    found = tiled.chunk(Candidate(start, start + length), 0, 16)
    if plain < LARGE_CHUNK or plain == length:
        assert found == plain
        return
    assert plain - 128 - 16 < found <= plain
    assert (start + found) % 16 == 0
    assert -(num_decodes + found) % 128 < 16, "the last tile is full but for a part of a page"
    tiled.take(Candidate(start, start + length), found)
    assert tiled.work.rows == num_decodes + found


def test_chunk_beside_64_streams_leaves_no_tile_half_empty() -> None:
    work = StepWork(decodes=64)
    assert ChunkBudget(2048, row_tile=128, work=work).chunk(Candidate(0, 30_000), 0, 16) == 1984
    assert ChunkBudget(2048, work=work).chunk(Candidate(0, 30_000), 0, 16) == 2048, "on CPUs"
