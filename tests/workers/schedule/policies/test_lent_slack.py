"""Streams that are ahead of their class's mean lend slack to prompts: all of it near a deadline, else up to a knee."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.schedule import step_budget
from crossdock.workers.schedule.cost.cost import NO_ADAPTERS, StepWork
from crossdock.workers.schedule.forecast import Forecast
from crossdock.workers.schedule.policies import pace
from crossdock.workers.schedule.policies.pace import LENT_KNEE, LONGEST_GAP, MOST_LENT, lent_due
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.schedule.model_free_replica import CLASSES, COST, ModelFreeReplica, new_timed_replica


def replica_with_streams(slo_class: str, num_streams: int = 20) -> ModelFreeReplica:
    """Return a replica whose streams leave prompts less than half of the time, and are ahead of their mean."""
    replica = new_timed_replica(max_num_seqs=32)
    for number in range(num_streams):
        replica.add(f"s{number}", 20, slo_class, max_tokens=2000)
    while any(len(replica.token_times.get(f"s{number}", ())) < 100 for number in range(num_streams)):
        replica.step()
    return replica


def serve_prompt(replica: ModelFreeReplica, tokens: int, num_streams: int = 20) -> tuple[float, list[float]]:
    """Return the seconds to the first token of a standard prompt, and the gaps of the streams meanwhile."""
    began = replica.now
    replica.add("prompt", tokens, "standard")
    while "prompt" not in replica.token_times:
        replica.step()
    times = [[at for at in replica.token_times[f"s{number}"] if at >= began] for number in range(num_streams)]
    return replica.now - began, [after - before for each in times for before, after in pairwise(each)]


def test_prompt_near_its_deadline_uses_slack_that_streams_lend(monkeypatch: pytest.MonkeyPatch) -> None:
    tpot, tokens = CLASSES[1].tpot_s, 700
    replica = replica_with_streams("standard")
    first = min(replica.token_times["s0"])
    ttft, gaps = serve_prompt(replica, tokens)
    deadline = CLASSES[1].ttft_deadline(COST.prefill_seconds(0, tokens, 256))
    assert ttft <= deadline
    assert LONGEST_GAP * tpot < max(gaps) <= (LONGEST_GAP + MOST_LENT) * tpot
    made = replica.token_times["s0"]
    assert (made[-1] - first) / (len(made) - 1) <= tpot, "the stream keeps its time per token"
    assert any("is lent" in batch.limit for batch in replica.batches)

    monkeypatch.setattr(pace, "MOST_LENT", 0.0)
    unlent, gaps = serve_prompt(replica_with_streams("standard"), tokens)
    assert unlent > deadline
    assert max(gaps) <= LONGEST_GAP * tpot


def test_streams_that_take_much_of_their_promise_lend_to_a_prompt_that_has_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tpot, tokens = CLASSES[1].tpot_s, 90
    replica = replica_with_streams("standard")
    alone = COST.seconds(replica.batches[-1].work)
    assert LENT_KNEE * alone > (LONGEST_GAP + MOST_LENT) * tpot, "the lead is the bound"
    ttft, gaps = serve_prompt(replica, tokens)
    assert LONGEST_GAP * tpot < max(gaps) <= (LONGEST_GAP + MOST_LENT) * tpot
    made = replica.token_times["s0"]
    assert (made[-1] - made[0]) / (len(made) - 1) <= tpot, "the stream keeps its time per token"

    monkeypatch.setattr(step_budget, "LENT_KNEE", 0.0)
    unlent, gaps = serve_prompt(replica_with_streams("standard"), tokens)
    assert unlent > 1.5 * ttft
    assert max(gaps) <= LONGEST_GAP * tpot


@pytest.mark.parametrize("tokens", [40, 90, 300])
def test_first_token_is_predicted_with_what_streams_lend(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = replica_with_streams("standard")
    monkeypatch.setattr(step_budget, "NEAR_DEADLINE", inf)  # what they lend before a deadline is not predicted
    predicted = replica.add("prompt", tokens, "standard").predicted_ttft
    began = replica.now
    while "prompt" not in replica.token_times:
        replica.step()
    took = replica.token_times["prompt"][0] - began
    assert predicted == pytest.approx(took, rel=0.2)
    monkeypatch.setattr(Forecast, "lead", lambda _: 0.0)
    request = replica_with_streams("standard").add("prompt", tokens, "standard")
    assert request.predicted_ttft is not None
    assert request.predicted_ttft > 1.3 * took


@pytest.mark.parametrize(("num_streams", "lends"), [(5, False), (7, True)])
def test_step_with_lent_slack_ends_at_the_knee(num_streams: int, lends: bool) -> None:
    """Five streams take 4.1 of 20 ms: the knee is within the promise. Seven take 5.4 ms."""
    tpot = CLASSES[1].tpot_s
    replica = replica_with_streams("standard", num_streams)
    before = len(replica.batches)
    _, gaps = serve_prompt(replica, 40, num_streams)
    lent = [batch for batch in replica.batches[before:] if "is lent" in batch.limit]
    assert bool(lent) is lends
    assert (max(gaps) > LONGEST_GAP * tpot) is lends
    for batch in lent:
        alone = StepWork.of_streams(num_streams, batch.work.context, NO_ADAPTERS)
        assert COST.seconds(batch.work) <= LENT_KNEE * COST.seconds(alone)


def test_more_urgent_streams_lend_nothing() -> None:
    """Interactive streams promise 4 ms a token, of which steps of one stream leave little to a standard prompt."""
    replica = new_timed_replica()
    replica.add("s", 20, "interactive", max_tokens=900)
    for _ in range(50):
        replica.step()
    before = len(replica.batches)
    replica.add("prompt", 300, "standard")
    for _ in range(300):
        replica.step()
    gaps = [after - earlier for earlier, after in pairwise(replica.token_times["s"])]
    assert max(gaps) <= CLASSES[0].tpot_s, "a lead is for prompts as urgent as the stream"
    assert not any("is lent" in batch.limit for batch in replica.batches[before:])


@given(st.floats(0, 10), st.floats(0.001, 1), st.integers(1, 500), st.floats(0, 10))
def test_stream_lends_only_what_it_is_ahead_of_its_mean(
    first: float, tpot: float, num_outputs: int, early: float
) -> None:
    """`early`: seconds before its mean at which the next token is due."""
    mean_due = first + num_outputs * tpot
    for due in (mean_due - early, mean_due + early):
        stream = Request(Submission("s", [1], SamplingParams(), output_token_ids=[2] * num_outputs), due=due)
        assert lent_due(stream, tpot) == due, "a stream that has made no token here has no mean yet"
        stream.paced_from = first - tpot
        lent = lent_due(stream, tpot)
        assert due <= lent <= due + MOST_LENT * tpot
        assert lent <= max(due, mean_due) + 1e-9
