"""Sessions of agents: what their turns share, and a run against a scripted server."""

from collections.abc import Iterator
from itertools import islice
from statistics import median

from crossdock.cluster.bench.agents import (
    Agents,
    Branch,
    Session,
    Turn,
    agent_jobs,
    draw_sessions,
    session_job,
)
from crossdock.cluster.bench.workloads import Job
from tests.cluster.bench.scripted import ANSWER_ID, Scripted, measure

SMALL = Agents(scale=0.01, speed=1000.0, turns=4.0, output_tokens=2000.0, output_spread=0.3)


def tree(job: Job) -> Iterator[Job]:
    """Yield a job and all that follow it."""
    left = [job]
    while left:
        each = left.pop()
        yield each
        left += [follow_up.job for follow_up in each.follow_ups]


def test_turn_repeats_the_whole_turn_before_and_its_answer() -> None:
    turns = (Turn(10, 5, 0.0), Turn(20, 6, 1.0), Turn(30, 7, 2.0))
    first = session_job(Session("s", "system", 100, turns))
    (second,), (third,) = first.follow_ups, first.follow_ups[0].job.follow_ups
    assert [part.tokens for part in third.job.prompt] == [100, 10, 5, 20, 6, 30]
    assert third.job.prompt[: len(second.job.prompt)] == second.job.prompt
    assert second.job.prompt[-2].key == first.answer
    assert [part.is_answer for part in second.job.prompt] == [False, False, True, False]
    assert (second.pause_s, third.pause_s, third.job.follow_ups) == (1.0, 2.0, ())


def test_branch_shares_the_history_of_its_turn_and_nothing_after() -> None:
    turns = (Turn(10, 5, 0.0), Turn(20, 6, 1.0))
    first = session_job(Session("s", "system", 100, turns, (Branch(0, (Turn(7, 3, 4.0),)),)))
    main, branch = (follow_up.job for follow_up in first.follow_ups)
    assert main.prompt[:3] == branch.prompt[:3]
    assert main.prompt[3].key != branch.prompt[3].key
    assert main.answer != branch.answer


def test_same_seed_gives_the_same_sessions_and_another_seed_others() -> None:
    sessions = [list(islice(draw_sessions(SMALL, seed), 5)) for seed in (1, 1, 2)]
    assert sessions[0] == sessions[1] != sessions[2]


def test_requests_of_the_default_have_the_published_medians() -> None:
    jobs = [job for session in islice(draw_sessions(Agents(), 0), 300) for job in tree(session_job(session))]
    assert 120_000 <= median(job.prompt_tokens for job in jobs) <= 180_000
    assert 400 <= median(job.output_tokens for job in jobs) <= 490
    new = sum(job.prompt[-1].tokens for job in jobs)
    assert 0.96 <= 1 - new / sum(job.prompt_tokens for job in jobs) <= 0.995
    assert max(job.prompt_tokens + job.output_tokens for job in jobs) <= Agents().context


def test_agents_within_a_context_fit_it() -> None:
    agents = Agents().within(2048)
    roots = agent_jobs(agents, seed=3, concurrency=20)
    jobs = [job for root in roots for job in tree(root)]
    assert max(job.prompt_tokens + job.output_tokens for job in jobs) <= 2048
    assert len({job.prompt[0].key for job in roots}) == 3


def test_session_follows_the_one_before_of_the_same_agent() -> None:
    (root,) = agent_jobs(SMALL, seed=0, concurrency=1, per_agent=3)
    names = {(job.answer or "").rpartition("/answer/")[0].partition("/branch/")[0] for job in tree(root)}
    assert names == {"agent/0", "agent/1", "agent/2"}


def test_answers_of_the_server_are_in_the_next_prompts(scripted: tuple[Scripted, str]) -> None:
    """The scripted server answers `w w …`, which no drawn text contains."""
    script, url = scripted
    result = measure(url, workload="agents", agents=SMALL, concurrency=2)
    assert result.summary["requests_ok"] == len(result.samples) > 2
    outputs = {tuple(body["prompt"]): body["max_tokens"] for body in script.measured}
    for prompt in outputs:
        answered = [(earlier, outputs[earlier]) for earlier in outputs if prompt[: len(earlier)] == earlier != prompt]
        for earlier, output in answered:
            assert prompt[len(earlier) :][:output] == (ANSWER_ID,) * output
    assert sum(ANSWER_ID in prompt for prompt in outputs) == len(outputs) - 2  # all but the first of two agents


def test_chats_repeat_the_answers_as_the_assistants(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    measure(url, workload="agents", agents=SMALL, concurrency=2, chat=True)
    longest = max((body["messages"] for body in script.measured), key=len)
    assert [message["role"] for message in longest[:3]] == ["user", "assistant", "user"]
    assert set(longest[1]["content"].split()) == {"w"}


def test_text_prompts_repeat_the_answers(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.tokenizes = False
    result = measure(url, workload="agents", agents=SMALL, concurrency=2)
    assert sum(" w w" in body["prompt"] for body in script.measured) == len(result.samples) - 2


def test_number_of_requests_ends_sessions(scripted: tuple[Scripted, str]) -> None:
    _, url = scripted
    result = measure(url, workload="agents", agents=SMALL, concurrency=3, num_requests=7)
    assert len(result.samples) == 7


def test_context_of_the_server_scales_the_lengths(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.max_model_len = 400
    agents = Agents(speed=1000.0, turns=2.0, output_tokens=8000.0)
    result = measure(url, workload="agents", agents=agents, concurrency=2, num_requests=6)
    assert any("0.00125 of those of coding agents" in note for note in result.notes)
    assert max(sample.prompt_tokens for sample in result.samples) <= 400
