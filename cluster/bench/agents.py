"""The load of coding agents: sessions whose every turn repeats all turns and answers before it.

A turn follows the end of the answer before it, after a pause in which a tool runs or a person reads. Sessions of one
kind share a system prompt. Some turns start a branch: a second session with the same history that goes its own way.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from crossdock.cluster.bench.workloads import FollowUp, Job, Segment

DEFAULT_AGENTS = 8
_SESSIONS_PER_AGENT = 16  # with a duration or a number of requests
_START_WITHIN_S = 30.0  # in which all agents start: together, they would all wait for their system prompts


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session. The pause is before it, from the end of the answer before."""

    new_tokens: int  # a person's text or a tool's result
    output_tokens: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Branch:
    """Turns that continue a session after its turn number `after` (from 0) beside the session's own next turns."""

    after: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """One task of an agent."""

    name: str
    system_prompt: str  # sessions with the same one share its tokens
    system_tokens: int
    turns: tuple[Turn, ...]
    branches: tuple[Branch, ...] = ()


@dataclass(frozen=True, slots=True)
class Agents:
    """The distributions of sessions. Lengths in tokens, times in seconds; all are log-normal, given by their median.

    The defaults resemble published agent traffic: 43 turns, 142k tokens in and 444 out at the median, and more than
    96 % of input from prefix caches. Here the medians are 43 turns, 134k and 440 tokens, and a cache without bounds
    would have 97.8 % of the input. A person begins a tenth of the turns, as in TraceLab (arXiv 2606.30560).
    Pauses and branches are assumptions.
    """

    turns: float = 43.0
    turns_spread: float = 1.15  # the standard deviation of the logarithm, here and below
    system_prompts: int = 3
    system_tokens: int = 25_000
    new_tokens: float = 1000.0
    new_spread: float = 1.6
    output_tokens: float = 444.0
    output_spread: float = 0.8
    tool_s: float = 3.0
    tool_spread: float = 1.4
    person_share: float = 0.1  # of turns: they follow a person, not a tool
    person_s: float = 60.0
    person_spread: float = 1.2
    branch_share: float = 0.03  # of turns that start a branch
    branch_turns: float = 6.0
    context: int = 320_000  # a session ends before its prompt and answer would be longer
    scale: float = 1.0  # of all lengths
    speed: float = 1.0  # 2 halves all pauses

    def __post_init__(self) -> None:
        for name in ("turns", "scale", "speed"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be above 0, got {getattr(self, name)}")

    def within(self, context: int) -> "Agents":
        """Scale all lengths of the agents down until their longest requests fit `context` tokens."""
        return replace(self, scale=min(self.scale, context / self.context))


def agent_jobs(
    agents: Agents, seed: int, concurrency: int, per_agent: int | None = None, tier: str | None = None
) -> list[Job]:
    """Return the first job of each of `concurrency` agents; the others follow it.

    An agent's next session begins when its last one has ended. `per_agent`: how many sessions each has.
    """
    sessions = draw_sessions(agents, seed)
    rng = random.Random(f"agents/starts/{seed}")
    roots = []
    for _ in range(concurrency):
        first: Job | None = None
        for session in reversed(list(islice(sessions, per_agent or _SESSIONS_PER_AGENT))):
            pause = _seconds(rng, agents.person_s, agents.person_spread, agents)
            then = (FollowUp(pause, first),) if first is not None else ()
            first = session_job(session, tier, then)
        assert first is not None
        roots.append(replace(first, due=rng.uniform(0, _START_WITHIN_S / agents.speed)))
    return sorted(roots, key=lambda job: job.due or 0.0)


def draw_sessions(agents: Agents, seed: int) -> Iterator[Session]:
    """Yield sessions without end."""
    rng = random.Random(f"agents/{seed}")
    number = 0
    while True:
        kind = rng.randrange(agents.system_prompts)
        system = max(1, round(agents.system_tokens * agents.scale))
        most = agents.context * agents.scale
        turns, context = _draw_turns(rng, agents, system, most, _count(rng, agents.turns, agents.turns_spread))
        branches = []
        for after, reached in enumerate(context[:-1]):
            if rng.random() < agents.branch_share:
                own, _ = _draw_turns(rng, agents, reached, most, _count(rng, agents.branch_turns, agents.turns_spread))
                if own:
                    branches.append(Branch(after, own))
        if turns:
            yield Session(f"agent/{number}", f"system/{kind}", system, turns, tuple(branches))
        number += 1


def session_job(session: Session, tier: str | None = None, then: tuple[FollowUp, ...] = ()) -> Job:
    """Return the first job of a session; `then` follows its last one."""
    system = Segment(session.system_prompt, session.system_tokens)
    first, _ = _chain(session.name, (system,), session.turns, session.branches, tier, then)
    return replace(first, due=0.0)


def _chain(
    name: str,
    history: tuple[Segment, ...],
    turns: Sequence[Turn],
    branches: Sequence[Branch],
    tier: str | None,
    then: tuple[FollowUp, ...],
) -> tuple[Job, float]:
    """Return the first job of the turns after `history`, and the pause before it."""
    prompts = []
    histories = []
    for number, turn in enumerate(turns):
        prompts.append((*history, Segment(f"{name}/new/{number}", turn.new_tokens)))
        history = (*prompts[-1], Segment(f"{name}/answer/{number}", turn.output_tokens, is_answer=True))
        histories.append(history)
    following = then
    for number in reversed(range(len(turns))):
        for branch in branches:
            if branch.after == number:
                at = f"{name}/branch/{number}"
                job, pause = _chain(at, histories[number], branch.turns, (), tier, ())
                following = (*following, FollowUp(pause, job))
        answer = histories[number][-1].key
        turn = turns[number]
        job = Job(prompts[number], turn.output_tokens, service_tier=tier, answer=answer, follow_ups=following)
        following = (FollowUp(turn.pause_s, job),)
    return job, turns[0].pause_s


def _draw_turns(
    rng: random.Random, agents: Agents, context: int, most: float, count: int
) -> tuple[tuple[Turn, ...], list[int]]:
    """Return at most `count` turns that fit `most` tokens after `context` tokens, and the context after each."""
    turns: list[Turn] = []
    contexts: list[int] = []
    for _ in range(count):
        new = _length(rng, agents.new_tokens, agents.new_spread, agents)
        output = _length(rng, agents.output_tokens, agents.output_spread, agents)
        is_person = rng.random() < agents.person_share
        median, spread = (agents.person_s, agents.person_spread) if is_person else (agents.tool_s, agents.tool_spread)
        pause = _seconds(rng, median, spread, agents)
        if context + new + output > most:
            break
        context += new + output
        turns.append(Turn(new, output, pause))
        contexts.append(context)
    return tuple(turns), contexts


def _count(rng: random.Random, median: float, spread: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), spread)))


def _length(rng: random.Random, median: float, spread: float, agents: Agents) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), spread) * agents.scale))


def _seconds(rng: random.Random, median: float, spread: float, agents: Agents) -> float:
    return rng.lognormvariate(math.log(median), spread) / agents.speed
