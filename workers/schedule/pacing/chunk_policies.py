"""Say what a chunk policy means beside the chunks themselves: for streams, and for predictions of replica and router.

To add a policy: its name in `ChunkPolicy`, its share of prompts as a function, and its entry in `POLICIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.pacing.chunking import share_of_chunk, share_of_prompts

ChunkPolicy: TypeAlias = Literal["adaptive", "fixed"]


@dataclass(frozen=True, slots=True)
class Beside:
    """The steps that have chunks: the streams in one of them, and what limits its chunks."""

    streams: StepWork  # the decodes of one step
    tpot: float  # promised seconds per token of the tightest stream
    overrun: float  # factor by which some steps take longer than predicted
    max_tokens: float  # of a step, decodes included
    page_size: int  # tokens of the smallest possible chunk


Share: TypeAlias = Callable[[StepCost, Beside, int], float]
"""Returns the share of a prompt's pace on an idle replica that streams leave. The last argument: tokens of the prompt
that a step computes however little time is left; 0: none."""


def adaptive_share(cost: StepCost, beside: Beside, floor: int) -> float:
    return share_of_prompts(cost, beside.streams, beside.tpot, beside.overrun, floor, beside.page_size)


def fixed_share(cost: StepCost, beside: Beside, floor: int) -> float:
    return share_of_chunk(cost, beside.streams, beside.max_tokens - beside.streams.decodes)


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
