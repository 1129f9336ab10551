"""Chunks on pipeline stages: alike, and of the seconds at which fixed parts and waiting stages cost least."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.policies.chunking import balanced_seconds
from crossdock.workers.schedule.request.batch import Batch, SampledToken
from tests.workers.schedule.model_free_replica import new_request, new_scheduler

COST = StepCost(base=6e-3, per_prefill_token=5e-4, per_attended=0, per_decode=8e-4, per_context=0)


@given(st.floats(1e-4, 0.1), st.floats(1e-2, 10), st.integers(2, 8), st.floats(0.1, 10))
def test_balanced_seconds_lose_no_more_than_any_others(fixed: float, work: float, depth: int, other: float) -> None:
    def lost(seconds: float) -> float:
        return fixed * work / seconds + (depth - 1) * seconds

    best = balanced_seconds(fixed, work, depth)
    assert lost(best) <= lost(other * best) * (1 + 1e-9)


@pytest.mark.parametrize("tpot_s", [0.1, 10.0])
def test_chunks_of_a_pipeline_are_alike_whichever_streams_have_a_token_in_flight(tpot_s: float) -> None:
    """The token in flight of other streams is due soon, but the step that makes this token has begun."""
    classes = [{"name": "standard", "ttft_s": 1e6, "tpot_s": tpot_s}]
    settings = {"slo_classes": classes, "max_num_batched_tokens": 2048, "max_num_seqs": 16, "chunk_policy": "adaptive"}
    scheduler = new_scheduler(2000, 4000, cost=COST, depth=2, interval_share=0.5, **settings)
    for number in range(8):
        scheduler.add(new_request(f"{number}", [number] * 4, 100))
    now = 0.0
    flights = list[tuple[Batch, float]]()
    sizes = list[int]()
    for step in range(24):
        if step == 4:
            scheduler.add(new_request("long", [99] * 3000, 1))
        if len(flights) == 2:
            batch, ends = flights.pop(0)
            now = ends
            scheduler.update(batch, {part.request.id: SampledToken(5) for part in batch.scheduled if part.samples}, now)
        batch = scheduler.schedule(now)
        flights.append((batch, now + COST.seconds(batch.work)))
        sizes += [part.num_tokens for part in batch.scheduled if part.request.id == "long"]
    assert len(sizes) > 5
    assert all(max(pair) <= 1.5 * min(pair) for pair in pairwise(sizes[1:-1])), sizes
