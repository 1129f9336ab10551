"""How many prefill tokens this step may carry, and whose. Pure functions of data: a policy is changed here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from crossdock.workers.schedule.cost import StepCost
from crossdock.workers.schedule.request import Request
from crossdock.workers.schedule.slo import SloClass

# -- how much --------------------------------------------------------------------------------------------------------

MARGIN = 0.9  # of a stream's slack a step may fill: the token still has to travel
BANK = 1.25  # of its TPOT, the longest gap that is planned for a stream, which has been that much ahead
IDLE = 0.25  # of the tightest time to first token, how long a step may keep those waiting who come while it runs
LEAST_SHARE = 0.02  # of the time: what a prompt is taken to get where streams leave nothing
_MOST_OVERRUN = 2.0  # beyond it chunks would shrink to nothing for a machine that cannot be predicted


@dataclass(slots=True)
class ChunkBudget:
    """What a step has left for prefill chunks: tokens, and seconds where `cost` says what they buy."""

    tokens: int
    seconds: float = inf
    floor: int = 0  # tokens the step carries whatever the seconds say, for prompts of `floor_priority` or more urgent
    floor_priority: int = 1 << 30
    cost: StepCost | None = None
    reason: str = "token budget"  # why it is not larger
    lane_tokens: int = 0  # of the tokens and seconds above, what long prompts may not take
    lane_seconds: float = 0.0

    def keep_lane(self, share: float, short_tokens: int) -> None:
        """Keeps up to `share` of the room for short prompts, of which `short_tokens` wait: they start in this step
        even while a long one is ahead of them."""
        within = self.cost.tokens_within(self.seconds, 0) if self.cost and self.seconds < inf else self.tokens
        share = min(share, short_tokens / max(min(within, self.tokens), 1))
        self.lane_tokens = int(self.tokens * share)
        self.lane_seconds = self.seconds * share if self.seconds < inf else 0.0

    def end_lane(self) -> None:
        self.lane_tokens, self.lane_seconds = 0, 0.0

    def chunk(self, start: int, end: int, priority: int, is_long: bool, threshold: int, page_size: int) -> int:
        """How many tokens to compute now of those in `[start, end)`, the uncached rest of a prompt of class `priority`."""
        budget, seconds, floor = self.tokens, self.seconds, self.floor if priority <= self.floor_priority else 0
        if is_long and self.lane_tokens:  # deep in its context, a floor of it would take the time of all who are short
            budget, seconds, floor = budget - self.lane_tokens, seconds - self.lane_seconds, 0
        if self.cost is not None and self.seconds < inf:
            budget = min(budget, max(self.cost.tokens_within(seconds, start), floor))
        return chunk_tokens(start, end, budget, threshold, page_size)

    def take(self, start: int, num_tokens: int, is_long: bool) -> None:
        seconds = self.cost.chunk_seconds(start, num_tokens) if self.cost is not None else 0.0
        self.tokens -= num_tokens
        self.seconds -= seconds
        self.floor = max(self.floor - num_tokens, 0)
        if not is_long:
            self.lane_tokens = max(self.lane_tokens - num_tokens, 0)
            self.lane_seconds = max(self.lane_seconds - seconds, 0.0)


def chunk_tokens(start: int, end: int, budget: int, threshold: int, page_size: int) -> int:
    """How many tokens to compute now of those in `[start, end)`: at most `budget`, and at most `threshold` where that
    is not 0. Every chunk but the last ends on a page boundary, so that a finished chunk leaves only full pages, which
    others can share and which can be shipped. 0: not this step.
    """
    stop = min(end, start + budget, start + threshold if threshold else end)
    if stop < end:
        stop -= stop % page_size
    return max(stop - start, 0)


def fixed_chunk_budget(max_num_batched_tokens: int, num_decodes: int) -> ChunkBudget:
    """vLLM's rule: whatever the decodes leave of a fixed number of tokens."""
    return ChunkBudget(max_num_batched_tokens - num_decodes)


def adaptive_chunk_budget(
    max_num_batched_tokens: int,
    floor: int,
    contexts: Sequence[int],
    slack: float,
    idle_seconds: float,
    cost: StepCost,
    floor_priority: int = 1 << 30,
    overrun: float = 1.0,
) -> ChunkBudget:
    """As much as keeps the step inside `slack`, the seconds until the first of the streams must have its token, and
    inside `idle_seconds`: whoever arrives meanwhile waits for its end.

    `contexts`: tokens of each decode in the step. While no stream runs or is about to, `slack` is infinite. Never more
    tokens than the ceiling, `max_num_batched_tokens`; never less than `floor` for prompts of class `floor_priority` or more
    urgent ones. The others take what time is left, which may be none: nobody's stream is late for a prompt that is less
    urgent. `overrun`: by what factor steps take longer than predicted now and then; they must be in time even so.
    """
    tokens = max_num_batched_tokens - len(contexts)
    fixed = cost.base + cost.decode_seconds(len(contexts), sum(contexts))
    seconds = slack * MARGIN / min(overrun, _MOST_OVERRUN)
    if seconds < idle_seconds:
        reason = f"slack of {slack * 1e3:.0f} ms, {len(contexts)} decodes"
    else:
        seconds, reason = idle_seconds, f"idle step of {idle_seconds * 1e3:.0f} ms"
    return ChunkBudget(tokens, max(seconds - fixed, 0.0), min(floor, tokens), floor_priority, cost, reason)


def share_of_prompts(streams_seconds: float, tpot: float, overrun: float, floor: float, least: float) -> float:
    """What share of the time goes into chunks, in steps of `adaptive_chunk_budget`, while streams run that take
    `streams_seconds` of each step and were promised a token every `tpot`: they are ahead by what they may bank.
    `floor`: seconds of a chunk that is computed whatever the streams say; `least`: of the smallest that can be."""
    chunk = max(BANK * tpot * MARGIN / min(overrun, _MOST_OVERRUN) - streams_seconds, floor)
    return chunk / (streams_seconds + chunk) if chunk >= least else 0.0


def skip_decodes(streams: Sequence[Request], now: float, cost: StepCost) -> set[str]:
    """The decoding streams to leave out of this step, so that those of more urgent classes keep their promise.

    Only a stream of a less urgent class than the tightest one may be left out, the least urgent class and the latest
    due first, and only while its own promise can wait for one more such step. So decodes are reserved for the urgent;
    the others take what is left, and are late only when there is nothing else to give.
    """
    skipped: set[str] = set()
    earliest: dict[int, float] = {}  # by priority
    for stream in streams:
        earliest[stream.priority] = min(stream.due, earliest.get(stream.priority, inf))
    if len(earliest) < 2:  # nobody is more urgent than another
        return skipped
    seconds = cost.base + cost.decode_seconds(len(streams), sum([stream.num_tokens for stream in streams]))
    if now + seconds <= min(earliest.values()):  # nobody would be late
        return skipped
    for stream in sorted(streams, key=lambda it: (-it.priority, -it.due, it.id)):
        above = min((due for priority, due in earliest.items() if priority < stream.priority), default=inf)
        if now + seconds <= above or stream.due <= now + 2 * seconds:
            continue
        skipped.add(stream.id)
        seconds -= cost.decode_seconds(1, stream.num_tokens)
    return skipped


def steps_without_skips(contexts: Sequence[int], tpot: float, cost: StepCost) -> int:
    """For how many steps, all streams in each, `skip_decodes` leaves nobody out if it does not in the first. Whoever
    made a token is due `tpot` later or more, so that is while a step takes less. `contexts`: tokens of each stream."""
    slack = 0.99 * tpot - cost.base - cost.decode_seconds(len(contexts), sum(contexts))  # 0.99: of floats' rounding
    per_step = cost.decode_seconds(0, len(contexts))
    if slack < 0:
        return 1
    return 1 + int(slack / per_step) if per_step else _NO_END


_NO_END = 1 << 40


def next_due(due: float, now: float, tpot: float) -> float:
    """When the token after the one just made at `now` is promised. What a stream is ahead it banks, up to a quarter of
    its TPOT, so that a gap never exceeds 1.25 TPOT on purpose; what it is behind is forgiven: a stream that stalled
    once must not hold everyone at the floor until it has caught up."""
    banked, most = (due if due > now else now) + tpot, now + BANK * tpot
    return banked if banked < most else most


# -- whose -----------------------------------------------------------------------------------------------------------


def response_ratio(request: Request, work_done: int) -> float:
    """1 + waited work / uncached tokens. Work is what the replica has prefilled since the request arrived, in tokens:
    a ratio that needs no clock, is the same on every device, and stands still when nothing is computed."""
    return 1 + (work_done - request.arrival_work) / max(request.num_uncached_tokens, 1)


def is_starving(request: Request, now: float, starvation_s: float) -> bool:
    """Whether it has waited for `starvation_s`, and for as long as its class lets it wait: what was promised for later
    is not urgent yet."""
    return now - request.queued_at >= max(starvation_s, request.patience)


def order_prefills(requests: Iterable[Request], now: float, work_done: int, starvation_s: float) -> list[Request]:
    """Who prefills first: those that starve, oldest first; then by class; in a class the preempted, whose clients
    already read, then the highest response ratio. Ties go by arrival, then by id."""

    def key(request: Request) -> tuple[int, float, float, str]:
        if is_starving(request, now, starvation_s):
            return (-1, 0.0, request.arrival_time, request.id)
        ratio = inf if request.num_preemptions else response_ratio(request, work_done)
        return (request.priority, -ratio, request.arrival_time, request.id)

    return sorted(requests, key=key)


def prefill_reason(request: Request, now: float, work_done: int, starvation_s: float) -> str:
    """Why `order_prefills` put it where it did, for the request's timeline."""
    if is_starving(request, now, starvation_s):
        return f"waited {now - request.queued_at:.0f} s"
    if request.num_preemptions:
        return "preempted before"
    return f"response ratio {response_ratio(request, work_done):.2f}"


def reserved_slots(
    classes: Sequence[SloClass], max_num_seqs: int, running_priorities: Sequence[int], priority: int
) -> int:
    """Of the free places for streams, how many are kept for classes more urgent than `priority`."""
    kept = 0
    for urgent, slo in enumerate(classes[:priority]):
        if slo.decode_share:
            kept += max(int(slo.decode_share * max_num_seqs) - running_priorities.count(urgent), 0)
    return kept


def predicted_ttft(
    own_seconds: float, priority: int, backlog: Iterable[tuple[int, float]], prefill_share: float
) -> float:
    """Seconds until the first token of a prompt that takes `own_seconds` alone.

    `backlog`: (priority, seconds) of every prompt not finished yet. More urgent classes go before it entirely; those of
    its own class share with it, so that each delays it by at most its own length, as under processor sharing.
    `prefill_share`: what running streams leave of a step's time.
    """
    ahead = sum(
        seconds if other < priority else min(seconds, own_seconds) for other, seconds in backlog if other <= priority
    )
    return (ahead + own_seconds) / max(prefill_share, LEAST_SHARE)
