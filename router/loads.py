"""The figures of all replicas that predictions need, as named arrays, and how one replica's figures are made.

`ReplicaFigures` declares each figure once: of one replica in a `Row`, of every replica in `Loads`, which predict.py
reads. `row` builds a replica's entry in named steps: backlog, streams, room, shares. `Row.write` puts it into `Loads`.
Adding a figure means one field in `ReplicaFigures`, and one line in `row`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from crossdock.router.room import free_later
from crossdock.router.work import BOOKED, REPORTED, Booking, Group, Work, first_nonzero
from crossdock.workers.report.advertise import LENGTHS, MOST_ENDS, LiveProfile
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.cost.formula import Floats, StepCosts
from crossdock.workers.schedule.pacing.chunk_policies import Lent, meaning_of
from crossdock.workers.schedule.pacing.chunking import LEAST_SHARE, free_tokens
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.slo import SloClass

Slots: TypeAlias = NDArray[np.intp]
Costs = TypeVar("Costs", StepCost, StepCosts)
One = TypeVar("One", float, Floats)
Each = TypeVar("Each", Sequence[float], Floats)

NUM_GROUPS = len(LENGTHS) + 1  # prompt lengths that are distinguished


@dataclass(slots=True)
class ReplicaFigures(Generic[Costs, One, Each]):
    """The figures of one replica, `One` float each, or of all replicas, an array each. `Each` has one per SLO class.

    "Now" counts what runs on the replica; "future" adds the requests that are on their way to decode there.
    """

    cost: Costs  # the coefficients of `StepCost`, in seconds
    interval_share: One  # of these seconds, after which another step of a full pipeline ends: see `IntervalShare`
    # Fixed properties.
    depth: One  # steps in flight: the stages of its pipeline
    chunk_gap: One  # a gap between the tokens of a stream, in steps that have a chunk each
    max_step_tokens: One  # tokens a step may hold
    page_size: One  # tokens
    num_layer_groups: One  # of layers with pages of their own
    num_full_groups: One  # of these, without a window
    window_pages: One  # of the others together, at most
    state_pages: One  # of each request's recurrent state
    page_bytes: One
    bytes_per_second: One  # at which its pages travel to another replica
    # What runs.
    refuses_late: One  # 1: the replica has work, and its admission refuses what would be late
    step_left: One  # seconds until a step begins that can have a chunk of a new prompt
    turn_left: One  # seconds until the running step ends: a replica takes in messages between two steps
    joins_until: One  # seconds from its last report, until which a new prompt
    first_join: One  # joins the step that begins then; after that, until `first_join`, the step that
    second_join: One  # begins then
    later_join: One  # seconds from the arrival of a prompt that comes later
    first_booked: One  # seconds from its last report until the first prompt was booked that no report includes
    step_streams: One  # that decode in a step, with the streams of now
    min_chunk: One  # tokens of a prompt that a step holds, at least
    lent_share: One  # of a prompt's pace on an idle replica, while streams lend: see `Lent`
    lent_seconds: One  # by which prompts end sooner, at most, because streams lend
    recent_excess_share: One  # share of its time that streams took recently, beyond the share they take now
    gap: One  # seconds between the tokens of a stream, with the streams of now and no prompt
    future_gap: One  # the same with the streams of the future, and a place in a step for one more
    token_share: One  # of what a decode takes in a step, by which one more makes that gap longer
    per_joining_decode: One  # seconds that one more decode adds to a step with the streams of the future
    lateness: One  # weighted seconds per token by which the streams of now are late with `gap`
    future_lateness: One  # the same in the future
    taken_at: One  # seconds from its last report, until which no request that waits takes free pages
    empty_pages: One  # that a request can take before cached ones are evicted; below 0: bookings will evict as many
    eviction_seconds: One  # of prefill that one evicted page is expected to cost
    load_first: One  # seconds to load a page from its fastest tier below the pool
    load_second: One  # the same from its second tier
    load_queue: One  # seconds until the loads that have begun will have ended
    # Pictures: the coefficients of `EncoderCost`, in seconds; 0 where pictures are not encoded, or take no time.
    encoder_base: One
    encoder_per_row: One
    encoder_per_square: One
    # Room, by priority.
    free_pages: Each
    free_places: Each  # requests that may still start; below 0: as many that wait cannot
    max_prompt_now: Each  # tokens of the longest prompt that waits for neither pages nor a place
    # Shares of the replica's time, `by priority`.
    prefill_share: Each  # for prompts of a class while the present streams run
    own_prefill_share: Each  # the same, less the recent share of more urgent prompts
    delays_streams: Each  # 1: streams wait for chunks of a class; 0: its chunks fit the TPOT of more urgent streams
    # Waiting prompts, `by priority`.
    urgent_reported: Each  # seconds of waiting prompts of more urgent classes, as last reported
    urgent_booked: Each  # the same, as booked since
    num_groups: Each  # prompt lengths that wait: the first positions of `groups`
    # Streams, `by priority`.
    streams: Each  # now
    future_streams: Each

    def waiting(self, priority: int) -> Any:
        """Return the counts and the seconds of prompts that wait, `[position]` each: REPORTED, BOOKED."""
        raise NotImplementedError

    def group_pages(self, num_pages: Any, slots: Any = None) -> Any:
        """Return how many pages all groups of layers together hold for a request whose tokens fill `num_pages`.

        `slots`: of these alone."""
        figures: Sequence[Any] = self.num_layer_groups, self.num_full_groups, self.window_pages
        groups, full, windows = figures if slots is None else [each[slots] for each in figures]
        return self.cost.smaller(groups * num_pages, full * num_pages + windows)

    def steps_left(self, age: Any) -> tuple[Any, Any]:
        """Return `turn_left` and `step_left`, `age` seconds after the last report."""
        chosen: Any = self.cost.chosen
        until = self.joins_until
        joins = chosen(age < until, self.first_join, self.second_join)
        ends = chosen(age < until, until, self.first_join)
        turn_left = chosen(age < ends, ends - age, self.later_join)
        return turn_left, chosen(age < joins, joins - age, self.later_join)


@dataclass(slots=True)
class Row(ReplicaFigures[StepCost, float, Sequence[float]]):
    """The entry of one replica in `Loads`."""

    groups: Sequence[Group] = ()  # waiting prompts by length
    ends: Sequence[tuple[float, float]] = ()  # (seconds since its last report, free pages) at ends of requests

    def grow_older(self, age: float) -> None:
        """Bring the figures that depend on the time to `age` seconds after the last report."""
        self.turn_left, self.step_left = self.steps_left(age)

    def waiting(self, priority: int) -> Sequence[Sequence[Sequence[float]]]:
        """Return the counts and the seconds of prompts that wait, `[position]` each: REPORTED, BOOKED."""
        found: list[list[list[float]]] = [[[], []], [[], []]]
        for source, of_class, _, count, seconds in self.groups:
            if of_class == priority:
                found[source][0].append(count)
                found[source][1].append(seconds)
        return found

    def write(self, loads: "Loads", slot: int) -> None:
        """Replace the entry of the replica in `slot`."""
        columns = [*self.cost.coefficients, *_per_replica(self)]
        for figures in _per_class(self):
            columns += figures
        loads.columns[:, slot] = columns
        loads.groups[..., slot] = 0.0
        for source, priority, position, count, seconds in self.groups:
            loads.groups[source, 0, priority, position, slot] = count
            loads.groups[source, 1, priority, position, slot] = seconds
        if not self.ends:  # the usual case
            loads.ends[..., slot] = 0.0
            return
        times, freed = [at for at, _ in self.ends], [free - self.free_pages[-1] for _, free in self.ends]
        unknown = MOST_ENDS - len(self.ends)  # behind the last end
        loads.ends[..., slot] = times + times[-1:] * unknown, freed + freed[-1:] * unknown


@dataclass(slots=True)
class Loads(ReplicaFigures[StepCosts, Floats, Floats]):
    """Every replica's row, as arrays over replica slots: `[slot]`, and `[priority, slot]` where it is per class."""

    columns: Floats  # [column, slot]: all arrays above, in the order of `ReplicaFigures`
    groups: Floats  # [REPORTED or BOOKED, 0 count or 1 seconds, priority, position, slot]: waiting prompts by length
    ends: Floats  # [0 seconds since the last report or 1 free pages beyond `free_pages` then, place, slot]: of requests

    def at(self, slots: Slots) -> "Loads":
        """Return the loads of these slots alone, in this order."""
        return _of(*(figures.take(slots, axis=-1) for figures in (self.columns, self.groups, self.ends)))

    def waiting(self, priority: int) -> Floats:
        """Return the counts and the seconds of prompts that wait, `[position, slot]` each: REPORTED, BOOKED."""
        found: Floats = self.groups[:, :, priority, : int(np.maximum.reduce(self.num_groups[priority]))]
        return found


_COEFFICIENTS = tuple(column.name for column in fields(StepCosts))  # the first columns
_NAMES_PER_REPLICA = tuple(column.name for column in fields(ReplicaFigures) if column.type is One)
_NAMES_PER_CLASS = tuple(column.name for column in fields(ReplicaFigures) if column.type is Each)
_SINGLE = (*_COEFFICIENTS, *_NAMES_PER_REPLICA)
_per_replica, _per_class = attrgetter(*_NAMES_PER_REPLICA), attrgetter(*_NAMES_PER_CLASS)
_NO_LIMIT = 1e12  # tokens: more than any prompt has; seconds: never


def blank(num_slots: int, num_classes: int) -> Loads:
    """Return the loads of `num_slots` slots without a replica. Their figures are harmless where all slots are computed
    at once: no division by 0, no wait for room."""
    columns = np.zeros((len(_SINGLE) + len(_NAMES_PER_CLASS) * num_classes, num_slots))
    groups, ends = np.zeros((2, 2, num_classes, NUM_GROUPS, num_slots)), np.zeros((2, MOST_ENDS, num_slots))
    loads = _of(columns, groups, ends)
    divisors = (loads.page_size, loads.bytes_per_second, loads.prefill_share, loads.own_prefill_share)
    for divisor in (*divisors, loads.lent_share, loads.interval_share, loads.depth):
        divisor[:] = 1.0
    loads.max_step_tokens[:] = loads.max_prompt_now[:] = loads.taken_at[:] = _NO_LIMIT
    return loads


def _of(columns: Floats, groups: Floats, ends: Floats) -> Loads:
    """Return the loads whose arrays are views of `columns`, which are in the order of the fields."""
    num_coefficients, num_single, num_classes = len(_COEFFICIENTS), len(_SINGLE), groups.shape[2]
    cost, single = StepCosts(*columns[:num_coefficients]), columns[num_coefficients:num_single]
    classes = columns[num_single:].reshape(len(_NAMES_PER_CLASS), num_classes, -1)
    figures: Sequence[Any] = (cost, *single, *classes, columns, groups, ends)
    return Loads(*figures)


def row(
    profile: SchedulingProfile,
    live: LiveProfile | None,
    booked: Collection[Booking],
    classes: Sequence[SloClass],
    reported_at: float = 0.0,
    kept: "KeptPace | None" = None,
) -> Row:
    """Make the row of one replica, which reported `live` at `reported_at`. `booked`: what `live` does not include.
    `kept`: of the replica, from the row before."""
    live = live or _IDLE
    cost, interval_share, encoder = _costs(profile, live)
    work = Work.of(live, len(classes), booked)
    streams, num_streams, num_arriving = work.streams, sum(work.streams), max(sum(work.arriving), 0.0)
    pace = (kept or KeptPace()).of(work, cost, profile, interval_share, live, classes)
    gap, shares = pace.gap, pace.shares
    future_gap, token_share, per_joining_decode = _future(work, cost, profile, interval_share, live.gap_share)
    future_streams = [now + more if more > 0 else now for now, more in zip(streams, work.arriving, strict=True)]
    groups, num_groups, urgent = work.backlog(len(classes))
    free_pages, free_places, max_prompt_now, free_then, free_now = work.room(profile, live, len(classes))
    has_room = min(max_prompt_now) >= profile.max_model_len and not live.lacking  # for any prompt, and for those here
    ends = [] if has_room else free_later(live, booked, free_then, max(gap, cost.base), shares[0])
    coming = [(each.at - reported_at, each.seconds) for each in booked if each.seconds and not each.has_first]
    joins = _joins(work, live, gap, pace.chunk_s, sorted(coming), profile.runs_ahead)
    return Row(
        cost=cost,
        interval_share=interval_share,
        depth=profile.pipeline_parallel_size,
        chunk_gap=max(profile.pipeline_parallel_size * interval_share, 1.0),
        max_step_tokens=profile.max_num_batched_tokens,
        page_size=profile.page_size,
        num_layer_groups=len(profile.windows),
        num_full_groups=profile.needs.num_full_groups,
        window_pages=profile.needs.window_pages,
        state_pages=profile.state_pages,
        page_bytes=profile.page_bytes,
        bytes_per_second=live.bytes_per_second or profile.bytes_per_second,
        refuses_late=profile.admission == "reject" and bool(num_streams or num_arriving or groups),
        joins_until=joins.joins_until,
        first_join=joins.first_join,
        second_join=joins.second_join,
        later_join=joins.later_join,
        step_left=0.0,  # both made of the others before each choice
        turn_left=0.0,
        first_booked=min([each.at for each in booked], default=reported_at) - reported_at,
        step_streams=pace.step.decodes,
        min_chunk=pace.min_chunk,
        lent_share=pace.lent.share,
        lent_seconds=pace.lent.seconds,
        recent_excess_share=max(live.stream_share - (1 - shares[0]), 0.0),
        gap=gap,
        future_gap=future_gap,
        token_share=token_share,
        per_joining_decode=per_joining_decode,
        lateness=pace.lateness,
        future_lateness=lateness(future_gap, future_streams, classes),
        taken_at=min([at for at, free in ends if free < free_now], default=_NO_LIMIT),
        empty_pages=live.empty_pages - (sum(work.booked_needs) - work.booked_idle_pages),
        eviction_seconds=live.eviction_seconds,
        load_first=live.load_seconds[0] if live.load_seconds else 0.0,
        load_second=live.load_seconds[-1] if live.load_seconds else 0.0,
        load_queue=live.load_queue,
        encoder_base=encoder.base,
        encoder_per_row=encoder.per_row,
        encoder_per_square=encoder.per_square,
        free_pages=free_pages,
        free_places=free_places,
        max_prompt_now=max_prompt_now,
        prefill_share=[max(share, LEAST_SHARE) for share in shares],
        own_prefill_share=_own_shares(shares, live.prompt_shares),
        delays_streams=_delays_streams(profile.chunk_policy, streams),
        urgent_reported=[each + live.in_flight_seconds for each in urgent[REPORTED]],
        urgent_booked=urgent[BOOKED],
        num_groups=num_groups,
        streams=streams,
        future_streams=future_streams,
        groups=groups,
        ends=ends,
    )


def _costs(profile: SchedulingProfile, live: LiveProfile) -> tuple[StepCost, float, EncoderCost]:
    """Return the costs of steps and of pictures, and the interval share between: learnt ones, or those of the start."""
    encoder = _encoder_cost_of(live.encoder_cost) if live.encoder_cost else profile.encoder_cost or _NO_ENCODER
    if live.cost:
        return _cost_of(live.cost), live.interval_share, encoder
    return profile.cost, profile.interval_share, encoder


class _Joins(NamedTuple):
    """When a new prompt joins a step: see `ReplicaFigures`."""

    joins_until: float
    first_join: float
    second_join: float
    later_join: float


def _joins(
    work: Work, live: LiveProfile, gap: float, chunk_s: float, coming: list[tuple[float, float]], runs_ahead: bool
) -> _Joins:
    """Return when a new prompt joins a step. A step has chunks of `chunk_s` at most where prompts wait.

    A replica that runs ahead schedules a step when the one before it begins: a prompt joins the step after the next.
    `coming`: seconds since the report at which prompts were booked, and their own, in order of time."""
    streams_s = gap if sum(work.streams) else 0.0
    later = min(live.step_seconds, gap) / 2 + (streams_s if runs_ahead else 0.0)
    waiting = sum([seconds for _, seconds in work.reported.values()]) if live.step_seconds else 0.0
    if live.pages_now > live.free_pages:  # some wait for pages, not for a step
        waiting = min(waiting, live.started_seconds)
    waiting += sum([seconds for at, seconds in coming if at <= 0])  # on their way as the replica reported
    coming, begins, running = [each for each in coming if each[0] > 0], 0.0, live.in_flight_seconds
    if not (running or waiting or (streams_s and coming)):  # it was idle until one came
        if not coming:
            return _Joins(0.0, 0.0, 0.0, later)
        (begins, waiting), *coming = coming
    if not running and not (runs_ahead and streams_s):
        running, waiting = min(waiting, chunk_s), max(waiting - chunk_s, 0.0)
    ends = begins + gap + running
    if not runs_ahead:
        return _Joins(ends, ends, ends, later)
    first = ends + _step_seconds(gap, streams_s, min(waiting, chunk_s))
    waiting = max(waiting - chunk_s, 0.0) + sum([seconds for at, seconds in coming if at < ends])
    return _Joins(ends, first, first + _step_seconds(gap, streams_s, min(waiting, chunk_s)), later)


def _step_seconds(gap: float, streams_s: float, chunk_s: float) -> float:
    """Return the seconds of a step with chunks of `chunk_s`; without, and without streams, there is none."""
    return gap + chunk_s if chunk_s else streams_s


_cost_of = lru_cache(maxsize=4096)(StepCost.of)  # rows are made far more often than costs are learnt
_NO_ENCODER = EncoderCost(base=0.0, per_row=0.0, per_square=0.0)


@lru_cache(maxsize=4096)
def _encoder_cost_of(coefficients: tuple[float, float, float]) -> EncoderCost:
    base, per_row, per_square = coefficients
    return EncoderCost(base=base, per_row=per_row, per_square=per_square)


class _Pace(NamedTuple):
    """How fast streams and prompts are with the streams of now: see `ReplicaFigures`."""

    step: StepWork  # of the streams, without chunks
    gap: float
    shares: Sequence[float]  # by priority: `Work.prefill_shares`
    lent: Lent
    min_chunk: float
    chunk_s: float  # seconds that chunks take in a step beside the streams, at most
    lateness: float


@dataclass(slots=True)
class KeptPace:
    """Keeps the pace of one replica while its report and its streams stay as they are: most bookings change neither."""

    _key: tuple[object, ...] = ()  # what the pace that is kept follows from
    _kept: _Pace | None = None

    def of(
        self,
        work: Work,
        cost: StepCost,
        profile: SchedulingProfile,
        interval_share: float,
        live: LiveProfile,
        classes: Sequence[SloClass],
    ) -> _Pace:
        """Return the pace with the streams of `work`."""
        key = id(profile), id(live), id(classes), work.context, work.adapters, *work.streams, *work.joining
        if self._kept is None or key != self._key[:-1]:
            self._kept = _pace(work, cost, profile, interval_share, live, classes)
            self._key = *key, (profile, live, classes)  # the last: so that no other object gets their ids
        return self._kept


def _pace(
    work: Work,
    cost: StepCost,
    profile: SchedulingProfile,
    interval_share: float,
    live: LiveProfile,
    classes: Sequence[SloClass],
) -> _Pace:
    """Return the pace with the streams of `work`."""
    num_streams = sum(work.streams)
    num_steps, per_step = _steps_between_tokens(num_streams, profile.pipeline_parallel_size, interval_share)
    step = StepWork.of_streams(num_streams, work.context, work.adapters, num_steps)
    alone = cost.seconds(step)
    gap = alone * per_step * live.gap_share
    shares, lent = work.prefill_shares(profile, cost, interval_share, classes, live.lead_s)
    min_chunk, share = max(profile.max_num_batched_tokens - num_streams, 1.0), shares[0]
    most = profile.max_num_batched_tokens * cost.per_prefill_token
    if not meaning_of(profile.chunk_policy).fits_streams:
        return _Pace(step, gap, shares, lent, min_chunk, most, lateness(gap, work.streams, classes))
    min_chunk = min(free_tokens(cost, step, 0, profile.min_chunk_tokens, alone=alone), min_chunk)
    chunk_s = max(gap * share / (1 - share), min_chunk * cost.per_prefill_token) if share < 1 else most
    return _Pace(step, gap, shares, lent, min_chunk, min(chunk_s, most), lateness(gap, work.streams, classes))


class _Future(NamedTuple):
    """Seconds that streams will wait for tokens with those that arrive: see `ReplicaFigures`."""

    future_gap: float
    token_share: float
    per_joining_decode: float


def _future(work: Work, cost: StepCost, profile: SchedulingProfile, interval_share: float, gap_share: float) -> _Future:
    """Return the pace of the streams to come. `gap_share`: see `LiveProfile`."""
    num_future = sum(work.streams) + max(sum(work.arriving), 0.0)
    num_steps, per_step = _steps_between_tokens(num_future + 1, profile.pipeline_parallel_size, interval_share)
    context = work.context + work.future_context
    future = StepWork.of_streams(num_future, context, work.future_adapters, num_steps)
    seconds = cost.seconds(future)
    joined = cost.seconds(StepWork.of_streams(num_future + 1, context, work.future_adapters, num_steps))
    # With drafts, a step brings several tokens.
    return _Future(seconds * per_step * gap_share, per_step / num_steps * gap_share, (joined - seconds) * num_steps)


def _steps_between_tokens(num_streams: float, depth: int, interval_share: float) -> tuple[float, float]:
    """Return the number of steps in which all streams get a token, and a gap divided by the seconds of one step.

    Streams are spread over the steps in flight. A gap between two tokens is the latency of a step. Where stages are not
    alike, the intervals of all these steps may take longer; then these are the gap.
    """
    num_steps = min(max(num_streams, 1.0), depth)
    return num_steps, max(num_steps * interval_share, 1.0)


_IDLE = LiveProfile("", 0, ())  # a replica that has not reported yet


def _delays_streams(policy: str, streams: Sequence[float]) -> list[bool]:
    """Return whether the chunks of each class delay streams. Adaptive chunks delay no stream of a more urgent class."""
    fits, most_urgent = meaning_of(policy).fits_streams, first_nonzero(streams)
    return [not fits or priority <= most_urgent for priority in range(len(streams))]


def _own_shares(shares: Sequence[float], recent: Sequence[float]) -> list[float]:
    """Return each class's share less the `recent` shares of the more urgent classes."""
    own, more_urgent = [], 0.0
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
