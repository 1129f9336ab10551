"""Chunks on pipeline stages: alike, and of the seconds at which fixed parts and waiting stages cost least."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.policies.chunking import balanced_seconds
from crossdock.workers.schedule.request.batch import Batch, SampledToken
from tests.workers.schedule.model_free_replica import new_request, new_scheduler

COST = StepCost(base=6e-3, per_prefill_token=5e-4, per_attended=0, per_decode=8e-4, per_context=0)
EXPERTS = replace(COST, breakpoint_rows=64.0, per_early_row=5e-3)  # which the first rows have read
PROMPT = 3000
STREAMS = 8


@given(st.floats(1e-4, 0.1), st.floats(1e-2, 10), st.integers(2, 8), st.floats(0.1, 10))
def test_balanced_seconds_lose_no_more_than_any_others(fixed: float, work: float, depth: int, other: float) -> None:
    def lost(seconds: float) -> float:
        return fixed * work / seconds + (depth - 1) * seconds

    best = balanced_seconds(fixed, work, depth)
    assert lost(best) <= lost(other * best) * (1 + 1e-9)


@pytest.mark.parametrize("tpot_s", [0.1, 10.0])
def test_chunks_of_a_pipeline_are_alike_whichever_streams_have_a_token_in_flight(tpot_s: float) -> None:
    """The token in flight of other streams is due soon, but the step that makes this token has begun."""
    sizes = chunks_beside_streams(COST, tpot_s, 2)
    assert len(sizes) > 5
    assert all(max(pair) <= 1.5 * min(pair) for pair in pairwise(sizes[1:-1])), sizes


@pytest.mark.parametrize("depth", [2, 4, 8])
@pytest.mark.parametrize("cost", [COST, EXPERTS])
def test_chunks_of_a_pipeline_take_hardly_longer_than_the_best_ones_also_where_first_rows_read_experts(
    cost: StepCost, depth: int
) -> None:
    """Stages wait for the steps of the prompt, and before and behind these while short steps meet long ones."""
    decodes = STREAMS / depth
    alone = cost.seconds(StepWork(decodes=decodes))

    def lost(size: int) -> float:
        step = cost.seconds(StepWork(decodes=decodes).plus_chunk(0, size))
        return PROMPT / size * step + (depth - 1) * (step - alone)

    size = chunks_beside_streams(cost, 10.0, depth)[1]
    assert lost(size) <= 1.1 * min(map(lost, range(16, PROMPT, 16)))


def chunks_beside_streams(cost: StepCost, tpot_s: float, depth: int) -> list[int]:
    """Return the tokens of the chunks in which a pipeline of `depth` stages computes a prompt beside streams."""
    classes = [{"name": "standard", "ttft_s": 1e6, "tpot_s": tpot_s}]
    settings = {"slo_classes": classes, "max_num_batched_tokens": 2048, "max_num_seqs": 16, "chunk_policy": "adaptive"}
    scheduler = new_scheduler(2000, 4000, cost=cost, depth=depth, interval_share=1 / depth, **settings)
    for number in range(STREAMS):
        scheduler.add(new_request(f"{number}", [number] * 4, 200))
    now = 0.0
    flights = list[tuple[Batch, float]]()
    sizes = list[int]()
    for step in range(12 * depth):
        if step == 2 * depth:
            scheduler.add(new_request("long", [99] * PROMPT, 1))
        if len(flights) == depth:
            batch, ends = flights.pop(0)
            now = ends
            scheduler.update(batch, {part.request.id: SampledToken(5) for part in batch.scheduled if part.samples}, now)
        batch = scheduler.schedule(now)
        flights.append((batch, now + cost.seconds(batch.work)))
        sizes += [part.num_tokens for part in batch.scheduled if part.request.id == "long"]
    return sizes
