"""The figures of all replicas that predictions need, as named arrays, and how one replica's figures are made.

`row` builds the entry in named steps: backlog, streams, room, shares. `Row.write` puts it into the arrays of `Loads`,
where `predict` reads it. Adding a figure means one field in `Row`, the same field in `Loads`, and one line in `row`.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdock.workers.report.advertise import LENGTHS, LiveProfile
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.chunking import LEAST_SHARE, share_of_prompts
from crossdock.workers.schedule.slo import SloClass

Floats: TypeAlias = NDArray[np.float64]

EXPECTED_OUTPUT_TOKENS = 128
"""Tokens that an output is assumed to have, unless the request allows fewer: `max_tokens` is a bound that few outputs
reach. Weighs a replica's speed of decoding against its TTFT, and sets when booked streams free their room. Commands in
placement.py: with 16, good requests fall from 97.1 to 96.7 % in loaded and from 95.4 to 95.1 % in knee."""

REPORTED, BOOKED = 0, 1  # where a waiting prompt is known from: the replica's live profile, or this router's booking
NUM_GROUPS = len(LENGTHS) + 1  # prompt lengths that are distinguished

Group: TypeAlias = tuple[int, int, int, float, float]
"""Waiting prompts of one class and about one length: (REPORTED or BOOKED, priority, position, count, seconds)."""


@dataclass(frozen=True, slots=True)
class Booking:
    """One request that a router placed on a replica; seconds are that replica's."""

    priority: int
    tokens: int  # of the prompt
    seconds: float  # to compute the uncached prompt here; 0: another replica computes the prompt
    pages: int  # KV pages the request takes here
    decodes: bool  # whether this replica makes the output
    has_first: bool = False  # whether the prompt is computed and the first token is out


@dataclass(slots=True)
class Row:
    """The entry of one replica in `Loads`, whose comments say what each figure is. Lists have one figure per class."""

    base: float
    per_prefill_token: float
    per_attended: float
    per_decode: float
    per_context: float
    max_step_tokens: float
    is_adaptive: float
    page_size: float
    page_bytes: float
    bytes_per_second: float
    refuses_late: float
    step_left: float
    min_chunk: float
    recent_excess_share: float
    gap: float
    future_gap: float
    most_urgent_stream: float
    lateness: float
    future_lateness: float
    stream_turnover: float
    stream_pages: float
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
    # Fixed properties.
    max_step_tokens: Floats  # tokens a step may hold
    is_adaptive: Floats  # 1: chunks fit the streams' TPOT; 0: chunks fill the step's tokens
    page_size: Floats  # tokens
    page_bytes: Floats
    bytes_per_second: Floats  # at which its pages travel to another replica
    # What runs.
    refuses_late: Floats  # 1: the replica has work, and its admission refuses what would be late
    step_left: Floats  # seconds until the running step ends, on average
    min_chunk: Floats  # tokens of a prompt that a step holds, at least
    recent_excess_share: Floats  # share of its time that streams took recently, beyond the share they take now
    gap: Floats  # seconds of a step with the streams of now and no prompt
    future_gap: Floats  # the same with the streams of the future
    most_urgent_stream: Floats  # priority of the most urgent stream of now; the number of classes if there is none
    lateness: Floats  # weighted seconds per token by which the streams of now are late in a step of `gap`
    future_lateness: Floats  # the same in the future
    stream_turnover: Floats  # seconds from one stream's end to the next
    stream_pages: Floats  # pages that one stream frees at its end
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
    for divisor in (*divisors, loads.stream_pages):
        divisor[:] = 1.0
    loads.max_step_tokens[:] = loads.max_prompt_now[:] = _NO_LIMIT
    return loads


def row(
    profile: SchedulingProfile, live: LiveProfile | None, booked: Iterable[Booking], classes: Sequence[SloClass]
) -> Row:
    """Return one replica's row. `booked`: the requests placed there that `live` does not include."""
    live = live or _IDLE
    cost = live.cost or profile.cost.coefficients
    base, per_prefill_token, per_attended, per_decode, per_context = cost
    work = _Work.of(live, len(classes))
    for booking in booked:
        work.book(booking)
    streams, num_streams, num_arriving = work.streams, sum(work.streams), max(sum(work.arriving), 0.0)
    gap = base + per_decode * num_streams + per_context * work.context
    future_gap = gap + per_decode * num_arriving + per_context * work.future_context
    future_streams = [now + more if more > 0 else now for now, more in zip(streams, work.arriving, strict=True)]
    groups, num_groups, urgent = work.backlog(len(classes))
    free_pages, free_places, max_prompt_now = work.room(profile, live, len(classes))
    shares = work.prefill_shares(profile, cost, gap, num_streams, classes)
    is_adaptive, step_tokens = profile.chunk_policy == "adaptive", profile.max_num_batched_tokens
    mean_context = (work.context + work.future_context) / max(num_streams + num_arriving, 1.0)
    return Row(
        base=base,
        per_prefill_token=per_prefill_token,
        per_attended=per_attended,
        per_decode=per_decode,
        per_context=per_context,
        max_step_tokens=step_tokens,
        is_adaptive=is_adaptive,
        page_size=profile.page_size,
        page_bytes=profile.page_bytes,
        bytes_per_second=live.bytes_per_second or profile.bytes_per_second,
        refuses_late=profile.admission == "reject" and bool(num_streams or num_arriving or groups),
        step_left=live.step_seconds / 2,
        min_chunk=profile.min_chunk_tokens if is_adaptive else max(step_tokens - num_streams, 1.0),
        recent_excess_share=max(live.stream_share - (1 - shares[0]), 0.0),
        gap=gap,
        future_gap=future_gap,
        most_urgent_stream=_first_nonzero(streams),
        lateness=lateness(gap, streams, classes),
        future_lateness=lateness(future_gap, future_streams, classes),
        stream_turnover=2 * work.remaining / num_streams**2 * max(gap, base) if num_streams else 0.0,
        stream_pages=max(mean_context / profile.page_size, 1.0),
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


_IDLE = LiveProfile("", 0, ())  # a replica that has not reported yet
_Prompts: TypeAlias = dict[tuple[int, int], tuple[float, float]]
"""Prompts that wait, by (priority, length, a place in `LENGTHS`): (count, seconds of all of them)."""


@dataclass(slots=True)
class _Work:
    """Everything one replica has to do: what its live profile reports, and what a router has booked since."""

    streams: list[float]  # by priority: streams that decode here now
    joining: list[float]  # by priority: streams, and those whose prompts other replicas compute
    arriving: list[float]  # by priority: streams of the future that do not decode yet, less those that will leave
    reported: _Prompts
    booked: _Prompts
    context: float  # tokens of the streams
    future_context: float  # tokens of the streams that arrive
    remaining: float  # tokens that the streams may still make
    booked_pages: int = 0
    booked_places: int = 0

    @classmethod
    def of(cls, live: LiveProfile, num_classes: int) -> "_Work":
        """Return what the live profile reports."""
        streams, arriving = _by_priority(live.streams, num_classes), _by_priority(live.arriving, num_classes)
        joining = [now + more for now, more in zip(streams, arriving, strict=True)]
        prompts: _Prompts = {}
        num_prompts, prompt_tokens = 0, 0.0
        for group in live.prompts:
            priority = group.priority if group.priority < num_classes else num_classes - 1
            had, had_seconds = prompts.get((priority, group.length), (0.0, 0.0))
            prompts[priority, group.length] = had + group.count, had_seconds + group.seconds
            arriving[priority] += group.count
            num_prompts += group.count
            prompt_tokens += group.tokens
        num_leaving = sum(live.leaving)
        if num_leaving:  # the profile does not report how many of the tokens belong to prompts that leave
            prompt_tokens *= 1 - min(num_leaving / max(num_prompts, 1), 1)
            for priority, count in enumerate(_by_priority(live.leaving, num_classes)):
                arriving[priority] -= count
        return cls(streams, joining, arriving, prompts, {}, live.context_tokens, prompt_tokens, live.remaining_tokens)

    def book(self, booking: Booking) -> None:
        """Add a request that the live profile does not include."""
        priority = min(booking.priority, len(self.streams) - 1)
        if booking.seconds and not booking.has_first:
            key = priority, bisect(LENGTHS, booking.seconds)
            had, had_seconds = self.booked.get(key, (0.0, 0.0))
            self.booked[key] = had + 1, had_seconds + booking.seconds
        if booking.decodes and booking.has_first:
            self.streams[priority] += 1
            self.joining[priority] += 1
            self.context += booking.tokens
            self.remaining += EXPECTED_OUTPUT_TOKENS
        elif booking.decodes:
            self.arriving[priority] += 1
            self.joining[priority] += not booking.seconds
            self.future_context += booking.tokens
        if booking.decodes or not booking.has_first:
            self.booked_pages += booking.pages
            self.booked_places += 1

    def backlog(self, num_classes: int) -> tuple[list[Group], list[int], tuple[list[float], list[float]]]:
        """Return the groups of waiting prompts, the shortest of each class first; and by priority how many positions
        they fill, and the seconds of prompts of more urgent classes: reported, and booked."""
        groups: list[Group] = []
        num_groups, urgent = [0] * num_classes, ([0.0] * num_classes, [0.0] * num_classes)
        for source, prompts in ((REPORTED, self.reported), (BOOKED, self.booked)):
            last, position = -1, 0
            for (priority, _), (count, seconds) in sorted(prompts.items()):
                position = position + 1 if priority == last else 0
                last = priority
                groups.append((source, priority, position, count, seconds))
                num_groups[priority] = max(num_groups[priority], position + 1)
                for less_urgent in range(priority + 1, num_classes):
                    urgent[source][less_urgent] += seconds
        return groups, num_groups, urgent

    def room(
        self, profile: SchedulingProfile, live: LiveProfile, num_classes: int
    ) -> tuple[list[float], list[float], list[float]]:
        """Return, by priority: free pages, free places, and tokens of the longest prompt that need not wait for either.
        A booking takes room from every class."""
        pages: Sequence[float] = live.free_pages
        places: Sequence[float] = live.places
        if len(pages) != num_classes or len(places) != num_classes:
            pages = _padded(pages, profile.num_pages, num_classes)
            places = _padded(places, profile.max_num_seqs, num_classes)
        free_pages = [free - self.booked_pages for free in pages]
        free_places = [free - self.booked_places for free in places]
        size = profile.page_size
        longest: list[float] = [
            (free - 1) * size if place >= 1 else -1.0 for free, place in zip(free_pages, free_places, strict=True)
        ]
        return free_pages, free_places, longest

    def prefill_shares(
        self,
        profile: SchedulingProfile,
        cost: Sequence[float],
        gap: float,
        num_streams: float,
        classes: Sequence[SloClass],
    ) -> list[float]:
        """Return the share of time that a prompt of each class gets while the streams run, as `Scheduler.prefill_share`
        does. Streams whose prompts other replicas compute count as if they ran."""
        num_joining = sum(self.joining)
        if not num_joining:
            return [1.0] * len(classes)
        _, per_prefill_token, per_attended, per_decode, _ = cost
        seconds = gap + per_decode * (num_joining - num_streams)
        if profile.chunk_policy != "adaptive":
            room = profile.max_num_batched_tokens - num_joining
            share = 1 - seconds / (seconds + room * (per_prefill_token + per_attended * room / 2))
            return [share] * len(classes)
        tpot = min([slo.tpot_s for slo, count in zip(classes, self.joining, strict=True) if count])
        page, chunk = profile.page_size * per_prefill_token, profile.min_chunk_tokens * per_prefill_token
        shares = [share_of_prompts(seconds, tpot, profile.overrun, chunk, page)] * (_first_nonzero(self.joining) + 1)
        if len(shares) < len(classes):  # less urgent than every stream: no chunk is certain
            shares += [share_of_prompts(seconds, tpot, profile.overrun, 0.0, page)] * (len(classes) - len(shares))
        return shares


def _first_nonzero(counts: Sequence[float]) -> int:
    """Return the priority of the most urgent class that has any; the number of classes if none has."""
    for priority, count in enumerate(counts):
        if count:
            return priority
    return len(counts)


def _by_priority(reported: Sequence[float], num_classes: int) -> list[float]:
    """Return counts for the router's classes. During an upgrade a replica may have more classes than this router knows,
    which count as the least urgent one, or fewer."""
    if len(reported) == num_classes:
        return [*reported]
    known = [*reported[:num_classes], *[0.0] * (num_classes - len(reported))]
    known[-1] += sum(reported[num_classes:])
    return known


def _padded(reported: Sequence[float], default: float, num_classes: int) -> list[float]:
    """Return figures for the router's classes, with a default for classes that the replica does not have."""
    return [*reported[:num_classes], *[default] * (num_classes - len(reported))]


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
