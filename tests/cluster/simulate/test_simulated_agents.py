"""Sessions of agents in simulated time: follow-ups wait for answers, and find them in the prefix cache."""

from operator import itemgetter

import pytest

from crossdock.cluster.bench.agents import Agents, Branch, Session, Turn, agent_jobs, session_job
from crossdock.cluster.bench.metrics import hit_rate
from crossdock.cluster.simulate.simulation import Simulation
from tests.cluster.simulate.small_fleets import Reported, fleet, play, profile, times

SMALL = Agents(scale=0.004, turns=10.0, tool_s=0.5, person_s=4.0)


def test_follow_up_is_sent_a_pause_after_the_answer_and_finds_it_cached() -> None:
    """64 + 32 tokens and an answer of 16, the last of which is not computed: 6 of 7 pages are full."""
    outcome = play(fleet(), [session_job(Session("s", "system", 64, (Turn(32, 16, 0.0), Turn(16, 1, 2.5))))])
    first, second = outcome.samples
    assert second.sent == first.ended + 2.5
    assert second.prompt_tokens == 128
    assert (first.cached_tokens, second.cached_tokens) == (0, 96)
    assert second.ttft == 1 / 64 + 32 / 1024


def test_branch_is_sent_beside_the_next_turn() -> None:
    """The next turn has completed the answer's last page, which the branch finds."""
    session = Session("s", "a", 64, (Turn(32, 16, 0.0), Turn(16, 4, 1.0)), (Branch(0, (Turn(32, 4, 2.0),)),))
    outcome = play(fleet(), [session_job(session)])
    assert [sample.sent - outcome.samples[0].ended for sample in outcome.samples[1:]] == [1.0, 2.0]
    assert [sample.cached_tokens for sample in outcome.samples] == [0, 96, 112]


def test_no_follow_up_begins_after_the_end() -> None:
    roots = agent_jobs(SMALL, 0, concurrency=3)
    outcome = Simulation(fleet()).run(roots, until=40.0)
    assert 35 < max(sample.sent for sample in outcome.samples) < 40
    assert all(sample.ok for sample in outcome.samples)


@pytest.mark.parametrize(("replicas", "runs_ahead"), [(1, False), (2, False), (2, True)])
def test_agents_with_steps_taken_one_by_one_have_the_same_times_and_reports(replicas: int, runs_ahead: bool) -> None:
    roots = agent_jobs(SMALL, 1, concurrency=4, per_agent=1)
    small = profile(num_pages=128, runs_ahead=runs_ahead)
    simulated = fleet({"replicas": replicas, "profile": small})
    together, single = (Reported(simulated, at_once=at_once) for at_once in (True, False))
    outcomes = [simulation.run(roots) for simulation in (together, single)]
    assert times(outcomes[0]) == times(outcomes[1])
    assert hit_rate(outcomes[0].samples) == hit_rate(outcomes[1].samples) > 0.5  # type: ignore[operator]
    assert sorted(together.reports, key=itemgetter(0, 1)) == sorted(single.reports, key=itemgetter(0, 1))
