"""Where a snapshot of recurrent state is worth its pages: a policy in seconds. Pure functions.

A snapshot saves a later request the tokens since the snapshot before, if such a request comes. It costs pages,
which cached prefixes lose: these are computed again if a request needs them. Where a chunk must end early for a
snapshot, that costs a step as well. So the more bytes a state has, the further apart its snapshots are.
"""

from crossdock.workers.schedule.cost.cost import NO_WORK, StepCost

FOLLOW_UP_CHANCE = 0.5
"""Chance that a request continues what this one has computed so far: the next turn of a conversation.

Between the load of agents, where 98 % of the turns have a next one (`Agents`, cluster/bench/agents.py), and prompts
that no request continues. Where none does, the price is one short step for each prompt.
"""

SHARED_CHANCE = 0.9
"""Chance that a further request begins with a prefix that two requests have had: as good as certain."""

PASSING_CHANCE = 0.03
"""Chance that a request leaves a prompt in its middle, where no other request has left it.

The share of turns from which agents branch (`branch_share`, cluster/bench/agents.py). A prompt that is preempted there
needs no snapshot: its own state becomes one.
"""

EVICTED_CHANCE = 0.1
"""Chance that a request needs the cached pages that a snapshot evicts, at least: the least recently used ones.

What these are worth is learnt while pages are evicted (`CachedPages.price`). Until then, this bounds how many
snapshots there are of one prompt: one for each fifth of the tokens that have as many pages, with `FOLLOW_UP_CHANCE`.
"""

_TOKENS = StepCost.of((0.0, 1.0))  # where no cost is known, every token takes as long


def is_worth_its_pages(
    last: int,
    position: int,
    chance: float,
    state_tokens: int,
    cost: StepCost | None,
    evicted_seconds: float = 0.0,
    step_seconds: float = 0.0,
) -> bool:
    """Return whether a snapshot at `position` saves more seconds than it costs.

    Args:
        last: position of the snapshot before it, 0 if there is none.
        position: tokens before the snapshot.
        chance: that a later request continues from there.
        state_tokens: number of tokens whose pages are as many as a state's.
        cost: what steps take; None: each token takes as long.
        evicted_seconds: of prefill that the eviction of so many pages costs, as learnt.
        step_seconds: of the step that the snapshot costs, if a chunk must end for it.
    """
    cost = cost or _TOKENS
    saved = chance * cost.chunk_seconds(last, position - last)
    return saved > max(EVICTED_CHANCE * cost.chunk_seconds(0, state_tokens), evicted_seconds) + step_seconds


def further_step_seconds(start: int, end: int, cost: StepCost | None) -> float:
    """Return by how much the tokens `[start, end)` take longer in a step of their own than at the end of another."""
    cost = cost or _TOKENS
    return max(cost.seconds(NO_WORK.plus_chunk(start, end - start)) - cost.chunk_seconds(start, end - start), 0.0)
