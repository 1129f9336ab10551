"""Deadlines of streams, and which streams skip a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.policies.pace import next_due, skip_decodes
from crossdock.workers.schedule.request.batch import SampledToken
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.schedule.model_free_replica import new_request, new_scheduler

COST = StepCost(base=6e-3, per_prefill_token=5e-4, per_attended=5e-8, per_decode=8e-4, per_context=1.5e-7)


def new_stream(name: str, priority: int, due: float, context: int = 100) -> Request:
    return Request(Submission(name, [7] * context, SamplingParams()), priority=priority, due=due)


def test_no_stream_skips_while_there_is_time() -> None:
    streams = [new_stream("a", 0, 0.05), new_stream("b", 2, 2.0)]
    assert skip_decodes(streams, 0.0, COST) == set()


def test_batch_streams_skip_for_an_interactive_one() -> None:
    streams = [new_stream("a", 0, 0.03), *(new_stream(f"b{n}", 2, 2.0 - n / 100) for n in range(60))]
    skipped = skip_decodes(streams, 0.0, COST)
    left = [stream for stream in streams if stream.id not in skipped]
    assert "a" not in skipped
    assert COST.decode_step_seconds(len(left), 100 * len(left)) <= 0.03
    assert "b0" in skipped, "the one that is due last skips first"
    assert "b59" not in skipped, "no more than needed"


def test_stream_near_its_own_deadline_does_not_skip() -> None:
    streams = [new_stream("a", 0, 0.03), *(new_stream(f"b{n}", 2, 0.05) for n in range(60))]
    assert skip_decodes(streams, 0.0, COST) == set()


@pytest.mark.parametrize("depth", [1, 2])
def test_stream_of_a_pipeline_skips_only_for_those_in_its_step(depth: int) -> None:
    """A step of all nine streams takes 13 ms, one of half of them 10 ms."""
    scheduler = new_scheduler(cost=COST, depth=depth, max_num_seqs=16, max_num_batched_tokens=64)
    streams = [
        new_request("a", [1, 2, 3], 20, slo_class="interactive"),
        *(new_request(f"b{number}", [number] * 3, 20, slo_class="batch") for number in range(8)),
    ]
    for stream in streams:
        scheduler.add(stream)
    batch = scheduler.schedule(0.0)
    scheduler.update(batch, {stream.id: SampledToken(5) for stream in streams}, 0.01)
    for stream in streams:
        stream.due = 1.0115 if stream.id == "a" else 2.0
    batch = scheduler.schedule(1.0)
    assert "a" in {part.request.id for part in batch.scheduled}
    assert (batch.num_skipped > 0) is (depth == 1)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-1, 3), st.integers(1, 5000)), max_size=40))
def test_most_urgent_class_never_skips(fields: list[tuple[int, float, int]]) -> None:
    streams = [new_stream(f"{number}", *values) for number, values in enumerate(fields)]
    skipped = skip_decodes(streams, 0.0, COST)
    top = min((stream.priority for stream in streams), default=0)
    assert all(stream.priority > top for stream in streams if stream.id in skipped)
    assert skipped == skip_decodes(list(reversed(streams)), 0.0, COST), "in any order"


def test_lead_of_a_stream_is_bounded_and_its_delay_is_forgiven() -> None:
    assert next_due(0.0, 10.0, 0.1) == pytest.approx(10.1)  # late, or the first token: from now
    assert next_due(10.05, 10.0, 0.1) == pytest.approx(10.125)  # early by half: a quarter is left
    assert next_due(10.01, 10.0, 0.1) == pytest.approx(10.11)
