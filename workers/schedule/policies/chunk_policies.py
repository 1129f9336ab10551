"""Say what a chunk policy means beside the chunks themselves: for streams, and for predictions of replica and router.

To add a policy: its name in `ChunkPolicy`, its share of prompts as a function, and its entry in `POLICIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.policies.chunking import (
    LEAST_PART,
    LEAST_SHARE,
    floor_beside,
    free_seconds,
    longest_step,
)
from crossdock.workers.schedule.policies.pace import LENT_KNEE, LONGEST_GAP, MOST_LENT, longest_gap

ChunkPolicy: TypeAlias = Literal["adaptive", "fixed"]


class ChunkLimits(NamedTuple):
    """Describes what bounds the chunks of a replica's steps, beside its streams."""

    chunk_policy: str
    floor: int  # tokens of prompts that a step computes however little time is left; 0: none
    max_tokens: int  # of a step, decodes included
    page_size: int  # tokens of the smallest possible chunk
    overrun: float  # factor by which some steps take longer than predicted while the pipeline is full


class Beside(NamedTuple):
    """The steps that have chunks: the streams in one of them, and what limits its chunks."""

    streams: StepWork  # the decodes of one step
    alone: float  # seconds of that step without a chunk
    tpot: float  # promised seconds per token of the tightest stream
    limits: ChunkLimits
    is_urgent: bool = True  # the prompt is as urgent as the tightest stream; for a less urgent one, no chunk is certain


_SHORTEST = 1e-6  # seconds

Share: TypeAlias = Callable[[StepCost, Beside], float]
"""Returns the share of a prompt's pace on an idle replica that streams leave."""


def adaptive_share(cost: StepCost, beside: Beside) -> float:
    """Return the share in steps of `adaptive_chunk_budget`. The streams are as early as `longest_gap` allows."""
    limits = beside.limits
    seconds = longest_step(longest_gap(beside.tpot, is_urgent=beside.is_urgent), limits.overrun)
    tokens = cost.tokens_within(seconds, 0, beside.streams, alone=beside.alone)
    floor = limits.floor if beside.is_urgent else 0
    floor = floor_beside(cost, beside.streams, (beside.tpot,), limits.overrun, floor, beside.alone)
    if floor and seconds < (free := free_seconds(cost, beside.streams, 0, floor)):
        tokens = max(tokens, int(cost.tokens_within(free, 0, beside.streams, alone=beside.alone)), floor)
    least = limits.page_size if beside.is_urgent else LEAST_PART
    return share_of_chunk(cost, beside.streams, tokens) if tokens >= least else 0.0


class Lent(NamedTuple):
    """Describes what streams that are ahead of their mean lend to prompts as urgent as they are."""

    # Floats, or arrays of replicas.
    share: Any = 1.0  # of a prompt's pace on an idle replica, while they lend
    seconds: Any = 0.0  # by which prompts end sooner, at most: then nothing is left to lend


NOTHING_LENT = Lent()


def lent_beside(cost: StepCost, beside: Beside, share: float, lead: float) -> Lent:
    """Return the loan of streams that are all `lead` seconds ahead, where `share` is that of `adaptive_share`.

    Each longer step takes from the lead what it is longer than the promise.
    """
    overrun = beside.limits.overrun
    longest = longest_step((LONGEST_GAP + MOST_LENT) * beside.tpot, overrun)
    seconds = min(LENT_KNEE * beside.alone, longest)
    share = max(share, LEAST_SHARE)
    if lead <= 0 or seconds <= longest_step(longest_gap(beside.tpot, is_urgent=True), overrun):
        return NOTHING_LENT
    tokens = cost.tokens_within(seconds, 0, beside.streams, alone=beside.alone)
    lent = share_of_chunk(cost, beside.streams, tokens)
    if lent <= share:
        return NOTHING_LENT
    lasts = lead * seconds / max(seconds - beside.tpot, _SHORTEST)
    return Lent(lent, lasts * (lent / share - 1))


def pace_beside(share: Any, lent_share: Any, lent_seconds: Any, seconds: Any, larger: Callable[[Any, Any], Any]) -> Any:
    """Return the seconds until prompts are computed, as a multiple of those that they take on an idle replica.

    `share`: that streams leave. `lent_share`, `lent_seconds`: see `Lent`. `seconds`: of the prompts on an idle replica.
    """
    return larger(1 / lent_share, 1 / share - lent_seconds / larger(seconds, _SHORTEST))


def fixed_share(cost: StepCost, beside: Beside) -> float:
    """Return the share in steps that chunks fill to `max_tokens`."""
    return share_of_chunk(cost, beside.streams, beside.limits.max_tokens - beside.streams.decodes)


def share_of_chunk(cost: StepCost, streams: StepWork, tokens: float) -> float:
    """Return the share of a prompt's pace on an idle replica if each step of `streams` has a chunk of `tokens`.

    On an idle replica, chunks are so large that a token takes what it takes beyond the breakpoint of the cost.
    """
    alone = cost.chunk_seconds(0, tokens)
    seconds = cost.seconds(streams.plus_chunk(0, tokens))
    if not alone:  # tokens are free: what counts is the time of the streams
        return 1 - cost.seconds(streams) / seconds if seconds else 1.0
    return min(alone / seconds, 1.0)


@dataclass(frozen=True, slots=True)
class Meaning:
    """Describes the effects of a policy's chunks on streams and on prompts."""

    fits_streams: bool  # a step ends before its tightest stream is late; less urgent prompts and streams wait for that
    share: Share


POLICIES: Mapping[str, Meaning] = {
    "adaptive": Meaning(fits_streams=True, share=adaptive_share),
    "fixed": Meaning(fits_streams=False, share=fixed_share),
}


def meaning_of(policy: str) -> Meaning:
    """Look up the meaning of a policy. An unknown policy counts as `adaptive`, the default: during an upgrade a
    router may hear of policies that only newer replicas have."""
    return POLICIES.get(policy, POLICIES["adaptive"])
