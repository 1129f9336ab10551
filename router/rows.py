"""How one replica's figures are made: backlog, streams, room, shares. loads.py declares the figures."""

from collections import deque
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate, chain, count
from typing import NamedTuple

from crossdock.router.loads import (
    EncoderPrices,
    Joining,
    Joins,
    PageSizes,
    PromptQueue,
    PromptShares,
    Row,
    StepsInFlight,
    StreamPace,
    lateness,
)
from crossdock.router.room import padded, room_of
from crossdock.router.work import Group, InFlightLoad, Work
from crossdock.workers.report.link import LinkCost
from crossdock.workers.report.live_profile import Learnt, LiveProfile
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.cost.stages import gap_of
from crossdock.workers.schedule.first_token import (
    PromptSteps,
    Sharing,
    first_nonzero,
    overrun_when_full,
    queue_seconds,
)
from crossdock.workers.schedule.policies.chunk_policies import ChunkLimits, Lent, meaning_of
from crossdock.workers.schedule.policies.chunking import LEAST_SHARE, free_tokens
from crossdock.workers.schedule.request.slo import SloClass


def row(
    profile: SchedulingProfile,
    live: LiveProfile | None,
    booked: Collection[InFlightLoad],
    classes: Sequence[SloClass],
    paces: "dict[tuple[float, ...], StepPace]",
    reported_at: float = 0.0,
) -> Row:
    """Make the row of one replica, which reported `live` at `reported_at`. `booked`: what `live` does not include.
    `paces`: keeps the last pace since the report, by its streams: most requests do not change these."""
    live = live or _IDLE
    cost, learnt = _costs(profile, live.learnt)
    encoder = profile.encoder_cost.coefficients if profile.encoder_cost else (0.0, 0.0, 0.0)
    work = Work.of(live, len(classes), booked)
    streams = (work.context, *work.adapters, *work.streams, *work.joining)
    if streams not in paces:
        paces.clear()
        paces[streams] = _pace(work, cost, learnt, profile, live, classes)
    pace = paces[streams]
    gap = pace.now.gap
    future, joining = _future(work, cost, learnt, profile, classes)
    groups = work.groups()
    num_groups = [max(len(reported), len(others)) for reported, others in zip(*groups, strict=True)]
    urgent_reported, urgent_booked = map(_urgent_seconds, groups)
    room, ends = room_of(profile, live, booked, work, max(gap, cost.base), pace.share)
    coming = [(each.at - reported_at, each.seconds) for each in booked if each.seconds and not each.has_first]
    chunk_s = pace.chunk_s if pace.step_streams else _chunk_seconds(live, profile, cost, pace.prompt_steps)
    has_work = pace.step_streams > 0 or sum(work.arriving) > 0 or any(num_groups)
    depth = profile.pipeline_parallel_size
    interval = learnt.interval_share
    return Row(
        cost=cost,
        classes=classes,
        pipeline=StepsInFlight(depth, interval, gap_of(depth, interval)),
        prompt_steps=pace.prompt_steps,
        pages=_page_sizes(profile, live),
        refuses_late=profile.admission == "reject" and has_work,
        joins=_joins(work, live, interval * gap, interval * cost.base, interval * chunk_s, coming, profile.runs_ahead),
        step_streams=pace.step_streams,
        min_chunk=pace.min_chunk,
        lent=pace.lent,
        now=pace.now,
        future=future,
        joining=joining,
        room=room,
        encoder=EncoderPrices(*(learnt.encoder_cost or encoder)),
        shares=pace.shares,
        queue=PromptQueue(
            live.prefills.in_flight_seconds + sum([seconds for _, seconds in chain(*chain(*groups))]),
            [each + live.prefills.in_flight_seconds for each in urgent_reported],
            urgent_booked,
            num_groups,
        ),
        groups=groups,
        ends=ends,
        lacking=[(each.pages, each.waited_s) for each in live.room.lacking if each.waited_s],
        tiers=live.tiers,
    )


def _page_sizes(profile: SchedulingProfile, live: LiveProfile) -> PageSizes[float]:
    needs = profile.needs
    sizes = profile.page_size, len(profile.windows), needs.num_full_groups, needs.window_pages, profile.state_pages
    link = live.link if live.link.bytes_per_second else LinkCost(bytes_per_second=profile.bytes_per_second)
    return PageSizes(*sizes, profile.page_bytes, *link)


def _costs(profile: SchedulingProfile, learnt: Learnt) -> tuple[StepCost, Learnt]:
    """Return the cost of a replica's steps with what else it has learnt of them, or both as measured at its start."""
    if learnt.cost:
        return _cost_of(learnt.cost), learnt
    return profile.cost, Learnt((), profile.interval_share, profile.overrun, learnt.gap_share, learnt.encoder_cost)


def _chunk_seconds(live: LiveProfile, profile: SchedulingProfile, cost: StepCost, alone: PromptSteps) -> float:
    """Return the seconds that chunks take in a step without streams, at most: more where prompts wait.

    `alone`: the steps of a prompt behind which none waits."""
    classes = profile.slo_classes
    groups = [(min(group.priority, len(classes) - 1), group.tokens, group.count) for group in live.prefills.groups]
    tightest = min([classes[priority].ttft_s for priority, _, _ in groups], default=0.0)
    seconds = [queue_seconds(cost, [(priority, tokens)], classes, tightest) for priority, tokens, _ in groups]
    # The prompt that is computed first is not behind itself: it is known as one of its group.
    first = max([each / count for each, (_, _, count) in zip(seconds, groups, strict=True) if count], default=0.0)
    behind = sum(seconds) - first
    steps = PromptSteps.of(profile, cost, behind) if behind > 0 else alone
    return float(min(steps.max_step_tokens * cost.per_prefill_token, steps.max_chunk_s))


def _joins(
    work: Work,
    live: LiveProfile,
    gap: float,
    base: float,
    chunk_s: float,
    booked: list[tuple[float, float]],
    runs_ahead: bool,
) -> Joins[float]:
    """Return which step a new prompt joins, by taking the steps that hold prompts which are known one by one.

    A step takes `gap` seconds without chunks, and has chunks of `chunk_s` at most, with `base` seconds once; all three
    as intervals of a pipeline. A replica that runs ahead schedules a step when the one before it begins: a prompt joins
    the step after the next. `booked`: seconds since the report at which prompts were booked, and their own, in order of
    time."""
    streams_s = gap if sum(work.streams) else 0.0
    later = min(live.step_seconds, gap) / 2 + (streams_s if runs_ahead else 0.0)
    if live.prefills.groups and not live.step_seconds:  # before its first step a replica does not say what one takes
        return _UNKNOWN._replace(later=later)
    waiting, coming, alone = _in_steps(live, base, booked)
    running = live.prefills.in_flight_seconds
    if not (running or waiting or coming):
        return _UNKNOWN._replace(later=later, longest=gap + chunk_s)
    begins = gap + running if running or (runs_ahead and streams_s) else 0.0
    closes = 0.0 if runs_ahead else begins
    last = coming[-1][0] if coming else 0.0
    done = [0.0, 0.0, running]  # seconds in the steps before each of the last three
    for number in count():  # the step that begins then takes what comes until it closes
        while coming and coming[0][0] < closes:
            waiting += coming.popleft()[1]
        filled = min(waiting, chunk_s)
        if closes > last or number == _MOST_STEPS:
            break
        if not filled and coming and begins - closes <= streams_s:  # such steps follow until the next prompt comes
            if not streams_s:
                closes, waiting = coming.popleft()
                begins, filled = closes, min(waiting, chunk_s)
                done = [done[2]] * 3
            elif skipped := (coming[0][0] - closes) // gap * gap:
                closes, begins = closes + skipped, begins + skipped
                done = [done[2]] * 3
                continue
        ends = begins + _step_seconds(gap, streams_s, filled)
        waiting -= filled
        done = [*done[1:], done[2] + alone * filled]
        closes, begins = begins if runs_ahead else ends, ends
    second = third = begins + _step_seconds(gap, streams_s, filled)
    before_second = before_third = done[2] + alone * filled
    ended = done[1], done[1]
    if runs_ahead:
        ended = done[0], done[1]
        after = min(waiting - filled, chunk_s)
        third += _step_seconds(gap, streams_s, after)
        before_third += alone * after
    before = done[2], before_second, before_third
    return Joins(closes, begins, second, third, *before, *ended, later, gap + chunk_s)


def _in_steps(
    live: LiveProfile, base: float, coming: list[tuple[float, float]]
) -> tuple[float, deque[tuple[float, float]], float]:
    """Return the seconds of the prompts that waited at the report, and those `coming` after it, without the `base`
    seconds that each takes alone and that steps take once; and the ratio of their seconds alone to these."""
    seconds = sum([group.seconds for group in live.prefills.groups])
    num_prompts = float(sum([group.count for group in live.prefills.groups]))
    if live.room.pages_now > live.room.free_pages and seconds > live.prefills.started_seconds:
        num_prompts *= live.prefills.started_seconds / seconds  # the others wait for pages, not for a step
        seconds = live.prefills.started_seconds
    waiting = max(seconds - base * num_prompts, 0.0)
    shorter = [(at, max(each - base, 0.0)) for at, each in coming]
    alone = seconds + sum([each for _, each in coming])
    ratio = alone / max(waiting + sum([each for _, each in shorter]), 1e-9)
    waiting += sum([each for at, each in shorter if at <= 0])  # on their way as the replica reported
    return waiting, deque(each for each in shorter if each[0] > 0), ratio


def _step_seconds(gap: float, streams_s: float, chunk_s: float) -> float:
    """Return the seconds of a step with chunks of `chunk_s`; without, and without streams, there is none."""
    return gap + chunk_s if chunk_s else streams_s


_cost_of = lru_cache(maxsize=4096)(StepCost.of)  # rows are made far more often than costs are learnt


class StepPace(NamedTuple):
    """How fast streams and prompts are with the streams of now: see `ReplicaFigures`."""

    now: StreamPace[float, Sequence[float]]
    step_streams: float
    share: float  # that the streams leave to prompts of the most urgent class
    shares: PromptShares[float, Sequence[float]]
    lent: Lent
    min_chunk: float
    chunk_s: float  # seconds that chunks take in a step beside the streams, at most
    prompt_steps: PromptSteps  # of a prompt beside no stream


def _pace(
    work: Work,
    cost: StepCost,
    learnt: Learnt,
    profile: SchedulingProfile,
    live: LiveProfile,
    classes: Sequence[SloClass],
) -> StepPace:
    depth = profile.pipeline_parallel_size
    num_streams = sum(work.streams)
    num_steps = _num_steps(num_streams, depth)
    step = StepWork.of_streams(num_streams, work.context, work.adapters, num_steps)
    alone = cost.seconds(step)
    gap = alone * gap_of(num_steps, learnt.interval_share) * learnt.gap_share
    limits = ChunkLimits(
        profile.chunk_policy,
        profile.min_chunk_tokens,
        profile.max_num_batched_tokens,
        profile.page_size,
        overrun_when_full(learnt.overrun, depth, learnt.interval_share),
    )
    joined = StepWork.of_streams(sum(work.joining), work.context, work.adapters, depth)
    sharing = Sharing.of(cost, limits, work.joining, joined, classes)
    shares = sharing.shares(len(classes))
    share = shares[0]
    steps = PromptSteps.of(profile, cost)
    min_chunk = max(profile.max_num_batched_tokens - num_streams, 1.0)
    chunk_s = steps.max_step_tokens * cost.per_prefill_token
    if not num_streams:
        chunk_s = min(chunk_s, steps.max_chunk_s)
    if meaning_of(profile.chunk_policy).fits_streams:
        min_chunk = min(free_tokens(cost, step, 0, profile.min_chunk_tokens, alone=alone), min_chunk)
        if share < 1:
            chunk_s = min(max(gap * share / (1 - share), min_chunk * cost.per_prefill_token), chunk_s)
    more_urgent = accumulate(padded(live.shares.prompts, 0.0, len(classes)), initial=0.0)
    return StepPace(
        StreamPace(gap, lateness(gap, work.streams, classes, max), work.streams),
        step.decodes,
        share,
        PromptShares(
            max(live.shares.streams - (1 - share), 0.0),
            [max(each, LEAST_SHARE) for each in shares],
            [max(each - urgent, LEAST_SHARE) for each, urgent in zip(shares, more_urgent, strict=False)],
            _delays_streams(profile.chunk_policy, work.streams),
        ),
        sharing.lent(0, share, live.streams.lead_s),
        min_chunk,
        chunk_s,
        steps,
    )


def _future(
    work: Work, cost: StepCost, learnt: Learnt, profile: SchedulingProfile, classes: Sequence[SloClass]
) -> tuple[StreamPace[float, Sequence[float]], Joining[float]]:
    """Return the pace of the streams to come, and what one more adds."""
    count = sum(work.streams) + max(sum(work.arriving), 0.0)
    num_steps = _num_steps(count + 1, profile.pipeline_parallel_size)
    per_step = gap_of(num_steps, learnt.interval_share)
    context = work.context + work.future_context
    seconds, joined = [
        cost.streams_seconds(each, context, work.future_adapters, num_steps) for each in (count, count + 1)
    ]
    gap = seconds * per_step * learnt.gap_share  # with drafts, a step brings several tokens
    streams = [now + max(more, 0) for now, more in zip(work.streams, work.arriving, strict=True)]
    joining = Joining((joined - seconds) * num_steps, per_step / num_steps * learnt.gap_share)
    return StreamPace(gap, lateness(gap, streams, classes, max), streams), joining


def _num_steps(num_streams: float, depth: int) -> float:
    """Return the number of steps in which all streams get a token: they are spread over the steps in flight."""
    return min(max(num_streams, 1.0), depth)


_UNKNOWN = Joins(*[0.0] * len(Joins._fields))  # when steps begin
_MOST_STEPS = 64  # taken one by one: those between two reports are fewer, unless the replica is silent
_IDLE = LiveProfile("", 0)  # a replica that has not reported yet


def _delays_streams(policy: str, streams: Sequence[float]) -> list[bool]:
    """Return whether the chunks of each class delay streams. Adaptive chunks delay no stream of a more urgent class."""
    fits = meaning_of(policy).fits_streams
    most_urgent = first_nonzero(streams)
    return [not fits or priority <= most_urgent for priority in range(len(streams))]


def _urgent_seconds(groups: Sequence[Sequence[Group]]) -> list[float]:
    """Return the seconds of prompts that are more urgent than each class. `groups`: by priority."""
    found, more_urgent = list[float](), 0.0
    for of_class in groups:
        found.append(more_urgent)
        for _, seconds in of_class:
            more_urgent += seconds
    return found
