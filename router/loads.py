"""The figures of all replicas that predictions need, as named arrays.

`ReplicaFigures` declares each figure once: of one replica in a `Row`, of every replica in `Loads`, which predict.py
reads. rows.py makes a row. `Row.write` puts it into `Loads`. Adding a figure means one field in `ReplicaFigures`, and
one line in `row`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from crossdock.router.work import Group
from crossdock.workers.report.live_profile import LENGTHS, MOST_ENDS
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.cost.formula import Floats, StepCosts

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
    # share of a step's seconds after which the next step of a full pipeline ends: see `IntervalShare`
    interval_share: One
    # Fixed properties.
    depth: One  # steps in flight: the stages of its pipeline
    chunk_gap: One  # a gap between the tokens of a stream, in steps that have a chunk each
    max_step_tokens: One  # tokens a step may hold
    max_chunk_s: One  # seconds of a step without streams beyond its fixed part, at most
    page_size: One  # tokens
    num_layer_groups: One  # groups of layers with pages of their own
    num_full_groups: One  # groups without a window
    window_pages: One  # most pages of all groups with a window
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
    filled_step: One  # seconds of the step that a new prompt joins, with the prompts that wait; 0: none waits
    first_booked: One  # seconds from its last report until the first prompt was booked that no report includes
    step_streams: One  # streams that decode in a step, with the streams of now
    min_chunk: One  # tokens of a prompt that a step holds, at least
    lent_share: One  # of a prompt's pace on an idle replica, while streams lend: see `Lent`
    lent_seconds: One  # by which prompts end sooner, at most, because streams lend
    recent_excess_share: One  # share of its time that streams took recently, beyond the share they take now
    gap: One  # seconds between the tokens of a stream, with the streams of now and no prompt
    future_gap: One  # the same with the streams of the future, and a slot in a step for one more
    token_share: One  # of what a decode takes in a step, by which one more makes that gap longer
    per_joining_decode: One  # seconds that one more decode adds to a step with the streams of the future
    lateness: One  # weighted seconds per token by which the streams of now are late with `gap`
    future_lateness: One  # the same in the future
    taken_at: One  # seconds from its last report, until which no request that waits takes free pages
    empty_pages: One  # free before cached pages are evicted; below 0: so many pages will be evicted by in-flight loads
    eviction_seconds: One  # of prefill that one evicted page is expected to cost
    load_first: One  # seconds to load a page from its fastest tier below the pool
    load_second: One  # the same from its second tier
    load_queue: One  # seconds until the loads that have begun will have ended
    # Pictures: the coefficients of `EncoderCost`, in seconds; 0 where pictures are not encoded, or take no time.
    encoder_base: One
    encoder_per_token: One
    encoder_per_square: One
    # Room, by priority.
    free_pages: Each
    free_seq_slots: Each  # requests that may still start; below 0: as many that wait cannot
    max_prompt_now: Each  # tokens of the longest prompt that waits for neither pages nor a slot
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
        times = [at for at, _ in self.ends]
        freed = [free - self.free_pages[-1] for _, free in self.ends]
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
_per_replica = attrgetter(*_NAMES_PER_REPLICA)
_per_class = attrgetter(*_NAMES_PER_CLASS)
NO_LIMIT = 1e12  # tokens: more than any prompt has; seconds: never


def blank(num_slots: int, num_classes: int) -> Loads:
    """Return the loads of `num_slots` slots without a replica. Their figures are harmless where all slots are computed
    at once: no division by 0, no wait for room."""
    columns = np.zeros((len(_SINGLE) + len(_NAMES_PER_CLASS) * num_classes, num_slots))
    groups = np.zeros((2, 2, num_classes, NUM_GROUPS, num_slots))
    ends = np.zeros((2, MOST_ENDS, num_slots))
    loads = _of(columns, groups, ends)
    divisors = (loads.page_size, loads.bytes_per_second, loads.prefill_share, loads.own_prefill_share)
    for divisor in (*divisors, loads.lent_share, loads.interval_share, loads.depth):
        divisor[:] = 1.0
    for limit in (loads.max_step_tokens, loads.max_chunk_s, loads.max_prompt_now, loads.taken_at):
        limit[:] = NO_LIMIT
    return loads


def _of(columns: Floats, groups: Floats, ends: Floats) -> Loads:
    """Return the loads whose arrays are views of `columns`, which are in the order of the fields."""
    num_coefficients = len(_COEFFICIENTS)
    num_single = len(_SINGLE)
    num_classes = groups.shape[2]
    cost = StepCosts(*columns[:num_coefficients])
    single = columns[num_coefficients:num_single]
    classes = columns[num_single:].reshape(len(_NAMES_PER_CLASS), num_classes, -1)
    figures: Sequence[Any] = (cost, *single, *classes, columns, groups, ends)
    return Loads(*figures)
