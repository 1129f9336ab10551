"""How many prompt tokens one step computes. Pure functions of data: a policy is changed here."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from crossdock.workers.schedule.cost import StepCost
from crossdock.workers.schedule.pace import LONGEST_GAP

SLACK_SHARE = 0.9
"""Share of the tightest stream's slack that a step may fill. The rest is for sending the token to the client.

How far steps overrun their prediction is a factor of its own, `overrun`. The longest gap of interactive streams, with
0.8, 0.9 and 1.0: 50.0, 56.2 and 62.5 ms (`crossdock simulate --pools mixed=4xh100-8b --request-rate 50`, 2026-11-22).
On a real machine: `python benchmarks/adaptive.py --settings adaptive`; a share of 0.85 without `overrun` had p99 gaps
of 66.9, 81.9 and 59.4 ms in its three mixes, this has 52.1, 57.7 and 57.9 ms (benchmarks/RESULTS.md).
"""

IDLE_SHARE = 0.25
"""Longest step, as a share of the tightest `ttft_s` of all classes.

A request that arrives while a step runs waits for the end of the step. Interactive p99 TTFT with 0.1, 0.25, 0.5 and 1:
244, 357, 853 and 1,516 ms (`crossdock simulate --pools mixed=1xl4-8b --request-rate 1 --mix long-heavy`, 2026-11-22).
Less than 0.25 means more steps for each prompt, and so more seconds where a step's fixed part is large.
"""

MAX_OVERRUN = 2.0
"""Largest `overrun` that is accounted for: the factor by which steps may exceed their prediction and be in time.

Beyond that, chunks would shrink to nothing on a machine that cannot be predicted. With 1, 2 and 4, the longest gap is
333, 130 and 136 ms, and the standard p99 TTFT 668, 753 and 821 ms
(`crossdock simulate --pools mixed=4xh100-8b --request-rate 50 --noise 0.6`, 2026-11-22).
"""

LEAST_SHARE = 0.02
"""Share of the time that a prediction assumes for prompts where streams leave less.

Only a bound: it keeps predicted times finite, at 50 times the work ahead, although streams end at some time. 0.005 and
0.1 give the same results (`crossdock simulate --pools mixed=1xl4-8b --request-rate 3`, 2026-11-22).
"""

_NO_PRIORITY = 1 << 30  # less urgent than every class


@dataclass(slots=True)
class ChunkBudget:
    """The rest of a step that is left for chunks: tokens, and the predicted seconds that they may take.

    Part of it, the lane, is reserved for short prompts.
    """

    tokens: int
    seconds: float = inf
    floor: int = 0  # tokens to compute even if `seconds` is spent
    floor_priority: int = _NO_PRIORITY  # the floor is for prompts of this priority and more urgent ones
    cost: StepCost | None = None
    reason: str = "token budget"  # why the budget is not larger
    lane_tokens: int = 0  # part of `tokens` that long prompts may not take
    lane_seconds: float = 0.0  # part of `seconds` that long prompts may not take

    @property
    def is_spent(self) -> bool:
        """Return whether no prompt can get a chunk any more."""
        return self.tokens <= 0 or (self.seconds <= 0 and self.floor <= 0 and self.cost is not None)

    def reserve_lane(self, share: float, short_tokens: int) -> None:
        """Reserve up to `share` of the budget for short prompts, of which `short_tokens` tokens are left to compute.

        So they start in this step even if a long prompt goes before them.
        """
        within = self.cost.tokens_within(self.seconds, 0) if self.cost and self.seconds < inf else self.tokens
        share = min(share, short_tokens / max(min(within, self.tokens), 1))
        self.lane_tokens = int(self.tokens * share)
        self.lane_seconds = self.seconds * share if self.seconds < inf else 0.0

    def release_lane(self) -> None:
        """Let long prompts use what short ones have left of the lane."""
        self.lane_tokens, self.lane_seconds = 0, 0.0

    def chunk(
        self, start: int, end: int, priority: int, is_long: bool, threshold: int, page_size: int, factor: float = 1.0
    ) -> int:
        """Return how many tokens to compute now of those in `[start, end)`, the rest of a prompt of this priority.

        `factor`: how many times as long as usual a chunk of this prompt takes.
        """
        tokens, seconds, floor = self.tokens, self.seconds, self.floor if priority <= self.floor_priority else 0
        if is_long and self.lane_tokens:  # deep in its context, a floor chunk would take all the time of the lane
            tokens, seconds, floor = tokens - self.lane_tokens, seconds - self.lane_seconds, 0
        if self.cost is not None and self.seconds < inf:
            tokens = min(tokens, max(self.cost.tokens_within(seconds / factor, start), floor))
        return chunk_tokens(start, end, tokens, threshold, page_size)

    def take(self, start: int, num_tokens: int, is_long: bool, factor: float = 1.0) -> None:
        """Subtract a chunk of `num_tokens` after `start` tokens of context."""
        seconds = factor * self.cost.chunk_seconds(start, num_tokens) if self.cost is not None else 0.0
        self.tokens -= num_tokens
        self.seconds -= seconds
        self.floor = max(self.floor - num_tokens, 0)
        if not is_long:
            self.lane_tokens = max(self.lane_tokens - num_tokens, 0)
            self.lane_seconds = max(self.lane_seconds - seconds, 0.0)


def chunk_tokens(start: int, end: int, budget: int, threshold: int, page_size: int) -> int:
    """Return how many tokens to compute now of those in `[start, end)`; 0: none in this step.

    At most `budget`, and at most `threshold` unless that is 0. Every chunk but the last ends on a page boundary, so
    that a finished chunk leaves only full pages, which can be shared and shipped.
    """
    stop = min(end, start + budget, start + threshold if threshold else end)
    if stop < end:
        stop -= stop % page_size
    return max(stop - start, 0)


def fixed_chunk_budget(max_num_batched_tokens: int, num_decodes: int) -> ChunkBudget:
    """Return vLLM's budget: the tokens that decodes leave of a fixed number."""
    return ChunkBudget(max_num_batched_tokens - num_decodes)


def adaptive_chunk_budget(
    max_num_batched_tokens: int,
    floor: int,
    contexts: Sequence[int],
    slack: float,
    idle_seconds: float,
    cost: StepCost,
    floor_priority: int = _NO_PRIORITY,
    overrun: float = 1.0,
) -> ChunkBudget:
    """Return the budget that lets the step end within `slack` and within `idle_seconds`.

    Args:
        max_num_batched_tokens: ceiling of tokens in the step.
        floor: tokens to compute for prompts of `floor_priority` or more urgent ones, however little time is left.
            Less urgent prompts get only what time is left, so that they make no stream late.
        contexts: tokens of each decode in the step.
        slack: seconds until the first stream must have its token; infinite if no stream runs or arrives.
        idle_seconds: longest step. A request that arrives meanwhile waits for the end of the step.
        cost: what steps take.
        overrun: factor by which some steps take longer than predicted, and must still be in time.
    """
    tokens = max_num_batched_tokens - len(contexts)
    fixed = cost.base + cost.decode_seconds(len(contexts), sum(contexts))
    seconds = slack * SLACK_SHARE / min(overrun, MAX_OVERRUN)
    if seconds < idle_seconds:
        reason = f"slack of {slack * 1e3:.0f} ms, {len(contexts)} decodes"
    else:
        seconds, reason = idle_seconds, f"idle step of {idle_seconds * 1e3:.0f} ms"
    return ChunkBudget(tokens, max(seconds - fixed, 0.0), min(floor, tokens), floor_priority, cost, reason)


def share_of_prompts(streams_seconds: float, tpot: float, overrun: float, floor: float, least: float) -> float:
    """Return the share of the time that goes into chunks in steps of `adaptive_chunk_budget`, while streams run.

    Args:
        streams_seconds: what the streams take of each step. They are as early as `LONGEST_GAP` allows.
        tpot: promised seconds per token of the tightest stream.
        overrun: as in `adaptive_chunk_budget`.
        floor: seconds of the chunk that is computed however little time is left.
        least: seconds of the smallest possible chunk.
    """
    chunk = max(LONGEST_GAP * tpot * SLACK_SHARE / min(overrun, MAX_OVERRUN) - streams_seconds, floor)
    return chunk / (streams_seconds + chunk) if chunk >= least else 0.0
