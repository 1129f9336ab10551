"""The figures of all replicas that predictions need, as named arrays.

`ReplicaFigures` declares each figure once: of one replica in a `Row`, of every replica in `Loads`, which predict.py
reads. rows.py makes a row. `Row.write` puts it into `Loads`. Adding a figure means one field in `ReplicaFigures`, and
one line in `row`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, get_origin

import numpy as np
from numpy.typing import NDArray

from crossdock.router.work import Group
from crossdock.workers.report.live_profile import LENGTHS, MOST_ENDS, TierLoads
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.cost.formula import Figure, Floats, StepCosts
from crossdock.workers.schedule.first_token import PromptSteps, largest, nothing_like
from crossdock.workers.schedule.policies.chunk_policies import Lent
from crossdock.workers.schedule.request.slo import SloClass

Slots: TypeAlias = NDArray[np.intp]
Costs = TypeVar("Costs", StepCost, StepCosts)
One = TypeVar("One", float, Floats)
Each = TypeVar("Each", Sequence[float], Floats)

BEHIND, FIRST = 0, 1  # where a prompt gets pages after those that wait for pages, or before them
NUM_GROUPS = len(LENGTHS) + 1  # prompt lengths that are distinguished


class StepsInFlight(NamedTuple, Generic[One]):
    """Tells how many steps a replica computes at once, and what that makes of their seconds."""

    depth: One  # the stages of its pipeline
    interval_share: One  # of a step's seconds, after which the next step of a full pipeline ends: see `IntervalShare`
    chunk_gap: One  # a gap between the tokens of a stream, in steps that have a chunk each


class PageSizes(NamedTuple, Generic[One]):
    """Tells what a replica's pages hold, and how fast they travel."""

    size: One  # tokens
    num_groups: One  # groups of layers with pages of their own
    num_full_groups: One  # groups without a window
    window_pages: One  # most pages of all groups with a window
    state_pages: One  # of each request's recurrent state
    num_bytes: One
    transfer_s: One  # that each transfer to another replica takes beside its bytes
    bytes_per_second: One  # at which they travel


class Joins(NamedTuple, Generic[One]):
    """Tells which step a new prompt joins, in seconds from the replica's last report, but those that say otherwise."""

    until: One  # until then a new prompt
    first: One  # joins the step that begins then; after that, until `first`, the step that
    second: One  # begins then; after that, until `second`, the step that
    third: One  # begins then
    before_first: One  # seconds of prompts, alone, that are in the steps before these
    before_second: One
    before_third: One
    ended_until: One  # seconds of prompts, alone, that are in the steps which have ended: until `until`
    ended_first: One  # and after that until `first`
    later: One  # seconds from the arrival of a prompt that comes later
    longest: One  # seconds of a step that has as many chunks as it holds


class StreamPace(NamedTuple, Generic[One, Each]):
    """Tells how fast streams get tokens where no prompt is computed."""

    gap: One  # seconds between the tokens of a stream
    lateness: One  # weighted seconds per token by which the streams are late with `gap`
    counts: Each  # streams, by priority


class Joining(NamedTuple, Generic[One]):
    """Prices one more decode in a step with the streams of the future."""

    seconds: One
    share: One  # of these, by which the gap between tokens grows


class RoomFigures(NamedTuple, Generic[One, Each]):
    """Counts the pages and the slots for new requests."""

    taken_at: One  # seconds from the last report, until which no request that waits takes free pages
    num_lacking: One  # prompts that wait for pages
    shortest_lacking: One  # seconds of the shortest of them, which a shorter prompt passes
    pages_lacking: One  # that this one needs
    empty_pages: One  # free before cached pages are evicted; below 0: so many pages will be evicted by in-flight loads
    eviction_seconds: One  # of prefill that one evicted page is expected to cost
    free_pages: Each  # by priority
    free_slots: Each  # requests that may still start; below 0: as many that wait cannot
    longest_now: Each  # tokens of the longest prompt that waits for neither pages nor a slot


class EncoderPrices(NamedTuple, Generic[One]):
    """Holds the coefficients of `EncoderCost`, in seconds; 0 where pictures are not encoded, or take no time."""

    base: One
    per_token: One
    per_square: One


class PromptShares(NamedTuple, Generic[One, Each]):
    """Divides the replica's time between prompts and streams."""

    recent_excess: One  # share that streams took recently, beyond the share they take now
    now: Each  # while the present streams run
    own: Each  # the same, less the recent share of more urgent prompts
    delays_streams: Each  # 1: streams wait for chunks of a class; 0: its chunks fit the TPOT of more urgent streams


class PromptQueue(NamedTuple, Generic[One, Each]):
    """Sums up the prompts that wait for others. Those as urgent as a new one are in `groups`."""

    total: One  # seconds of the prompts of all classes
    urgent_reported: Each  # seconds of waiting prompts of more urgent classes, as last reported
    urgent_booked: Each  # the same, as booked since
    num_groups: Each  # prompt lengths that wait: the first positions of `groups`


@dataclass(slots=True)
class ReplicaFigures(Generic[Costs, One, Each]):
    """The figures of one replica, `One` float each, or of all replicas, an array each. `Each` has one per SLO class.

    "Now" counts what runs on the replica; "future" adds the requests that are on their way to decode there.
    """

    cost: Costs  # the coefficients of `StepCost`, in seconds
    classes: Sequence[SloClass]  # most urgent first; equal for all replicas
    pipeline: StepsInFlight[One]
    prompt_steps: PromptSteps
    pages: PageSizes[One]
    refuses_late: One  # 1: the replica has work, and its admission refuses what would be late
    joins: Joins[One]
    step_streams: One  # streams that decode in a step, with the streams of now
    min_chunk: One  # tokens of a prompt that a step holds, at least
    lent: Lent  # by the streams of now
    now: StreamPace[One, Each]
    future: StreamPace[One, Each]  # its gap with a slot in a step for one more
    joining: Joining[One]
    room: RoomFigures[One, Each]
    encoder: EncoderPrices[One]
    shares: PromptShares[One, Each]
    queue: PromptQueue[One, Each]

    def priority_of(self, slo_class: str) -> int:
        """Return the priority of a class: the last one if its name is unknown, so that the replica refuses the request
        and says why."""
        for priority, slo in enumerate(self.classes):
            if slo.name == slo_class:
                return priority
        return len(self.classes) - 1

    def waiting(self, priority: int) -> Any:
        """Return the counts and the seconds of prompts that wait, `[position]` each: REPORTED, BOOKED."""
        raise NotImplementedError

    def group_pages(self, num_pages: Any, slots: Any = None) -> Any:
        """Return how many pages all groups of layers together hold for a request whose tokens fill `num_pages`.

        `slots`: of these alone."""
        pages = self.pages
        figures: Sequence[Any] = pages.num_groups, pages.num_full_groups, pages.window_pages
        groups, full, windows = figures if slots is None else [each[slots] for each in figures]
        return self.cost.smaller(groups * num_pages, full * num_pages + windows)

    def step_left(self, age: Any) -> Any:
        """Return the seconds until a step begins that can have a chunk of a new prompt.

        `age`: seconds since the last report."""
        _, first, second, third, *_ = self.joins
        return self._left(age, self._joined(age, first, second, third))

    def done_by_then(self, age: Any, step_left: Any, priority: int, most: float) -> Any:
        """Return the seconds of known prompts that are computed when a step begins that can have a chunk of a new one.

        `step_left`: of `age`. A replica works on behind the steps that are known, for `most` seconds."""
        joins: Any = self.joins
        cost: Any = self.cost
        further = cost.smaller(age + step_left - joins.third, most) * self.shares.now[priority]
        return self._joined(age, joins.before_first, joins.before_second, joins.before_third + further)

    def done_now(self, age: Any, priority: int, most: float) -> Any:
        """Return the seconds of known prompts that are in steps which have ended: a replica that is asked whether a new
        one would be late counts those of the running step whole. `most`: as for `done_by_then`."""
        joins: Any = self.joins
        cost: Any = self.cost
        chosen = cost.chosen
        further = cost.smaller(age - joins.second, most) * self.shares.now[priority]
        later = chosen(age < joins.second, joins.before_first, joins.before_second + further)
        return chosen(age < joins.until, joins.ended_until, chosen(age < joins.first, joins.ended_first, later))

    def filled_step(self, ahead: Any, own: Any, behind: Any) -> Any:
        """Return the seconds of the step in which a prompt of `own` seconds has its token, if other chunks fill it.

        `ahead`, `behind`: seconds of the prompts before it and behind it. While more than a step of prompts goes
        before it, others come and go behind it. 0: there are none."""
        longest: Any = self.joins.longest
        cost: Any = self.cost
        others = behind + cost.larger(ahead - longest, 0.0)
        filled = cost.smaller(self.now.gap + own + others - 2 * cost.base, longest)
        return cost.chosen(others > 0, filled, 0.0)

    def turn_left(self, age: Any) -> Any:
        """Return the seconds until the running step ends: a replica takes in messages between two steps."""
        until, first, second, *_ = self.joins
        return self._left(age, self._joined(age, until, first, second))

    def _joined(self, age: Any, first: Any, second: Any, third: Any) -> Any:
        """Return the figure of the step that a new prompt joins."""
        chosen: Any = self.cost.chosen
        return chosen(age < self.joins.until, first, chosen(age < self.joins.first, second, third))

    def _left(self, age: Any, at: Any) -> Any:
        chosen: Any = self.cost.chosen
        return chosen(age < at, at - age, self.joins.later)


@dataclass(slots=True)
class Row(ReplicaFigures[StepCost, float, Sequence[float]]):
    """The entry of one replica in `Loads`."""

    groups: Sequence[Sequence[Sequence[Group]]]  # [REPORTED or BOOKED][priority]: waiting prompts by length
    ends: Sequence[Sequence[tuple[float, float]]]  # (seconds since its last report, free pages) at ends of requests:
    # BEHIND prompts that wait for pages, FIRST
    lacking: Sequence[tuple[float, float]]  # (pages, seconds waited until that report) of requests without room
    tiers: TierLoads  # no columns: few replicas have pages of a prompt in their tiers

    def waiting(self, priority: int) -> Sequence[Sequence[Sequence[float]]]:
        """Return the counts and the seconds of prompts that wait, `[position]` each: REPORTED, BOOKED."""
        waiting = [by_class[priority] for by_class in self.groups]
        return [[[count for count, _ in groups], [seconds for _, seconds in groups]] for groups in waiting]

    def write(self, loads: "Loads", slot: int) -> None:
        """Replace the entry of the replica in `slot`."""
        loads.columns[:, slot] = [*self.cost.coefficients, *_single(self), *chain.from_iterable(_by_class(self))]
        loads.groups[..., slot] = 0.0
        for source, by_class in enumerate(self.groups):
            for priority, groups in enumerate(by_class):
                for position, (count, seconds) in enumerate(groups):
                    loads.groups[source, 0, priority, position, slot] = count
                    loads.groups[source, 1, priority, position, slot] = seconds
        loads.lacking[..., slot] = 0.0
        for place, figures in enumerate(self.lacking):
            loads.lacking[:, place, slot] = figures
        loads.ends[..., slot] = 0.0
        for place, ends in enumerate(self.ends):
            if ends:  # not the usual case
                times = [at for at, _ in ends]
                freed = [free - self.room.free_pages[-1] for _, free in ends]
                unknown = MOST_ENDS - len(ends)  # behind the last end
                loads.ends[place, ..., slot] = times + times[-1:] * unknown, freed + freed[-1:] * unknown


@dataclass(slots=True)
class Loads(ReplicaFigures[StepCosts, Floats, Floats]):
    """Every replica's row, as arrays over replica slots: `[slot]`, and `[priority, slot]` where it is per class."""

    columns: Floats  # [column, slot]: all arrays above, in the order of `ReplicaFigures`
    groups: Floats  # [REPORTED or BOOKED, 0 count or 1 seconds, priority, position, slot]: waiting prompts by length
    ends: Floats  # of requests, [BEHIND or FIRST, 0 seconds since the last report or 1 free pages beyond `free_pages`
    # then, place, slot]
    lacking: Floats  # [0 pages or 1 seconds waited until the last report, place, slot]: of requests without room

    def at(self, slots: Slots) -> "Loads":
        """Return the loads of these slots alone, in this order."""
        arrays = self.columns, self.groups, self.ends, self.lacking
        return _of(self.classes, *(figures.take(slots, axis=-1) for figures in arrays))

    def waiting(self, priority: int) -> Floats:
        """Return the counts and the seconds of prompts that wait, `[position, slot]` each: REPORTED, BOOKED."""
        found: Floats = self.groups[:, :, priority, : int(np.maximum.reduce(self.queue.num_groups[priority]))]
        return found


_COEFFICIENTS = tuple(column.name for column in fields(StepCosts))  # the first columns


class _Part(NamedTuple):
    """Names the figures of one field of `ReplicaFigures`: first the single ones, then those by class."""

    name: str
    make: Any  # the tuple that holds several figures; None: the field is one figure
    single: Sequence[str]
    by_class: Sequence[str]


def _part(name: str, kind: Any) -> _Part:
    make = get_origin(kind) or kind
    if not hasattr(make, "_fields"):
        return _Part(name, None, [name], [])
    names: Mapping[bool, list[str]] = {False: [], True: []}
    for each in make._fields:
        names[make.__annotations__[each] is Each].append(f"{name}.{each}")
    return _Part(name, make, names[False], names[True])


_PARTS = [_part(column.name, column.type) for column in fields(ReplicaFigures)[2:]]  # without cost and classes
_NUM_SINGLE = sum([len(part.single) for part in _PARTS])
_NUM_BY_CLASS = sum([len(part.by_class) for part in _PARTS])
_single = attrgetter(*[name for part in _PARTS for name in part.single])
_by_class = attrgetter(*[name for part in _PARTS for name in part.by_class])
NO_LIMIT = 1e12  # tokens: more than any prompt has; seconds: never


def blank(num_slots: int, classes: Sequence[SloClass]) -> Loads:
    """Return the loads of `num_slots` slots without a replica. Their figures are harmless where all slots are computed
    at once: no division by 0, no wait for room."""
    num_classes = max(len(classes), 1)
    columns = np.zeros((len(_COEFFICIENTS) + _NUM_SINGLE + _NUM_BY_CLASS * num_classes, num_slots))
    groups = np.zeros((2, 2, num_classes, NUM_GROUPS, num_slots))
    ends = np.zeros((2, 2, MOST_ENDS, num_slots))
    loads = _of(classes, columns, groups, ends, np.zeros((2, MOST_ENDS, num_slots)))
    shares = loads.shares.now, loads.shares.own, loads.lent.share
    for divisor in (loads.pages.size, loads.pages.bytes_per_second, *shares, *loads.pipeline[:2]):
        divisor[:] = 1.0
    for limit in (*loads.prompt_steps, loads.room.longest_now, loads.room.taken_at):
        limit[:] = NO_LIMIT
    return loads


def _of(classes: Sequence[SloClass], columns: Floats, groups: Floats, ends: Floats, lacking: Floats) -> Loads:
    """Return the loads whose arrays are views of `columns`, which are in the order of the fields."""
    first = len(_COEFFICIENTS)
    num_classes = groups.shape[2]
    figures: list[Any] = [StepCosts(*columns[:first]), classes]
    single = columns[first : first + _NUM_SINGLE]
    by_class = columns[first + _NUM_SINGLE :].reshape(_NUM_BY_CLASS, num_classes, -1)
    at = at_class = 0
    for part in _PARTS:
        end, end_class = at + len(part.single), at_class + len(part.by_class)
        figures.append(single[at] if part.make is None else part.make(*single[at:end], *by_class[at_class:end_class]))
        at, at_class = end, end_class
    figures += columns, groups, ends, lacking
    return Loads(*figures)


def lateness(gap: Figure, streams: Any, classes: Sequence[SloClass], larger: Callable[..., Any]) -> Figure:
    """Return the seconds per token by which streams are late with a `gap` of seconds between tokens, weighted by class.

    `streams`: how many, by priority. Of one replica, or arrays `[slot]`."""
    late = nothing_like(gap)
    longest = largest(gap)
    for slo, count in zip(classes, streams, strict=True):
        if longest > slo.tpot_s:
            late += larger(gap - slo.tpot_s, 0.0) * (slo.weight * count)
    return late  # type: ignore[no-any-return]
