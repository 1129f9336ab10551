"""When each stream's next token is due, and which streams may skip a step. Pure functions of data."""

from collections.abc import Sequence
from math import inf

from crossdock.workers.schedule.cost.cost import NO_ADAPTERS, AdapterWork, StepCost
from crossdock.workers.schedule.request.request import Request, adapter_work
from crossdock.workers.schedule.request.slo import SloClass

LONGEST_GAP = 1.25
"""Longest planned gap between two tokens of a stream, as a multiple of its class's `tpot_s`.

A stream that is early keeps at most the excess, a quarter of `tpot_s`, for a chunk to use. The longest gap of
interactive streams, with 1, 1.25, 1.5 and 2: 45.0, 56.2, 67.5 and 90.0 ms, of promised 50 ms
(`crossdock simulate --pools mixed=4xh100-8b --request-rate 50`, 2026-11-22). With 1, chunks get nothing of a lead.
"""

MOST_LENT = 1.0
"""Longest delay of one token, as a multiple of its class's `tpot_s`, that a stream lends to a prompt. The stream lends
only what it is ahead of its class's mean, so it keeps its time per token all the same."""

LENT_KNEE = 5.0
"""Seconds of a step, as a multiple of those of its decodes alone, up to which streams lend to a prompt that has time.

Where decodes alone take much of a promise, what is left is so short that a prompt gets many small chunks, each of which
reads the weights and the context again, in the time of the streams. With 5, up to four fifths of a step are the
prompt's. Without it and with 4: TTFT p50 of agents 181 and 142 ms, TPOT 50 and 44 ms (benchmarks/records/agents.md).
Where decodes take less than a fifth of a promise, nothing is lent.
"""

_ROUNDING = 0.99  # share of tpot_s: `advance` adds step times one by one, whose float sums differ in the last digits
_NO_END = 1 << 40


def promises_beyond(cost: StepCost, classes: Sequence[SloClass]) -> dict[str, float]:
    """Return the least seconds of a token, for each class that promises less than even a stream alone can have."""
    least = cost.decode_step_seconds(1, 0)
    return {slo.name: least for slo in classes if least >= slo.tpot_s}


def next_due(due: float, now: float, tpot: float) -> float:
    """Return the time at which the token after that of `now` is due. `due`: of that of `now`; `tpot`: promised seconds.

    A stream that is early keeps the lead, as far as `LONGEST_GAP` allows. A stream that is late starts again from
    `now`: after one stall it must not hold chunks at their floor until it has caught up.
    """
    kept = (due if due > now else now) + tpot
    latest = now + LONGEST_GAP * tpot
    return kept if kept < latest else latest


def longest_gap(tpot: float, *, is_urgent: bool) -> float:
    """Return the longest gap (s) that a chunk may plan beside a stream of `tpot`. `is_urgent`: its prompt is as urgent
    as the stream; less urgent prompts use no lead, so that batches cost interactive streams at most their promise."""
    return (LONGEST_GAP if is_urgent else 1.0) * tpot


def lent_due(stream: Request, tpot: float) -> float:
    """Return when a stream's next token is due if the stream lends what it is ahead of a token every `tpot` seconds."""
    return stream.due + min(lead(stream, tpot), MOST_LENT * tpot)


def lead(stream: Request, tpot: float) -> float:
    """Return the seconds that a stream can lend in all: how much sooner its next token is due than a token every `tpot`
    seconds would be."""
    if stream.paced_from is None:
        return 0.0
    return max(stream.paced_from + tpot * (stream.num_output_tokens + 1) - stream.due, 0.0)


def skip_decodes(streams: Sequence[Request], now: float, cost: StepCost) -> set[str]:
    """Return the ids of streams to leave out of this step, so that those of more urgent classes are in time.

    Only streams of a less urgent class than the tightest one are left out: least urgent class first, and in a class the
    last due. A stream is left out only if it is still in time after one more such step. So a late stream is in
    the most urgent class, or no stream was left that could wait.
    """
    skipped: set[str] = set()
    earliest: dict[int, float] = {}  # earliest deadline, by priority
    for stream in streams:
        earliest[stream.priority] = min(stream.due, earliest.get(stream.priority, inf))
    num_left = len(streams)
    context = sum([stream.num_tokens for stream in streams])
    adapters, adapted = adapter_work(streams)
    seconds = cost.decode_step_seconds(num_left, context, adapters, adapted)
    if now + seconds <= min(earliest.values(), default=inf):  # no stream would be late
        return skipped
    for stream in sorted(streams, key=lambda stream: (-stream.priority, -stream.due, stream.id)):
        more_urgent = min((due for priority, due in earliest.items() if priority < stream.priority), default=inf)
        if now + seconds <= more_urgent or stream.due <= now + 2 * seconds:  # 2: this step without it, the next with it
            continue
        skipped.add(stream.id)
        num_left = num_left - 1
        context = context - stream.num_tokens
        adapted -= stream.adapter_weights
        seconds = cost.decode_step_seconds(num_left, context, adapters, adapted)
    return skipped


def steps_without_skips(
    contexts: Sequence[int], tpot: float, cost: StepCost, adapters: AdapterWork = NO_ADAPTERS
) -> int:
    """Return for how many equal steps `skip_decodes` leaves out no stream, if no stream is left out in the first.

    A stream that made a token is due `tpot` later at the earliest, so no stream is late while a step takes less.
    `contexts`: tokens of each stream. `adapters`: of the streams.
    """
    slack = _ROUNDING * tpot - cost.decode_step_seconds(len(contexts), sum(contexts), *adapters)
    per_step = max(cost.per_context, cost.per_far) * len(contexts)
    if slack < 0:
        return 1
    return 1 + int(slack / per_step) if per_step else _NO_END
