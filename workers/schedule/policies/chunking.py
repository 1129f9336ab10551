"""How many prompt tokens one step computes. Pure functions of data: a policy is changed here."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar, NamedTuple

from crossdock.workers.schedule.cost.cost import NO_WORK, StepCost, StepWork

SLACK_SHARE = 0.9
"""Share of the tightest stream's slack that a step may fill. The rest is for sending the token to the client.

How far steps overrun their prediction is a factor of its own, `overrun`. The longest gap of interactive streams, with
0.8, 0.9 and 1.0: 50.0, 56.2 and 62.5 ms (`crossdock simulate --pools mixed=4xh100-8b --request-rate 50`, 2026-11-22).
On a real machine: `python benchmarks/adaptive.py --settings adaptive`; a share of 0.85 without `overrun` had p99 gaps
of 66.9, 81.9 and 59.4 ms in its three mixes, this has 52.1, 57.7 and 57.9 ms.
"""

FREE_SHARE = 0.1
"""Share of a step's seconds by which a chunk may lengthen the step and still count as free.

Where a step must have a chunk, and before the breakpoint of `StepCost`, more tokens cost next to nothing: the smallest
chunk is then as large as this share allows. Where the cost of rows is a line, that adds less than a page.
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

KNEE = 2.0
"""Seconds of a step, as a multiple of those of its decodes alone, where these alone take as long as a class promises.

Then no chunk is small enough. Half of the time goes to prompts, which so finish in few steps.
"""

LEAST_PART = 4
"""Tokens of the shortest chunk that ends inside of a page. With fewer, most of its time would be that of any chunk.
With 2 a simulated batch beside streams has more of the rest, and the streams a longer p99 gap."""

LARGE_CHUNK = 1024  # tokens from which on a chunk gives up some, so that no tile of a GPU's products is half empty

FLOOR = "floor"  # begins the reason of a budget that was exceeded because a step computes at least so many tokens


_NO_PRIORITY = 1 << 30  # less urgent than every class

FREE = StepCost.of([0.0, 0.0])
"""The cost of a step that takes no time: tokens alone bound its chunks."""


@dataclass(slots=True)
class ChunkBudget:
    """The chunks of a step: the tokens that are left for them, and the predicted seconds that the step may take.

    Part of it, the lane, is reserved for short prompts.
    """

    tokens: int
    seconds: float = inf  # of the whole step
    floor: int = 0  # tokens to compute even if the step then takes longer
    floor_priority: int = _NO_PRIORITY  # the floor is for prompts of this priority and more urgent ones
    cost: StepCost = FREE
    reason: str = "token budget"  # why the budget is not larger
    work: StepWork = NO_WORK  # of the step so far
    lent_to: str | None = None  # request id: the prompt to which streams lend
    lent_seconds: float = 0.0  # of the whole step if it has a chunk of that prompt
    lane_tokens: int = 0  # part of `tokens` that long prompts may not take; 0: there is no lane
    lane_seconds: float = 0.0  # part of `seconds` that long prompts may not take
    row_tile: int = 1  # rows that the device multiplies at a time: large chunks end where the step's rows fill tiles
    is_chunked: ClassVar = True  # False: one step computes the rest of a prompt, or none of it

    @property
    def is_spent(self) -> bool:
        """Return whether no prompt can get a chunk any more."""
        return self.tokens <= 0 or (self.floor <= 0 and self.cost.seconds(self.work) >= self.seconds)

    def reserve_lane(self, share: float, short_tokens: int) -> None:
        """Reserve up to `share` of the budget for short prompts, of which `short_tokens` tokens are left to compute.

        So they start in this step even if a long prompt goes before them.
        """
        within = self.tokens
        spare = 0.0
        if self.seconds < inf:
            within = min(int(self.cost.tokens_within(self.seconds, 0, self.work)), within)
            spare = max(self.seconds - max(self.cost.seconds(self.work), self.cost.least_with_chunk), 0.0)
        share = min(share, short_tokens / max(within, 1))
        self.lane_tokens = int(self.tokens * share)
        self.lane_seconds = spare * share

    def chunk(self, prompt: "Candidate", threshold: int, page_size: int) -> int:
        """Return how many tokens of a prompt to compute now."""
        tokens = self.tokens
        seconds = self.seconds
        floor = self.floor if prompt.has_floor and prompt.priority <= self.floor_priority else 0
        if prompt.is_long and self.lane_tokens:  # deep in its context, a floor chunk would take the time of the lane
            tokens = tokens - self.lane_tokens
            seconds = seconds - self.lane_seconds
            floor = 0
        if prompt.id == self.lent_to:
            seconds = max(seconds, self.lent_seconds)
        seconds -= prompt.encoder_seconds
        floor = max(floor, prompt.least) if floor else 0
        if self.seconds < inf:
            now = self.cost.seconds(self.work)
            seconds = now + (seconds - now) / prompt.factor
            adapter = prompt.adapter_weights
            within = int(self.cost.tokens_within(seconds, prompt.start, self.work, adapter))
            if within < tokens and floor:
                within = max(within, free_tokens(self.cost, self.work, prompt.start, floor, adapter))
            tokens = min(tokens, within)
        found = chunk_tokens(prompt.start, prompt.end, tokens, threshold, page_size)
        if self.row_tile > 1 and LARGE_CHUNK <= found < prompt.end - prompt.start:
            beyond = int(self.work.rows + found) % self.row_tile  # rows in a tile that would be computed whole
            found = chunk_tokens(prompt.start, prompt.end, found - beyond, threshold, page_size)
        is_only_one = not self.work.prefill_tokens and prompt.priority > self.floor_priority
        if not found and prompt.may_split_page and is_only_one and tokens >= LEAST_PART:
            return min(int(tokens), prompt.end - prompt.start)  # else a slow machine would compute no token of it
        return found

    def take(self, prompt: "Candidate", num_tokens: int) -> None:
        """Add a chunk of `num_tokens` of a prompt to the step."""
        self.tokens -= num_tokens
        floor = self.floor
        self.floor = max(self.floor - num_tokens, 0)
        within = max(self.seconds, self.lent_seconds) if prompt.id == self.lent_to else self.seconds
        self.seconds -= prompt.encoder_seconds
        self.lent_seconds -= prompt.encoder_seconds
        before = self.cost.seconds(self.work)
        self.work = self.work.plus_chunk(prompt.start, num_tokens, prompt.adapter_weights)
        now = self.cost.seconds(self.work)
        if floor and now > within * (1 + 1e-6) and not self.reason.startswith(FLOOR):
            self.reason = f"{FLOOR} of {floor} tokens, {self.reason}"
        seconds = prompt.factor * (now - before)
        self.seconds -= (1 - 1 / prompt.factor) * seconds  # `work` does not show that such a chunk takes longer
        if not prompt.is_long:
            self.lane_tokens = max(self.lane_tokens - num_tokens, 0)
            self.lane_seconds = max(self.lane_seconds - seconds, 0.0)


class WholePrompts(ChunkBudget):
    """A step that computes the whole rest of a prompt, or none of it. One prompt may take longer than the step's
    seconds: else it would never be computed."""

    is_chunked = False

    @property
    def is_spent(self) -> bool:
        return self.tokens <= 0 or bool(self.work.prefill_tokens and super().is_spent)

    def chunk(self, prompt: "Candidate", threshold: int, page_size: int) -> int:
        left = prompt.end - prompt.start
        work = self.work.plus_chunk(prompt.start, left, prompt.adapter_weights)
        has_time = not self.work.prefill_tokens or self.cost.seconds(work) <= self.seconds
        return left if left <= self.tokens and has_time else 0


class Candidate(NamedTuple):
    """The rest of a prompt, `[start, end)`, as `ChunkBudget` sees this rest."""

    start: int
    end: int
    priority: int = 0
    is_long: bool = False  # the prompt may not use the lane
    factor: float = 1.0  # how many times as long as usual its chunks take
    id: str = ""
    encoder_seconds: float = 0.0  # seconds for pictures in the chunk, beside those of `StepCost`
    has_floor: bool = True  # the chunk may use the budget's floor; False: only what time is left
    least: int = 0  # tokens of the shortest chunk, where chunks do not just end on page boundaries
    may_split_page: bool = False  # a chunk may end inside of a page where no whole page fits
    adapter_weights: int = 0  # numbers in the matrices of its adapter


def floor_beside(
    cost: StepCost, streams: StepWork, tpots: Sequence[float], overrun: float, floor: int, alone: float | None = None
) -> int:
    """Return the prompt tokens that a step computes however tight the slack is: `floor`, wherever promises can be kept.

    Where decodes alone take as long as a promise, the floor is what fits in `KNEE` times their seconds, and in the
    promises that can be kept. `tpots`: promised seconds per token of all streams. `alone`: seconds of a step of the
    streams, where known.
    """
    if not floor:
        return floor
    alone = cost.seconds(streams) if alone is None else alone
    kept = [tpot for tpot in tpots if tpot > alone]
    if len(kept) == len(tpots):
        return floor
    seconds = min(KNEE * alone, longest_step(min(kept, default=inf), overrun))
    return max(int(cost.tokens_within(seconds, 0, streams)), floor)


def free_tokens(
    cost: StepCost, work: StepWork, start: int, floor: int, adapter: float = 0, alone: float | None = None
) -> int:
    """Return the tokens of the largest chunk that takes hardly longer than a chunk of `floor` tokens; at least `floor`.

    `work`: of the step without the chunk. `start`: tokens before the chunk. `alone`: see `StepCost.tokens_within`.
    """
    seconds = free_seconds(cost, work, start, floor, adapter)
    return max(int(cost.tokens_within(seconds, start, work, adapter, alone)), floor)


def free_seconds(cost: StepCost, work: StepWork, start: int, floor: int, adapter: float = 0) -> float:
    """Return the seconds of a step with the chunk that `free_tokens` returns."""
    return (1 + FREE_SHARE) * cost.seconds(work.plus_chunk(start, floor, adapter))


def chunk_tokens(start: int, end: int, budget: int, threshold: int, page_size: int) -> int:
    """Return how many tokens to compute now of those in `[start, end)`; 0: none in this step.

    At most `budget`, and at most `threshold` unless that is 0. Every chunk but the last ends on a page boundary, so
    that a finished chunk leaves only full pages, which can be shared and shipped.
    """
    stop = min(end, start + budget, start + threshold if threshold else end)
    if stop < end:
        stop -= stop % page_size
    return max(stop - start, 0)


def fixed_chunk_budget(max_num_batched_tokens: int, num_decodes: int, is_chunked: bool = True) -> ChunkBudget:
    """Return vLLM's budget: the tokens that decodes leave of a fixed number."""
    tokens = max_num_batched_tokens - num_decodes
    return (ChunkBudget if is_chunked else WholePrompts)(tokens, work=StepWork(decodes=num_decodes))


def adaptive_chunk_budget(
    max_num_batched_tokens: int,
    floor: int,
    decodes: StepWork,
    slack: float,
    idle_seconds: float,
    cost: StepCost,
    floor_priority: int = _NO_PRIORITY,
    overrun: float = 1.0,
) -> ChunkBudget:
    """Return the budget that lets the step end within `slack` and within `idle_seconds`.

    Args:
        max_num_batched_tokens: ceiling of tokens in the step, those of `decodes` included.
        floor: tokens to compute for prompts of `floor_priority` or more urgent ones, however little time is left.
            Less urgent prompts get only what time is left, so that they make no stream late.
        slack: seconds until the first stream must have its token; infinite if no stream runs or arrives.
        idle_seconds: longest step. A request that arrives meanwhile waits for the end of the step.
        overrun: see `longest_step`.
    """
    tokens = max_num_batched_tokens - int(decodes.decodes)
    seconds = longest_step(slack, overrun)
    if seconds < idle_seconds:
        reason = f"slack of {slack * 1e3:.0f} ms, {decodes.decodes:.0f} decodes"
    else:
        seconds = idle_seconds
        reason = f"idle step of {idle_seconds * 1e3:.0f} ms"
    return ChunkBudget(tokens, seconds, min(floor, tokens), floor_priority, cost, reason, decodes)


def idle_step(cost: StepCost, start: int, longest: float, waiting_s: float = 0.0) -> float:
    """Return the seconds of the longest step without streams, at most `longest`. `start`: context before its chunk.

    A request that arrives during a step waits for its end, half of the step on average. So the step ends at the knee of
    throughput, where its fixed part is `FREE_SHARE` of its seconds. A replica with a queue ends steps later: the fixed
    part of each step delays all prompts that wait, of `waiting_s` seconds (`queue_seconds`), and both delays together
    are least in steps of sqrt(2 · fixed part · waiting_s). On the public trace, with all prompts shipped, 73.8 and
    86.2 % of the requests are good in steps that end at the knee, with this term 80.0 and 90.0 %
    (benchmarks/records/public-trace.md).
    """
    fixed = cost.fixed_seconds(start)
    knee = max(fixed / FREE_SHARE, cost.breakpoint_seconds(start))
    return min(max(knee, sqrt(max(2 * fixed * waiting_s, 0.0))), longest)


def balanced_seconds(fixed: float, work: float, depth: int) -> float:
    """Return the seconds of each chunk of a prompt that cost a pipeline least, beside the decodes of its steps.

    Each step has a fixed part: launches, and handing over hidden states. So `work` seconds of a prompt in chunks of T
    lose fixed * work / T. Stages wait while long steps follow short ones: (depth - 1) * T, where the chunks begin and
    end. The sum is least at this T. Simulated with a promise of 2 s per token and the costs that
    tests/benchmarks/test_chunks.py has for a CPU, 2 and 4 stages: 953 and 1,714 tokens/s, stages idle 2.5 and 4.8 %;
    without this bound 765 and 1,208, 25 and 41 %; in chunks of 512 tokens 852 and 1,421, 16 and 30 %
    (benchmarks/records/pipeline-stages.md, 2026-11-29).

    Args:
        fixed: seconds of a step that no token adds.
        work: seconds of the whole prompt's tokens, so that all its chunks take the same time.
        depth: stages; two or more.
    """
    return sqrt(fixed * work / (depth - 1))


def longest_step(slack: float, overrun: float) -> float:
    """Return the predicted seconds that a step may take, so that it ends within `slack` seconds.

    `overrun`: factor by which some steps take longer than predicted, and must still be in time.
    """
    return slack * SLACK_SHARE / min(overrun, MAX_OVERRUN)
