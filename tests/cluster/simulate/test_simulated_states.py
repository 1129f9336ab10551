"""Simulated replicas of recurrent models: the real scheduler and pool, with states, snapshots and transfers."""

from typing import Any

import pytest

from crossdock.cluster.bench.workloads import Job, Segment
from crossdock.workers.schedule.cost.cost import StepCost
from tests.cluster.simulate.small_fleets import fleet, job, play, play_out, profile, times


def test_third_request_with_a_system_prompt_begins_from_the_snapshot_of_the_second() -> None:
    jobs = [
        Job((Segment("system", 512), Segment(str(number), 64)), 2, 4.0 * number, service_tier="standard")
        for number in range(3)
    ]
    outcome = play_out(fleet({"profile": profile(state_pages=20)}), jobs)
    first, second, third = (
        sample[0] - each.due for sample, each in zip(times(outcome), jobs, strict=True) if each.due is not None
    )
    assert third < 64 / 1024 + 3 / 64 < 0.5 < first <= second
    (replica,) = outcome.replicas
    assert replica.scheduler.pages.counts().cached > 4 * 20, "a state is as many pages as 320 tokens"


def test_states_travel_between_pools_and_return_with_a_lost_sender() -> None:
    shipping = {"profile": profile(state_pages=20)}
    pools = ({"name": "p", "role": "prefill"} | shipping, {"name": "d", "role": "decode"} | shipping)
    jobs = [job(str(number), 300, 20, 0.25 * number) for number in range(12)]
    play_out(fleet(*pools), jobs)
    failing = fleet(*pools, failures=[{"kill": "p/0", "at": 1.0}, {"add": "p", "at": 1.5}])
    play_out(failing, jobs)


@pytest.mark.parametrize(("probability", "least"), [(0.5, 1.3), (1.0, 4.5)])
def test_drafts_gain_less_than_without_states_and_more_than_none(probability: float, least: float) -> None:
    """A row takes a hundredth of a step. A rejected draft has tokens before it computed again."""
    cost = StepCost(base=1 / 64, per_prefill_token=1 / 6400, per_decode=1 / 6400)
    drafting = {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 5},
        "draft_acceptance": probability,
    }

    def seconds(state_pages: int, pool: dict[str, Any]) -> float:
        described = fleet({"profile": profile(cost=cost, state_pages=state_pages)} | pool)
        [found] = times(play(described, [job("a", 16, 400)]))
        return found[-1]

    gain = seconds(4, {}) / seconds(4, drafting)
    assert least < gain <= seconds(0, {}) / seconds(0, drafting)
