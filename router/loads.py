"""The figures of all replicas that predictions need, as named arrays, and how one replica's figures are made.

`row` builds the entry in named steps: backlog, streams, room, shares. `Row.write` puts it into the arrays of `Loads`,
where `predict` reads it. Adding a figure means one field in `Row`, the same field in `Loads`, and one line in `row`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdock.router.work import BOOKED, REPORTED, Booking, Group, Work, first_nonzero
from crossdock.workers.report.advertise import LENGTHS, LiveProfile
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.pacing.chunking import LEAST_SHARE, free_tokens
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.slo import SloClass

Floats: TypeAlias = NDArray[np.float64]

NUM_GROUPS = len(LENGTHS) + 1  # prompt lengths that are distinguished


@dataclass(slots=True)
class Row:
    """The entry of one replica in `Loads`, whose comments say what each figure is. Lists have one figure per class."""

    base: float
    per_prefill_token: float
    per_attended: float
    per_decode: float
    per_context: float
    bend_rows: float
    per_early_row: float
    least_with_chunk: float
    interval_share: float
    depth: float
    max_step_tokens: float
    is_adaptive: float
    page_size: float
    num_layer_groups: float
    num_full_groups: float
    window_pages: float
    state_pages: float
    page_bytes: float
    bytes_per_second: float
    refuses_late: float
    step_left: float
    step_streams: float
    min_chunk: float
    recent_excess_share: float
    gap: float
    future_gap: float
    token_share: float
    per_joining_decode: float
    most_urgent_stream: float
    lateness: float
    future_lateness: float
    stream_turnover: float
    stream_pages: float
    empty_pages: float
    eviction_seconds: float
    encoder_base: float
    encoder_per_row: float
    encoder_per_square: float
    takes_rows: float
    free_pages: Sequence[float]
    free_places: Sequence[float]
    max_prompt_now: Sequence[float]
    prefill_share: Sequence[float]
    own_prefill_share: Sequence[float]
    urgent_reported: Sequence[float]
    urgent_booked: Sequence[float]
    num_groups: Sequence[float]
    streams: Sequence[float]
    future_streams: Sequence[float]
    groups: Sequence[Group] = ()

    def write(self, loads: "Loads", slot: int) -> None:
        """Replace the entry of the replica in `slot`."""
        columns = [*_per_replica(self)]
        for figures in _per_class(self):
            columns += figures
        loads.columns[:, slot] = columns
        loads.groups[..., slot] = 0.0
        for source, priority, position, count, seconds in self.groups:
            loads.groups[source, 0, priority, position, slot] = count
            loads.groups[source, 1, priority, position, slot] = seconds


@dataclass(slots=True)
class Loads:
    """Every replica's row, as arrays over replica slots: `[slot]`, and `[priority, slot]` where it is per class.

    "Now" counts what runs on the replica; "future" adds the requests that are on their way to decode there.
    """

    # Costs of a step, in seconds: the coefficients of `StepCost`.
    base: Floats
    per_prefill_token: Floats
    per_attended: Floats
    per_decode: Floats
    per_context: Floats
    bend_rows: Floats  # not seconds, but prompt tokens and decodes
    per_early_row: Floats
    least_with_chunk: Floats
    interval_share: Floats  # of these seconds, after which another step of a full pipeline ends: see `IntervalShare`
    # Fixed properties.
    depth: Floats  # steps in flight: the stages of its pipeline
    max_step_tokens: Floats  # tokens a step may hold
    is_adaptive: Floats  # 1: chunks fit the streams' TPOT; 0: chunks fill the step's tokens
    page_size: Floats  # tokens
    num_layer_groups: Floats  # of layers with pages of their own
    num_full_groups: Floats  # of these, without a window
    window_pages: Floats  # of the others together, at most
    state_pages: Floats  # of each request's recurrent state
    page_bytes: Floats
    bytes_per_second: Floats  # at which its pages travel to another replica
    # What runs.
    refuses_late: Floats  # 1: the replica has work, and its admission refuses what would be late
    step_left: Floats  # seconds until the running step ends, on average
    step_streams: Floats  # that decode in a step, with the streams of now
    min_chunk: Floats  # tokens of a prompt that a step holds, at least
    recent_excess_share: Floats  # share of its time that streams took recently, beyond the share they take now
    gap: Floats  # seconds between the tokens of a stream, with the streams of now and no prompt
    future_gap: Floats  # the same with the streams of the future, and a place in a step for one more
    token_share: Floats  # of what a decode takes in a step, by which one more makes that gap longer
    per_joining_decode: Floats  # seconds that one more decode adds to a step with the streams of the future
    most_urgent_stream: Floats  # priority of the most urgent stream of now; the number of classes if there is none
    lateness: Floats  # weighted seconds per token by which the streams of now are late with `gap`
    future_lateness: Floats  # the same in the future
    stream_turnover: Floats  # seconds from one stream's end to the next
    stream_pages: Floats  # pages that one stream frees at its end
    empty_pages: Floats  # that a request can take before cached ones are evicted; below 0: bookings will evict as many
    eviction_seconds: Floats  # of prefill that one evicted page is expected to cost
    # Pictures: the coefficients of `EncoderCost`, in seconds; 0 where pictures are not encoded, or take no time.
    encoder_base: Floats
    encoder_per_row: Floats
    encoder_per_square: Floats
    takes_rows: Floats  # 1: encode replicas may send it embeddings
    # Room, `[priority, slot]`.
    free_pages: Floats
    free_places: Floats  # requests that may still start; below 0: as many that wait cannot
    max_prompt_now: Floats  # tokens of the longest prompt that waits for neither pages nor a place
    # Shares of the replica's time, `[priority, slot]`.
    prefill_share: Floats  # for prompts of a class while the present streams run
    own_prefill_share: Floats  # the same, less the recent share of more urgent prompts
    # Waiting prompts, `[priority, slot]`.
    urgent_reported: Floats  # seconds of waiting prompts of more urgent classes, as last reported
    urgent_booked: Floats  # the same, as booked since
    num_groups: Floats  # prompt lengths that wait: the first positions of `groups`
    # Streams, `[priority, slot]`.
    streams: Floats  # now
    future_streams: Floats
    # Storage.
    columns: Floats  # [column, slot]: all arrays above, in the order of `Row`
    groups: Floats  # [REPORTED or BOOKED, 0 count or 1 seconds, priority, position, slot]: waiting prompts by length


_NAMES_PER_REPLICA = tuple(column.name for column in fields(Row) if column.type is float)
_NAMES_PER_CLASS = tuple(column.name for column in fields(Row) if column.type == Sequence[float])
_per_replica, _per_class = attrgetter(*_NAMES_PER_REPLICA), attrgetter(*_NAMES_PER_CLASS)
_NO_LIMIT = 1e12  # tokens: more than any prompt has


def blank(num_slots: int, num_classes: int) -> Loads:
    """Return the loads of `num_slots` slots without a replica. Their figures are harmless where all slots are computed
    at once: no division by 0, no wait for room."""
    num_columns = len(_NAMES_PER_REPLICA) + len(_NAMES_PER_CLASS) * num_classes
    columns = np.zeros((num_columns, num_slots))
    arrays: dict[str, Floats] = {name: columns[at] for at, name in enumerate(_NAMES_PER_REPLICA)}
    for number, name in enumerate(_NAMES_PER_CLASS):
        at = len(_NAMES_PER_REPLICA) + number * num_classes
        arrays[name] = columns[at : at + num_classes]
    loads = Loads(**arrays, columns=columns, groups=np.zeros((2, 2, num_classes, NUM_GROUPS, num_slots)))
    divisors = (loads.page_size, loads.bytes_per_second, loads.prefill_share, loads.own_prefill_share)
    for divisor in (*divisors, loads.stream_pages, loads.interval_share, loads.depth):
        divisor[:] = 1.0
    loads.max_step_tokens[:] = loads.max_prompt_now[:] = _NO_LIMIT
    return loads


def row(
    profile: SchedulingProfile, live: LiveProfile | None, booked: Iterable[Booking], classes: Sequence[SloClass]
) -> Row:
    """Return one replica's row. `booked`: the requests placed there that `live` does not include."""
    live = live or _IDLE
    cost, interval_share = profile.cost, profile.interval_share
    if live.cost:
        cost, interval_share = _cost_of(live.cost), live.interval_share
    encoder = profile.encoder_cost or _NO_ENCODER
    if live.encoder_cost:
        encoder = _encoder_cost_of(live.encoder_cost)
    work = Work.of(live, len(classes))
    for booking in booked:
        work.book(booking)
    streams, num_streams, num_arriving = work.streams, sum(work.streams), max(sum(work.arriving), 0.0)
    depth = profile.pipeline_parallel_size
    num_steps, per_step = _steps_between_tokens(num_streams, depth, interval_share)
    step = StepWork(decodes=num_streams / num_steps, context=work.context / num_steps)
    gap = cost.seconds(step) * per_step
    num_future, future_context = num_streams + num_arriving, work.context + work.future_context
    num_steps, per_step = _steps_between_tokens(num_future + 1, depth, interval_share)
    future_gap = cost.decode_step_seconds(num_future / num_steps, future_context / num_steps) * per_step
    joined = cost.decode_step_seconds((num_future + 1) / num_steps, future_context / num_steps) * per_step
    per_joining_decode = (joined - future_gap) * num_steps / per_step
    gap, future_gap = gap * live.gap_share, future_gap * live.gap_share  # with drafts, a step brings several tokens
    future_streams = [now + more if more > 0 else now for now, more in zip(streams, work.arriving, strict=True)]
    groups, num_groups, urgent = work.backlog(len(classes))
    free_pages, free_places, max_prompt_now = work.room(profile, live, len(classes))
    shares = work.prefill_shares(profile, cost, interval_share, classes)
    is_adaptive, step_tokens = profile.chunk_policy == "adaptive", profile.max_num_batched_tokens
    mean_context = future_context / max(num_future, 1.0)
    min_chunk = max(step_tokens - num_streams, 1.0)
    if is_adaptive:
        min_chunk = min(free_tokens(cost, step, 0, profile.min_chunk_tokens), min_chunk)
    return Row(
        **cost.model_dump(),
        interval_share=interval_share,
        depth=depth,
        max_step_tokens=step_tokens,
        is_adaptive=is_adaptive,
        page_size=profile.page_size,
        num_layer_groups=len(profile.windows),
        num_full_groups=profile.needs.num_full_groups,
        window_pages=profile.needs.window_pages,
        state_pages=profile.state_pages,
        page_bytes=profile.page_bytes,
        bytes_per_second=live.bytes_per_second or profile.bytes_per_second,
        refuses_late=profile.admission == "reject" and bool(num_streams or num_arriving or groups),
        step_left=live.step_seconds / 2,
        step_streams=step.decodes,
        min_chunk=min_chunk,
        recent_excess_share=max(live.stream_share - (1 - shares[0]), 0.0),
        gap=gap,
        future_gap=future_gap,
        token_share=per_step / num_steps * live.gap_share,
        per_joining_decode=per_joining_decode,
        most_urgent_stream=first_nonzero(streams),
        lateness=lateness(gap, streams, classes),
        future_lateness=lateness(future_gap, future_streams, classes),
        stream_turnover=2 * work.remaining / num_streams**2 * max(gap, cost.base) if num_streams else 0.0,
        stream_pages=_stream_pages(profile.needs, mean_context),
        empty_pages=live.empty_pages - work.booked_pages,
        eviction_seconds=live.eviction_seconds,
        encoder_base=encoder.base,
        encoder_per_row=encoder.per_row,
        encoder_per_square=encoder.per_square,
        takes_rows=bool(profile.rows_peer),
        free_pages=free_pages,
        free_places=free_places,
        max_prompt_now=max_prompt_now,
        prefill_share=[max(share, LEAST_SHARE) for share in shares],
        own_prefill_share=_own_shares(shares, live.prompt_shares),
        urgent_reported=urgent[REPORTED],
        urgent_booked=urgent[BOOKED],
        num_groups=num_groups,
        streams=streams,
        future_streams=future_streams,
        groups=groups,
    )


def _stream_pages(needs: PageNeeds, context: float) -> float:
    """Return how many pages a stream of `context` tokens frees at its end, at least one."""
    pages = context / needs.page_size
    pages = min(len(needs.windows) * pages, needs.num_full_groups * pages + needs.window_pages)
    return max(pages + needs.state_pages, 1.0)


_cost_of = lru_cache(maxsize=4096)(StepCost.of)  # rows are made far more often than costs are learnt
_NO_ENCODER = EncoderCost(base=0.0, per_row=0.0, per_square=0.0)


@lru_cache(maxsize=4096)
def _encoder_cost_of(coefficients: tuple[float, float, float]) -> EncoderCost:
    base, per_row, per_square = coefficients
    return EncoderCost(base=base, per_row=per_row, per_square=per_square)


def _steps_between_tokens(num_streams: float, depth: int, interval_share: float) -> tuple[float, float]:
    """Return in how many steps that follow each other all streams get a token, and what a gap takes per step's seconds.

    Streams are spread over as many steps as are in flight. A gap is a step's latency, or that many intervals where
    these take longer, because the stages are not alike.
    """
    num_steps = min(max(num_streams, 1.0), depth)
    return num_steps, max(num_steps * interval_share, 1.0)


_IDLE = LiveProfile("", 0, ())  # a replica that has not reported yet


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
