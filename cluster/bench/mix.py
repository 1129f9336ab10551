"""Chats and long prompts at once, of several SLO classes: an open loop in which the seed decides everything.

A chat arrival is the next turn of a conversation that is ready for one, or the first turn of a new one. The prompt of a
turn is all turns and answers before plus a new text, so a prefix cache has most of it. The answers in it are drawn,
since the real ones are not known when the load is decided.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

from crossdock.cluster.bench.workloads import Job, Segment, arrival_times

Range = tuple[int, int]  # tokens, both ends included, all lengths equally likely


@dataclass(frozen=True, slots=True)
class Mix:
    """The parameters of the arrivals. Shares are expectations."""

    rate: float  # arrivals per second, chats and long prompts together
    long_share: float  # of the arrivals
    burstiness: float = 1.0  # 1 is Poisson; below it arrivals come in bursts
    interactive_share: float = 0.7  # of conversations; the others are `standard`
    batch_share: float = 0.5  # of long prompts; the others are `standard`
    turn_tokens: Range = (24, 192)  # what a user writes
    answer_tokens: Range = (32, 96)
    turns: float = 4.0  # of a conversation, on average
    think_s: float = 8.0  # seconds on average from the arrival of a turn to the earliest arrival of the next
    long_tokens: Range = (4096, 16384)
    long_answer_tokens: Range = (16, 64)

    def __post_init__(self) -> None:
        for name in ("rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be above 0, got {getattr(self, name)}")
        for name in ("long_share", "interactive_share", "batch_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: must be a share between 0 and 1, got {getattr(self, name)}")
        if not 1 <= self.long_tokens[0] <= self.long_tokens[1]:
            raise ValueError(f"long_tokens: must be 1 or more, the smaller first, got {self.long_tokens}")

    def within(self, context: int) -> "Mix":
        """Return the mix with long prompts that fit, with their answers, a context of `context` tokens."""
        most = context - self.long_answer_tokens[1]
        return replace(self, long_tokens=(min(self.long_tokens[0], most), min(self.long_tokens[1], most)))


# Rates are for a replica that prefills about 1,000 tokens per second alone: SmolLM2-135M on two cores.
MIXES = {
    "chat-heavy": Mix(rate=0.8, long_share=0.03),
    "long-heavy": Mix(rate=0.3, long_share=0.2, batch_share=0.75),
    "bursty": Mix(rate=0.6, long_share=0.05, burstiness=0.25),
}


def named_mix(name: str | None, changes: Mapping[str, Any]) -> Mix:
    """Return the preset that users name, by default chat-heavy, with their numbers in place of its own.

    Raises:
        ValueError: there is no such preset, or a number is wrong.
    """
    name = name or "chat-heavy"
    if name not in MIXES:
        raise ValueError(f"mix: there is no {name!r}; choose from {', '.join(MIXES)}")
    return replace(MIXES[name], **changes)


@dataclass(slots=True)
class _ChatSession:
    """A conversation: the text so far, which the prompt of its next turn repeats."""

    name: str
    service_tier: str
    history: tuple[Segment, ...] = ()
    turns: int = 0

    def turn(self, mix: Mix, rng: random.Random, due: float) -> Job:
        """Return the next turn's request, due at `due` seconds. Adds the turn, with a drawn answer, to the history."""
        prompt = (*self.history, Segment(f"{self.name}/user/{self.turns}", rng.randint(*mix.turn_tokens)))
        answer = rng.randint(*mix.answer_tokens)
        self.history = (*prompt, Segment(f"{self.name}/answer/{self.turns}", answer))
        self.turns += 1
        return Job(prompt, answer, due, service_tier=self.service_tier)


def mix_jobs(mix: Mix, seed: int) -> Iterator[Job]:
    """Yield jobs in order of arrival, without end."""
    rng = random.Random(f"mix/{seed}")
    ready: list[tuple[float, int, _ChatSession]] = []  # heap: (earliest next turn, …)
    for number, due in enumerate(arrival_times(mix.rate, random.Random(f"arrivals/{seed}"), mix.burstiness)):
        if rng.random() < mix.long_share:
            tier = "batch" if rng.random() < mix.batch_share else "standard"
            prompt = (Segment(f"long/{number}", rng.randint(*mix.long_tokens)),)
            yield Job(prompt, rng.randint(*mix.long_answer_tokens), due, "long", tier)
            continue
        if ready and ready[0][0] <= due:
            _, _, conversation = heappop(ready)
        else:
            tier = "interactive" if rng.random() < mix.interactive_share else "standard"
            conversation = _ChatSession(f"chat/{number}", tier)
        yield conversation.turn(mix, rng, due)
        if rng.random() < 1 - 1 / mix.turns:
            heappush(ready, (due + rng.expovariate(1 / mix.think_s), number, conversation))
