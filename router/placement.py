"""What a request would cost wherever it could go, in seconds, and where it goes: pure functions over arrays that have
one entry per replica.

Three things are predicted: when the first token would come, what the running streams would be late by, and how long
replicas would work for it. A promise that is broken counts `LATE` times what a second of work does, so that placements
that keep every promise are compared by cost alone, and the others by what they break, weighed by class. A cached prefix
is fewer seconds and needs no rule of its own; nor does the choice between one replica and two.
"""

import zlib
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdock.workers.report.advertise import LENGTHS, MEMORY_S, LiveProfile
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.chunking import LEAST_SHARE, share_of_prompts
from crossdock.workers.schedule.pages import PageHash
from crossdock.workers.schedule.request import Overloaded
from crossdock.workers.schedule.slo import DEFAULT_CLASS, SloClass

Floats: TypeAlias = NDArray[np.float64]
Slots: TypeAlias = NDArray[np.intp]

LATE = 100.0  # what a second after a promise weighs against one of work
RISK = 0.85  # of the time to a first token that a prediction may use up: predictions err
WORK = 1.0  # what a second that a replica works for a request weighs against one that a user waits for it
SPEED = 0.1  # what a second of the request's own decoding weighs against one until its first token
EXPECTED_TOKENS = 128  # of an output, unless it may have fewer
TIE = 0.02  # placements are as good as each other within this share of the best one's cost
SOON = 0.3  # seconds of prompts ahead from which on what streams kept of late says more than what they keep now
HANDOVER = 0.005  # seconds that a pair costs beside its pages: messages, a registration
KEPT = 4  # of the best replicas for a prompt, and of those for its tokens, how many are tried as pairs


@dataclass(frozen=True, slots=True)
class Query:
    """What of a request decides where it goes."""

    request_id: str
    num_tokens: int  # of its prompt, and of what another replica had made of its output
    page_hashes: Sequence[PageHash] = ()  # of its full pages, as far as they may be shared
    slo_class: str = DEFAULT_CLASS
    max_tokens: int = EXPECTED_TOKENS  # of its output
    may_ship: bool = True
    may_refuse: bool = True  # not once its client has been given something


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. With a `prefill` replica, that one computes the prompt and ships its pages."""

    decode: str
    prefill: str | None = None
    reason: str = ""
    predicted_ttft: float = 0.0  # seconds
    predicted_gap: float = 0.0  # seconds between its tokens, once it decodes
    late: float = 0.0  # seconds after their promises that it and others would be, each times its class's weight
    cached_tokens: int = 0  # of its prompt, at the replica that computes the rest
    prefill_seconds: float = 0.0  # that the rest takes alone


@dataclass(frozen=True, slots=True)
class Booking:
    """What a router has given a replica, in the replica's own seconds."""

    priority: int
    tokens: int  # of the prompt
    seconds: float  # that the replica computes of it; 0: another does
    pages: int  # that it takes there
    decodes: bool  # whether its tokens will be made there
    has_first: bool = False


@dataclass(slots=True)
class Loads:
    """What replicas can do and have to do. One entry each; `[priority, replica]` where it is per class."""

    # what they can do
    base: Floats
    per_token: Floats
    per_attended: Floats
    per_decode: Floats
    per_context: Floats
    budget: Floats  # tokens a step may carry
    adaptive: Floats  # 1: chunks fit the streams' promises; 0: they fill the budget
    page_size: Floats
    page_bytes: Floats
    bytes_per_second: Floats
    # what they have to do
    refuses: Floats  # 1: it has something, and takes nothing more that would be late
    step: Floats  # seconds of the running step that are left, on average
    chunk: Floats  # tokens of a prompt that a step carries, at least
    busier: Floats  # share of its time that streams kept from prompts of late beyond what they do now
    gap: Floats  # seconds of a step of all streams and no prompt
    tightest: Floats  # priority of the most urgent stream
    future_gap: Floats  # of a step of all streams, those included that are on the way
    turnover: Floats  # seconds from one stream's end to the next
    stream_pages: Floats  # that each gives back
    pages: Floats  # [priority, replica]
    places: Floats  # [priority, replica]
    at_once: Floats  # [priority, replica]: tokens of the longest prompt that waits for neither pages nor a place
    share: Floats  # [priority, replica]: of the time, what goes into prompts of a class while those streams run
    own_share: Floats  # [priority, replica]: less what goes into prompts of more urgent classes
    urgent: Floats  # [priority, replica]: seconds of prompts of more urgent classes, as it last said
    booked_urgent: Floats  # [priority, replica]: and of those given to it since
    num_lengths: Floats  # [priority, replica]: that prompts have, which take up the first so many places of `prompts`
    streams: Floats  # [priority, replica]
    all_streams: Floats  # [priority, replica]: those included that are on the way
    lateness: Floats  # weighted seconds that a step of all streams is late for those that run
    future_lateness: Floats  # and for those that are on the way
    # where that lies
    columns: Floats  # [column, replica]: all of the above, in that order
    prompts: Floats  # [0 said or 1 given since, 0 number or 1 seconds together, priority, place, replica]: by length


_COLUMNS = Loads.__slots__[:-2]
_PER_PRIORITY = frozenset(
    (
        "pages",
        "places",
        "at_once",
        "share",
        "own_share",
        "urgent",
        "booked_urgent",
        "num_lengths",
        "streams",
        "all_streams",
    )
)
_AGE = 3.0  # seconds: who is busy and has said nothing new for longer may have stopped
NUM_LENGTHS = len(LENGTHS) + 1


def blank(num_replicas: int, num_classes: int) -> Loads:
    """Loads of so many slots with no replica in them."""
    columns = np.zeros((len(_COLUMNS) + len(_PER_PRIORITY) * (num_classes - 1), num_replicas))
    views: dict[str, Floats] = {}
    at = 0
    for name in _COLUMNS:
        width = num_classes if name in _PER_PRIORITY else 1
        views[name] = columns[at : at + width] if name in _PER_PRIORITY else columns[at]
        at += width
    loads = Loads(**views, columns=columns, prompts=np.zeros((2, 2, num_classes, NUM_LENGTHS, num_replicas)))
    for divisor in (loads.page_size, loads.bytes_per_second, loads.share, loads.own_share, loads.stream_pages):
        divisor[:] = 1.0
    loads.budget[:] = loads.at_once[:] = 1e12  # tokens: an empty slot is none of the few that need a closer look
    return loads


@dataclass(slots=True)
class Row:
    """One replica's part of `Loads`."""

    columns: list[float]
    prompts: list[
        tuple[int, int, int, float, float]
    ]  # (said or given since, priority, place, number, seconds together)

    def put(self, loads: Loads, slot: int) -> None:
        loads.columns[:, slot] = self.columns
        loads.prompts[..., slot] = 0.0
        for given, priority, place, count, seconds in self.prompts:
            loads.prompts[given, 0, priority, place, slot] = count
            loads.prompts[given, 1, priority, place, slot] = seconds


def row(
    profile: SchedulingProfile, live: LiveProfile | None, booked: Iterable[Booking], classes: Sequence[SloClass]
) -> Row:
    """One replica's row. `booked`: what is not in `live`."""
    num_classes = len(classes)
    cost = live.cost if live is not None and live.cost else profile.cost.coefficients
    base, per_token, per_attended, per_decode, per_context = cost
    queue = _Queue()
    streams, arriving = [0.0] * num_classes, [0.0] * num_classes
    soon = [0.0] * num_classes  # streams, and those whose prompts others compute
    places, pages = [float(profile.max_num_seqs)] * num_classes, [float(profile.num_pages)] * num_classes
    prompt_shares: Sequence[float] = ()
    context = future_context = remaining = step = kept = 0.0
    rate = profile.bytes_per_second
    if live is not None:
        for group in live.prompts:
            priority = min(group.priority, num_classes - 1)
            queue.add(0, priority, group.length, group.count, group.seconds)
            arriving[priority] += group.count
            future_context += group.tokens
        num_leaving = sum(live.leaving)
        if num_leaving:  # whose tokens are whose, it does not say
            future_context *= 1 - min(num_leaving / max(sum(arriving), 1), 1)
        streams = _by_priority(live.streams, num_classes)
        soon = [*streams]
        for priority, count in enumerate(_by_priority(live.arriving, num_classes)):
            arriving[priority] += count
            soon[priority] += count
        for priority, count in enumerate(_by_priority(live.leaving, num_classes)):
            arriving[priority] -= count
        places[: len(live.places)] = live.places[:num_classes]
        pages[: len(live.free_pages)] = live.free_pages[:num_classes]
        prompt_shares, kept = live.prompt_shares, live.stream_share
        context, remaining = live.context_tokens, live.remaining_tokens
        step, rate = live.step_seconds, live.bytes_per_second or rate
    for it in booked:
        priority = min(it.priority, num_classes - 1)
        if it.seconds and not it.has_first:
            queue.add(1, priority, bisect(LENGTHS, it.seconds), 1, it.seconds)
        if it.decodes and it.has_first:
            streams[priority] += 1
            soon[priority] += 1
            context += it.tokens
            remaining += EXPECTED_TOKENS
        elif it.decodes:
            arriving[priority] += 1
            soon[priority] += not it.seconds
            future_context += it.tokens
        if it.decodes or not it.has_first:
            pages = [free - it.pages for free in pages]
            places = [free - 1 for free in places]
    num_streams, num_arriving = sum(streams), max(sum(arriving), 0.0)
    everyone = [*streams]
    for priority, count in enumerate(arriving):
        if count > 0:
            everyone[priority] += count
    decodes = base + per_decode * num_streams + per_context * context
    tightest = next((priority for priority, count in enumerate(streams) if count), num_classes)
    is_adaptive, budget = profile.chunk_policy == "adaptive", profile.max_num_batched_tokens
    page_size = profile.page_size
    shares = [1.0] * num_classes  # as in Scheduler.prefill_share
    if num_soon := sum(soon):
        seconds = decodes + per_decode * (num_soon - num_streams)
        if is_adaptive:
            priorities = [priority for priority, count in enumerate(soon) if count]
            tpot, least = min([classes[priority].tpot_s for priority in priorities]), page_size * per_token
            for priority in range(num_classes):
                floor = profile.min_chunk_tokens * per_token if priority <= priorities[0] else 0.0
                shares[priority] = share_of_prompts(seconds, tpot, profile.overrun, floor, least)
        else:
            room = budget - num_soon
            shares = [1 - seconds / (seconds + room * (per_token + per_attended * room / 2))] * num_classes
    future_gap = decodes + per_decode * num_arriving + per_context * future_context
    mean_context = (context + future_context) / max(num_streams + num_arriving, 1.0)
    begins = zip(pages, places, strict=True)
    prompts, (num_said, num_given), (urgent, booked_urgent) = queue.placed(num_classes)
    columns = [
        base,
        per_token,
        per_attended,
        per_decode,
        per_context,
        budget,
        is_adaptive,
        page_size,
        profile.page_bytes,
        rate,
        profile.admission == "reject" and bool(num_streams or num_arriving or prompts),
        step / 2,
        profile.min_chunk_tokens if is_adaptive else max(budget - num_streams, 1.0),
        max(kept - (1 - shares[0]), 0.0),
        decodes,
        tightest,
        future_gap,
        2 * remaining / num_streams**2 * max(decodes, base) if num_streams else 0.0,
        max(mean_context / page_size, 1.0),
        *pages,
        *places,
        *[(free - 1) * page_size if place >= 1 else -1.0 for free, place in begins],
        *[max(share, LEAST_SHARE) for share in shares],
        *[max(share - sum(prompt_shares[:priority]), LEAST_SHARE) for priority, share in enumerate(shares)],
        *urgent,
        *booked_urgent,
        *map(max, num_said, num_given),
        *streams,
        *everyone,
        lateness(decodes, streams, classes),
        lateness(future_gap, everyone, classes),
    ]
    return Row(columns, prompts)


@dataclass(slots=True)
class _Queue:
    """The prompts that wait at one replica."""

    groups: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    """By 0 said or 1 given since, priority and length: how many, and their seconds together."""

    def add(self, given: int, priority: int, length: int, count: float, seconds: float) -> None:
        counted, together = self.groups.get((given, priority, length), (0.0, 0.0))
        self.groups[given, priority, length] = counted + count, together + seconds

    def placed(
        self, num_classes: int
    ) -> tuple[list[tuple[int, int, int, float, float]], tuple[list[int], ...], tuple[list[float], ...]]:
        """As in `Row.prompts`; and for those said and those given, by priority, how many places they take up, and the
        seconds of those of more urgent classes."""
        prompts = []
        taken, before = ([0] * num_classes, [0] * num_classes), ([0.0] * num_classes, [0.0] * num_classes)
        for (given, priority, _), (count, seconds) in sorted(self.groups.items()):
            prompts.append((given, priority, taken[given][priority], count, seconds))
            taken[given][priority] += 1
            for less_urgent in range(priority + 1, num_classes):
                before[given][less_urgent] += seconds
        return prompts, taken, before


def _by_priority(said: Sequence[float], num_classes: int) -> list[float]:
    """In an upgrade a replica may have more classes than this router knows, or fewer."""
    if len(said) == num_classes:
        return [*said]
    known = [*said[:num_classes], *[0.0] * (num_classes - len(said))]
    known[-1] += sum(said[num_classes:])
    return known


def lateness(gap: float, streams: Sequence[float], classes: Sequence[SloClass]) -> float:
    """Seconds per token by which streams are late where a step takes `gap`, each times its class's weight."""
    late = 0.0
    for priority, slo in enumerate(classes):
        if gap > slo.tpot_s:
            late += streams[priority] * slo.weight * (gap - slo.tpot_s)
    return late


@dataclass(slots=True)
class Prediction:
    """Of one request at every replica, as if that one did all of it. Seconds."""

    prefill: Floats  # of its uncached prompt alone
    reckoned: Floats  # until the first token, as the replica's own admission reckons
    ttft: Floats
    room: Floats  # until there are a place and pages for it
    gap: Floats  # between its tokens
    prompt_late: Floats  # what streams are late by for its prompt, weighted
    stream_late: Floats  # what streams, its own included, are late by for its tokens, weighted
    tokens: Floats  # seconds that the replica works for its tokens


def predict(
    loads: Loads, query: Query, priority: int, cached: Floats, age: Floats, classes: Sequence[SloClass]
) -> Prediction:
    """`cached`: tokens of the prompt that each replica has; `age`: seconds since it last said something new, which it
    may have no end of if it has nothing to do."""
    slo = classes[priority]
    total = query.num_tokens
    rest = total - cached
    context = cached + rest / 2
    per_token = loads.per_token + loads.per_attended * context
    own = _prefill_seconds(loads, rest, cached, per_token)
    # chunking.predicted_ttft, whose prompts come here by class and length. Since it last spoke, it has gone on.
    done = np.minimum(age, _AGE) * loads.share[priority]
    ahead = np.maximum(loads.urgent[priority] - done, 0.0) + loads.booked_urgent[priority]
    width = int(loads.num_lengths[priority].max())
    if width:
        ahead += _among(loads, priority, width, done, own)
    room = _room(loads, priority, rest)
    # Who is more urgent and comes later goes first; and the longer it takes, the more streams will be there as ever.
    behind = ahead + own
    busier = loads.busier * np.exp(age / -MEMORY_S) * (behind / (behind + SOON))
    share = np.maximum(loads.own_share[priority] - busier, LEAST_SHARE)
    ttft = np.maximum(ahead / share, room) + own / share + loads.step

    chunk = np.minimum(loads.chunk, rest)
    mixed = loads.gap + chunk * per_token + loads.per_context * context
    prompt_late = stream_late = np.zeros(len(rest))
    tightest = min([it.tpot_s for it in classes])
    if mixed.max() > tightest:  # else nobody is late, and that is all
        carries = (loads.adaptive == 0) | (
            priority <= loads.tightest
        )  # nobody waits for the prompt of a less urgent class
        more = _lateness(mixed, loads.streams, classes) - loads.lateness
        prompt_late = np.where(carries, more * rest / np.maximum(chunk, 1.0), 0.0)

    num_output = min(query.max_tokens, EXPECTED_TOKENS)
    token = loads.per_decode + loads.per_context * total
    gap = loads.future_gap + token
    if gap.max() > tightest:
        more = _lateness(gap, loads.all_streams, classes) - loads.future_lateness
        stream_late = num_output * (more + slo.weight * np.maximum(gap - slo.tpot_s, 0.0))
    return Prediction(
        own, behind / loads.share[priority], ttft, room, gap, prompt_late, stream_late, num_output * token
    )


def _prefill_seconds(loads: Loads, rest: Floats, cached: Floats, per_token: Floats) -> Floats:
    """`StepCost.prefill_seconds` of every replica."""
    num_chunks: Floats | float = 1.0
    contexts = cached  # tokens before each chunk, summed
    if rest.max() > loads.budget.min():
        num_chunks = np.ceil(rest / loads.budget)
        contexts = num_chunks * (cached + loads.budget * (num_chunks - 1) / 2)
    return num_chunks * loads.base + rest * per_token + loads.per_context * contexts


def _among(loads: Loads, priority: int, width: int, done: Floats, own: Floats) -> Floats:
    """Seconds of the prompts of its own class that go before it, each of which delays it by its own length at most."""
    (counts, seconds), (booked_counts, booked_seconds) = loads.prompts[:, :, priority, :width]
    left = 1 - (done - loads.urgent[priority]) / np.maximum(seconds.sum(axis=0), 1e-9)
    left = np.minimum(np.maximum(left, 0.0), 1.0)
    among: Floats = np.minimum(seconds * left, counts * own).sum(axis=0)
    among += np.minimum(booked_seconds, booked_counts * own).sum(axis=0)
    return among


def _room(loads: Loads, priority: int, rest: Floats) -> Floats:
    """Seconds until so many streams have ended that there are a place and pages for the rest of the prompt."""
    if not (rest > loads.at_once[priority]).any():
        return np.zeros(len(rest))
    pages = np.ceil(rest / loads.page_size) + 1
    missing = np.maximum(1 - loads.places[priority], 0.0)
    missing = np.maximum(missing, np.maximum(pages - loads.pages[priority], 0.0) / loads.stream_pages)
    room: Floats = missing * loads.turnover
    return room


def _lateness(gap: Floats, streams: Floats, classes: Sequence[SloClass]) -> Floats:
    """`lateness`, of every replica."""
    late = np.zeros(len(gap))
    for slo, count in zip(classes, streams, strict=True):
        late += np.maximum(gap - slo.tpot_s, 0.0) * (slo.weight * count)
    return late


@dataclass(frozen=True, slots=True)
class Choice:
    """Slots of the replicas of a placement; `prefill` is `decode` where one does it all."""

    prefill: int
    decode: int
    cost: float  # seconds, weighted


@dataclass(frozen=True, slots=True)
class Candidates:
    """Who may be chosen, by slot."""

    alone: Slots  # for all of a request
    prefills: Slots  # for its prompt, where another makes its tokens
    decodes: Slots  # for its tokens, where another computed the prompt
    groups: NDArray[np.int64]  # of every slot: the two of a pair are of one group
    names: NDArray[np.uint32]  # of every slot: a hash of the name, so that all routers break ties alike


def choose(loads: Loads, query: Query, cached: Floats, it: Prediction, slo: SloClass, candidates: Candidates) -> Choice:
    """The placement of least cost.

    Raises:
        Overloaded: the promise cannot be kept anywhere, and all refuse what would be late.
    """
    alone, prefills, decodes = candidates.alone, candidates.prefills, candidates.decodes
    first = np.concatenate([alone, prefills]) if len(prefills) else alone
    due = RISK * slo.ttft_deadline(float(it.prefill[first].min()))
    num_output = min(query.max_tokens, EXPECTED_TOKENS)
    here = slo.weight * it.ttft + WORK * it.prefill
    here += LATE * (slo.weight * np.maximum(it.ttft - due, 0.0) + it.prompt_late)
    there = slo.weight * SPEED * num_output * it.gap + WORK * it.tokens + LATE * it.stream_late
    jitter = candidates.names ^ np.uint32(zlib.crc32(query.request_id.encode()))
    spread = 1 + TIE / 2**32 * (jitter * np.uint32(2654435761))  # wraps: a hash, the same at every router
    best: Choice | None = None
    if len(alone):
        cost = ((here + there) * spread)[alone]
        at = int(cost.argmin())
        best = Choice(int(alone[at]), int(alone[at]), float(cost[at]))
    for group in np.unique(candidates.groups[prefills]) if len(prefills) and len(decodes) else ():
        near = prefills[candidates.groups[prefills] == group]
        far = decodes[candidates.groups[decodes] == group]
        near, far = _least(near, here * spread), _least(far, there * spread)
        cost = here[near, None] + there[far] + slo.weight * _tail(loads, query, cached, it, near, far)
        cost *= np.sqrt(spread[near, None] * spread[far])
        cost[near[:, None] == far] = inf
        if cost.size and (best is None or cost.min() < best.cost):
            row, column = divmod(int(cost.argmin()), len(far))
            best = Choice(int(near[row]), int(far[column]), float(cost[row, column]))
    assert best is not None, "somebody must be there to choose from"
    if query.may_refuse and _late(loads, it, slo, best.prefill) > 0:
        late = _late(loads, it, slo, first)
        at = int(late.argmin())
        if late[at] > 0:
            promised = slo.ttft_deadline(float(it.prefill[first[at]]))
            raise Overloaded(
                f"the first token would come in {promised + late[at]:.1f} s; class {slo.name!r} promises "
                f"{promised:.1f} s. Retry in {late[at]:.1f} s, or ask for a less urgent class",
                retry_after=float(late[at]),
            )
    return best


def _late(loads: Loads, it: Prediction, slo: SloClass, slots: Slots | int) -> Floats:
    """Seconds after the promise that replicas think the first token would come, which they refuse where above 0; -inf
    of those that take all. Their admission knows nothing of places."""
    late = it.reckoned[slots] - np.maximum(slo.ttft_s, 2 * it.prefill[slots])
    return np.where(loads.refuses[slots] > 0, late, -inf)


def _least(slots: Slots, cost: Floats) -> Slots:
    """The `KEPT` slots of least cost."""
    if len(slots) <= KEPT:
        return slots
    return slots[np.argpartition(cost[slots], KEPT)[:KEPT]]


def _tail(loads: Loads, query: Query, cached: Floats, it: Prediction, near: Slots, far: Slots) -> Floats:
    """[prefill, decode]: seconds from the first token, which comes from the prefill replica, until the other has all
    pages and room for them. Pages travel while the prompt is computed; the last chunk's only when it is."""
    num_bytes = (query.num_tokens - cached[far]) / loads.page_size[far] * loads.page_bytes[far]
    travel = num_bytes / loads.bytes_per_second[near, None]
    last = np.minimum(travel, travel * (loads.budget[near] / max(query.num_tokens, 1))[:, None])
    behind = np.maximum(travel - it.prefill[near, None], last)
    return HANDOVER + np.maximum(behind, it.room[far] - it.ttft[near, None])
