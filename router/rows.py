"""How one replica's figures are made: backlog, streams, room, shares. loads.py declares the figures."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from crossdock.router.loads import (
    NO_LIMIT,
    EncoderPrices,
    Joining,
    Joins,
    PageSizes,
    PromptQueue,
    PromptShares,
    RoomFigures,
    Row,
    StepsInFlight,
    StreamPace,
    TierPrices,
)
from crossdock.router.room import free_later
from crossdock.router.work import BOOKED, REPORTED, InFlightLoad, Work
from crossdock.workers.report.live_profile import LiveProfile
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.cost.stages import gap_of
from crossdock.workers.schedule.first_token import (
    ChunkLimits,
    PromptSteps,
    Sharing,
    first_nonzero,
    overrun_when_full,
    queue_seconds,
)
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.policies.chunk_policies import Lent, meaning_of
from crossdock.workers.schedule.policies.chunking import LEAST_SHARE, free_tokens
from crossdock.workers.schedule.request.slo import SloClass


def row(
    profile: SchedulingProfile,
    live: LiveProfile | None,
    booked: Collection[InFlightLoad],
    classes: Sequence[SloClass],
    reported_at: float = 0.0,
    kept: "KeptPace | None" = None,
) -> Row:
    """Make the row of one replica, which reported `live` at `reported_at`. `booked`: what `live` does not include.
    `kept`: of the replica, from the row before."""
    live = live or _IDLE
    costs = _costs(profile, live)
    cost, interval_share, encoder = costs.step, costs.interval_share, costs.encoder
    work = Work.of(live, len(classes), booked)
    streams, num_streams, num_arriving = work.streams, sum(work.streams), max(sum(work.arriving), 0.0)
    pace = (kept or KeptPace()).of(work, costs, profile, live, classes)
    gap, shares = pace.gap, pace.shares
    future_gap, joining = _future(work, cost, profile, interval_share, live.learnt.gap_share)
    future_streams = [now + more if more > 0 else now for now, more in zip(streams, work.arriving, strict=True)]
    groups, num_groups, urgent = work.backlog(len(classes))
    room = work.room(profile, live, len(classes))
    # For any prompt, and for the prompts that wait here.
    has_room = min(room.longest_prompt) >= profile.max_model_len and not live.room.lacking
    ends = [] if has_room else free_later(live, booked, room.pages_before, max(gap, cost.base), shares[0])
    coming = [(each.at - reported_at, each.seconds) for each in booked if each.seconds and not each.has_first]
    chunk_s = pace.chunk_s if num_streams else _chunk_seconds(live, profile, cost)
    evicting = sum(work.booked_needs) - work.booked_idle_pages
    page_seconds = live.tiers.page_seconds or (0.0,)
    return Row(
        cost=cost,
        pipeline=StepsInFlight(
            profile.pipeline_parallel_size, interval_share, gap_of(profile.pipeline_parallel_size, interval_share)
        ),
        prompt_steps=pace.prompt_steps,
        pages=_page_sizes(profile, live),
        refuses_late=profile.admission == "reject" and bool(num_streams or num_arriving or groups),
        joins=_joins(work, live, gap, chunk_s, coming, profile.runs_ahead),
        step_streams=pace.step.decodes,
        min_chunk=pace.min_chunk,
        lent=pace.lent,
        now=StreamPace(gap, pace.lateness, streams),
        future=StreamPace(future_gap, lateness(future_gap, future_streams, classes), future_streams),
        joining=joining,
        room=RoomFigures(
            min([at for at, free in ends if free < room.pages_now], default=NO_LIMIT),
            live.room.empty_pages - evicting,
            live.room.eviction_seconds,
            room.pages,
            room.slots,
            room.longest_prompt,
        ),
        tiers=TierPrices(page_seconds[0], page_seconds[-1], live.tiers.queue_seconds),
        encoder=EncoderPrices(encoder.base, encoder.per_embedding_token, encoder.per_square),
        shares=PromptShares(
            max(live.shares.streams - (1 - shares[0]), 0.0),
            [max(share, LEAST_SHARE) for share in shares],
            _own_shares(shares, live.shares.prompts),
            _delays_streams(profile.chunk_policy, streams),
        ),
        queue=PromptQueue(
            min([each.at for each in booked], default=reported_at) - reported_at,
            [each + live.prefills.in_flight_seconds for each in urgent[REPORTED]],
            urgent[BOOKED],
            num_groups,
        ),
        groups=groups,
        ends=ends,
        lacking=[(each.pages, each.waited_s) for each in live.room.lacking if each.waited_s],
    )


def _page_sizes(profile: SchedulingProfile, live: LiveProfile) -> PageSizes[float]:
    needs = profile.needs
    sizes = profile.page_size, len(profile.windows), needs.num_full_groups, needs.window_pages, profile.state_pages
    return PageSizes(*sizes, profile.page_bytes, live.bytes_per_second or profile.bytes_per_second)


class _Costs(NamedTuple):
    """Prices the steps of a replica, as learnt so far or as measured at its start."""

    step: StepCost
    interval_share: float
    overrun: float  # see `overrun_when_full`
    encoder: EncoderCost


def _costs(profile: SchedulingProfile, live: LiveProfile) -> _Costs:
    learnt = live.learnt
    encoder = profile.encoder_cost or _NO_ENCODER
    if learnt.encoder_cost:
        encoder = _encoder_cost_of(learnt.encoder_cost)
    if learnt.cost:
        return _Costs(_cost_of(learnt.cost), learnt.interval_share, learnt.overrun, encoder)
    return _Costs(profile.cost, profile.interval_share, profile.overrun, encoder)


def _chunk_seconds(live: LiveProfile, profile: SchedulingProfile, cost: StepCost) -> float:
    """Return the seconds that chunks take in a step without streams, at most: more where prompts wait."""
    classes = profile.slo_classes
    groups = [(min(group.priority, len(classes) - 1), group.tokens, group.count) for group in live.prefills.groups]
    tightest = min([classes[priority].ttft_s for priority, _, _ in groups], default=0.0)
    seconds = [queue_seconds(cost, [(priority, tokens)], classes, tightest) for priority, tokens, _ in groups]
    # The prompt that is computed first is not behind itself: it is known as one of its group.
    first = max([each / count for each, (_, _, count) in zip(seconds, groups, strict=True) if count], default=0.0)
    steps = PromptSteps.of(profile, cost, sum(seconds) - first)
    return float(min(steps.max_step_tokens * cost.per_prefill_token, steps.max_chunk_s))


def _joins(
    work: Work, live: LiveProfile, gap: float, chunk_s: float, coming: list[tuple[float, float]], runs_ahead: bool
) -> Joins[float]:
    """Return when a new prompt joins a step. A step has chunks of `chunk_s` at most where prompts wait.

    A replica that runs ahead schedules a step when the one before it begins: a prompt joins the step after the next.
    `coming`: seconds since the report at which prompts were booked, and their own, in order of time."""
    streams_s = gap if sum(work.streams) else 0.0
    later = min(live.step_seconds, gap) / 2 + (streams_s if runs_ahead else 0.0)
    waiting = sum([seconds for _, seconds in work.reported.values()]) if live.step_seconds else 0.0
    if live.room.pages_now > live.room.free_pages:  # some wait for pages, not for a step
        waiting = min(waiting, live.prefills.started_seconds)
    waiting += sum([seconds for at, seconds in coming if at <= 0])  # on their way as the replica reported
    coming = [each for each in coming if each[0] > 0]
    begins = 0.0
    running = live.prefills.in_flight_seconds
    if not (running or waiting):  # there was no prompt until one came
        if not coming:
            return Joins(0.0, 0.0, 0.0, later, 0.0)
        if streams_s:
            begins = coming[0][0] // gap * gap  # of the step of streams that ran then
        else:
            (begins, waiting), *coming = coming
    if not running and not (runs_ahead and streams_s):
        running = min(waiting, chunk_s)
        waiting = max(waiting - chunk_s, 0.0)
    ends = begins + gap + running
    came = sum([seconds for at, seconds in coming if at < ends])
    if not runs_ahead:
        return Joins(ends, ends, ends, later, _step_seconds(gap, 0.0, min(waiting + came, chunk_s)))
    first = ends + _step_seconds(gap, streams_s, min(waiting, chunk_s))
    waiting = max(waiting - chunk_s, 0.0) + came
    waiting_s = min(waiting, chunk_s)
    second = first + _step_seconds(gap, streams_s, waiting_s)
    return Joins(ends, first, second, later, _step_seconds(gap, 0.0, waiting_s))


def _step_seconds(gap: float, streams_s: float, chunk_s: float) -> float:
    """Return the seconds of a step with chunks of `chunk_s`; without, and without streams, there is none."""
    return gap + chunk_s if chunk_s else streams_s


_cost_of = lru_cache(maxsize=4096)(StepCost.of)  # rows are made far more often than costs are learnt
_NO_ENCODER = EncoderCost(base=0.0, per_embedding_token=0.0, per_square=0.0)


@lru_cache(maxsize=4096)
def _encoder_cost_of(coefficients: tuple[float, float, float]) -> EncoderCost:
    base, per_embedding_token, per_square = coefficients
    return EncoderCost(base=base, per_embedding_token=per_embedding_token, per_square=per_square)


class _Pace(NamedTuple):
    """How fast streams and prompts are with the streams of now: see `ReplicaFigures`."""

    step: StepWork  # of the streams, without chunks
    gap: float
    shares: Sequence[float]  # by priority: see `Sharing`
    lent: Lent
    min_chunk: float
    chunk_s: float  # seconds that chunks take in a step beside the streams, at most
    lateness: float
    prompt_steps: PromptSteps  # of a prompt beside no stream


@dataclass(slots=True)
class KeptPace:
    """Keeps the pace of one replica while its report and its streams stay as they are: most requests change neither."""

    _key: tuple[object, ...] = ()  # what the pace that is kept follows from
    _kept: _Pace | None = None

    def of(
        self,
        work: Work,
        costs: _Costs,
        profile: SchedulingProfile,
        live: LiveProfile,
        classes: Sequence[SloClass],
    ) -> _Pace:
        """Return the pace with the streams of `work`."""
        key = id(profile), id(live), id(classes), work.context, work.adapters, *work.streams, *work.joining
        if self._kept is None or key != self._key[:-1]:
            self._kept = _pace(work, costs, profile, live, classes)
            self._key = *key, (profile, live, classes)  # the last: so that no other object gets their ids
        return self._kept


def _pace(
    work: Work,
    costs: _Costs,
    profile: SchedulingProfile,
    live: LiveProfile,
    classes: Sequence[SloClass],
) -> _Pace:
    """Return the pace with the streams of `work`."""
    cost = costs.step
    num_streams = sum(work.streams)
    num_steps, per_step = _steps_between_tokens(num_streams, profile.pipeline_parallel_size, costs.interval_share)
    step = StepWork.of_streams(num_streams, work.context, work.adapters, num_steps)
    alone = cost.seconds(step)
    gap = alone * per_step * live.learnt.gap_share
    depth = profile.pipeline_parallel_size
    decoding = work.decoding(depth)
    limits = ChunkLimits(
        profile.chunk_policy,
        profile.min_chunk_tokens,
        profile.max_num_batched_tokens,
        profile.page_size,
        overrun_when_full(costs.overrun, depth, costs.interval_share),
    )
    sharing = Sharing.of(cost, limits, decoding, classes)
    shares = sharing.shares(len(classes))
    lent = sharing.lent(0, shares[0], live.streams.lead_s)
    min_chunk = max(profile.max_num_batched_tokens - num_streams, 1.0)
    share = shares[0]
    steps = PromptSteps.of(profile, cost)
    most = steps.max_step_tokens * cost.per_prefill_token
    if not num_streams:
        most = min(most, steps.max_chunk_s)
    if not meaning_of(profile.chunk_policy).fits_streams:
        return _Pace(step, gap, shares, lent, min_chunk, most, lateness(gap, work.streams, classes), steps)
    min_chunk = min(free_tokens(cost, step, 0, profile.min_chunk_tokens, alone=alone), min_chunk)
    chunk_s = max(gap * share / (1 - share), min_chunk * cost.per_prefill_token) if share < 1 else most
    late = lateness(gap, work.streams, classes)
    return _Pace(step, gap, shares, lent, min_chunk, min(chunk_s, most), late, steps)


def _future(
    work: Work, cost: StepCost, profile: SchedulingProfile, interval_share: float, gap_share: float
) -> tuple[float, Joining[float]]:
    """Return the gap between tokens of the streams to come, and what one more adds. `gap_share`: see `Learnt`."""
    num_future = sum(work.streams) + max(sum(work.arriving), 0.0)
    num_steps, per_step = _steps_between_tokens(num_future + 1, profile.pipeline_parallel_size, interval_share)
    context = work.context + work.future_context
    future = StepWork.of_streams(num_future, context, work.future_adapters, num_steps)
    seconds = cost.seconds(future)
    joined = cost.seconds(StepWork.of_streams(num_future + 1, context, work.future_adapters, num_steps))
    # With drafts, a step brings several tokens.
    return seconds * per_step * gap_share, Joining((joined - seconds) * num_steps, per_step / num_steps * gap_share)


def _steps_between_tokens(num_streams: float, depth: int, interval_share: float) -> tuple[float, float]:
    """Return the number of steps in which all streams get a token, and a gap divided by the seconds of one step.

    Streams are spread over the steps in flight. A gap between two tokens is the latency of a step. Where stages are not
    alike, the intervals of all these steps may take longer; then these are the gap.
    """
    num_steps = min(max(num_streams, 1.0), depth)
    return num_steps, gap_of(num_steps, interval_share)


_IDLE = LiveProfile("", 0)  # a replica that has not reported yet


def _delays_streams(policy: str, streams: Sequence[float]) -> list[bool]:
    """Return whether the chunks of each class delay streams. Adaptive chunks delay no stream of a more urgent class."""
    fits = meaning_of(policy).fits_streams
    most_urgent = first_nonzero(streams)
    return [not fits or priority <= most_urgent for priority in range(len(streams))]


def _own_shares(shares: Sequence[float], recent: Sequence[float]) -> list[float]:
    """Return each class's share less the `recent` shares of the more urgent classes."""
    own = []
    more_urgent = 0.0
    for priority, share in enumerate(shares):
        own.append(max(share - more_urgent, LEAST_SHARE))
        if priority < len(recent):
            more_urgent += recent[priority]
    return own


def lateness(gap: float, streams: Sequence[float], classes: Sequence[SloClass]) -> float:
    """Return the seconds per token by which streams are late in a step of `gap` seconds, weighted by class."""
    late = 0.0
    for priority, slo in enumerate(classes):
        if gap > slo.tpot_s:
            late += streams[priority] * slo.weight * (gap - slo.tpot_s)
    return late
