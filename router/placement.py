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
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdock.workers.live import LENGTHS, LiveProfile
from crossdock.workers.pages import PageHash
from crossdock.workers.profile import SchedulingProfile
from crossdock.workers.request import Overloaded
from crossdock.workers.slo import DEFAULT_CLASS, SloClass

Floats: TypeAlias = NDArray[np.float64]
Slots: TypeAlias = NDArray[np.intp]

LATE = 100.0  # what a second after a promise weighs against one of work
RISK = 0.85  # of the time to a first token that a prediction may use up: predictions err
WORK = 1.0  # what a second that a replica works for a request weighs against one that a user waits for it
SPEED = 0.1  # what a second of the request's own decoding weighs against one until its first token
EXPECTED_TOKENS = 128  # of an output, unless it may have fewer
TIE = 0.02  # placements are as good as each other within this share of the best one's cost
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

    rank: int
    tokens: int  # of the prompt
    seconds: float  # that the replica computes of it; 0: another does
    pages: int  # that it takes there
    decodes: bool  # whether its tokens will be made there
    has_first: bool = False


@dataclass(slots=True)
class Loads:
    """What replicas can do and have to do. One entry each; `[replica, rank]` where it is per class."""

    # what they can do
    base: Floats
    per_token: Floats
    per_attended: Floats
    per_decode: Floats
    per_context: Floats
    budget: Floats  # tokens a step may carry
    adaptive: Floats  # 1: chunks fit the streams' promises; 0: they fill the budget
    floor: Floats  # adaptive: tokens of a prompt that a step carries all the same
    rejects: Floats  # 1: refuses what would be late
    page_size: Floats
    page_bytes: Floats
    bytes_per_second: Floats
    longest: Floats  # tokens, prompt and output
    # what they have to do
    busy: Floats  # 1: something
    step: Floats  # seconds of the running step
    share: Floats  # of a step's time that streams leave to prompts
    gap: Floats  # seconds of a step of all streams and no prompt
    tightest: Floats  # rank of the most urgent stream
    future_gap: Floats  # of a step of all streams, those included that are on the way
    turnover: Floats  # seconds from one stream's end to the next
    stream_pages: Floats  # that each gives back
    pages: Floats  # [replica, rank]
    places: Floats  # [replica, rank]
    overtaking: Floats  # [replica, rank]: share of its time that goes into prompts of more urgent classes
    urgent: Floats  # [replica, rank]: seconds of prompts of more urgent classes, as it last said
    booked_urgent: Floats  # [replica, rank]: and of those given to it since
    streams: Floats  # [replica, rank]
    all_streams: Floats  # [replica, rank]: those included that are on the way
    lateness: Floats  # weighted seconds that a step of all streams is late for those that run
    future_lateness: Floats  # and for those that are on the way
    counts: Floats  # [replica, rank, length]: prompts, as it last said
    seconds: Floats  # [replica, rank, length]: of these prompts together
    booked_counts: Floats  # [replica, rank, length]: prompts given to it since
    booked_seconds: Floats  # [replica, rank, length]


_SHARED = ("pages", "places", "overtaking", "urgent", "booked_urgent", "streams", "all_streams")  # one column per rank
_BINNED = ("counts", "seconds", "booked_counts", "booked_seconds")
NUM_LENGTHS = len(LENGTHS) + 1


def num_columns(num_ranks: int) -> int:
    return len(Loads.__slots__) + len(_SHARED) * (num_ranks - 1) + len(_BINNED) * (num_ranks * NUM_LENGTHS - 1)


def views(table: Floats, num_ranks: int) -> Loads:
    """`Loads` as windows on the columns of `table`, whose rows `row` makes."""
    columns: list[Floats] = []
    at = 0
    for name in Loads.__slots__:
        if name in _SHARED:
            columns.append(table[:, at : at + num_ranks])
            at += num_ranks
        elif name in _BINNED:
            width = num_ranks * NUM_LENGTHS
            columns.append(
                np.lib.stride_tricks.as_strided(
                    table[:, at:],
                    (len(table), num_ranks, NUM_LENGTHS),
                    (table.strides[0], table.strides[1] * NUM_LENGTHS, table.strides[1]),
                )
            )
            at += width
        else:
            columns.append(table[:, at])
            at += 1
    return Loads(*columns)


def row(
    profile: SchedulingProfile, live: LiveProfile | None, booked: Iterable[Booking], classes: Sequence[SloClass]
) -> list[float]:
    """One replica's row. `booked`: what is not in `live`."""
    ranks = range(len(classes))
    cost = live.cost if live is not None and live.cost else profile.cost.coefficients
    base, per_token, per_attended, per_decode, per_context = cost
    counts, seconds, booked_counts, booked_seconds = ([0.0] * (len(classes) * NUM_LENGTHS) for _ in _BINNED)
    streams, arriving = [0.0] * len(classes), [0.0] * len(classes)
    places, pages = [float(profile.max_num_seqs)] * len(classes), [float(profile.num_pages)] * len(classes)
    overtaking = [0.0] * len(classes)
    context = future_context = remaining = step = 0.0
    rate = profile.bytes_per_second
    if live is not None:
        last = len(classes) - 1  # in an upgrade a replica may have more classes than this router knows
        for prompts in live.prompts:
            at = min(prompts.rank, last) * NUM_LENGTHS + prompts.length
            counts[at] += prompts.count
            seconds[at] += prompts.seconds
            arriving[min(prompts.rank, last)] += prompts.count
            future_context += prompts.tokens
        for rank, count in enumerate(live.streams):
            streams[min(rank, last)] += count
        for rank, count in enumerate(live.arriving):
            arriving[min(rank, last)] += count
        for rank, count in enumerate(live.leaving):
            arriving[min(rank, last)] -= count
        num_prompts = sum(prompts.count for prompts in live.prompts)
        future_context *= 1 - min(sum(live.leaving) / max(num_prompts, 1), 1)  # whose tokens are whose, it does not say
        for column, said in ((places, live.places), (pages, live.free_pages)):
            column[: len(said)] = map(float, said[: len(classes)])
        for rank in ranks:
            overtaking[rank] = sum(live.prompt_shares[:rank])
        context, remaining = live.context_tokens, live.remaining_tokens
        step, rate = live.step_seconds, live.bytes_per_second or rate
    for it in booked:
        here = min(it.rank, len(classes) - 1)
        if it.seconds and not it.has_first:
            at = here * NUM_LENGTHS + bisect(LENGTHS, it.seconds)
            booked_counts[at] += 1
            booked_seconds[at] += it.seconds
        if it.decodes and it.has_first:
            streams[here] += 1
            context += it.tokens
            remaining += EXPECTED_TOKENS
        elif it.decodes:
            arriving[here] += 1
            future_context += it.tokens
        if it.decodes or not it.has_first:
            pages = [free - it.pages for free in pages]
            places = [free - 1 for free in places]
    num_streams, num_arriving = sum(streams), max(sum(arriving), 0.0)
    everyone = [running + max(coming, 0.0) for running, coming in zip(streams, arriving, strict=True)]
    decodes = base + per_decode * num_streams + per_context * context
    tightest = next((rank for rank in ranks if streams[rank]), len(classes))
    share = 1.0
    if num_streams:
        if profile.chunk_policy == "adaptive":
            period = min(slo.tpot_s for slo, count in zip(classes, streams, strict=True) if count)
        else:
            room = profile.max_num_batched_tokens - num_streams
            period = decodes + room * (per_token + per_attended * room / 2)
        share = max(1 - min(decodes / period, 1.0), 0.05)
    future_gap = decodes + per_decode * num_arriving + per_context * future_context
    mean_context = (context + future_context) / max(num_streams + num_arriving, 1.0)
    turnover = 2 * remaining / num_streams**2 * max(decodes, base) if num_streams else 0.0
    return [
        base,
        per_token,
        per_attended,
        per_decode,
        per_context,
        profile.max_num_batched_tokens,
        profile.chunk_policy == "adaptive",
        profile.min_chunk_tokens,
        profile.admission == "reject",
        profile.page_size,
        profile.page_bytes,
        rate,
        profile.max_model_len,
        bool(num_streams or num_arriving or any(counts) or any(booked_counts)),
        step,
        share,
        decodes,
        tightest,
        future_gap,
        turnover,
        max(mean_context / profile.page_size, 1.0),
        *pages,
        *places,
        *overtaking,
        *(sum(seconds[: rank * NUM_LENGTHS]) for rank in ranks),
        *(sum(booked_seconds[: rank * NUM_LENGTHS]) for rank in ranks),
        *streams,
        *everyone,
        lateness(decodes, streams, classes),
        lateness(future_gap, everyone, classes),
        *counts,
        *seconds,
        *booked_counts,
        *booked_seconds,
    ]


def lateness(gap: float, streams: Sequence[float], classes: Sequence[SloClass]) -> float:
    """Seconds per token by which streams are late where a step takes `gap`, each times its class's weight."""
    return sum(
        count * slo.weight * (gap - slo.tpot_s)
        for count, slo in zip(streams, classes, strict=True)
        if count and gap > slo.tpot_s
    )


@dataclass(slots=True)
class Prediction:
    """Of one request at every replica, as if that one did all of it. Seconds."""

    prefill: Floats  # of its uncached prompt alone
    refused: Floats  # until its first token as the replica's own admission reckons; it knows nothing of places
    ttft: Floats
    deadline: Floats  # of the first token, as the replica promises it
    room: Floats  # until there are a place and pages for it
    gap: Floats  # between its tokens
    prompt_late: Floats  # what streams are late by for its prompt, weighted
    stream_late: Floats  # what streams, its own included, are late by for its tokens, weighted
    tokens: Floats  # seconds that the replica works for its tokens


def predict(
    loads: Loads, query: Query, rank: int, cached: Floats, age: Floats, classes: Sequence[SloClass]
) -> Prediction:
    """`cached`: tokens of the prompt that each replica has; `age`: seconds since it last said something new."""
    slo = classes[rank]
    total = query.num_tokens
    rest = total - cached
    per_token = loads.per_token + loads.per_attended * (cached + rest / 2)
    num_chunks = np.ceil(rest / loads.budget)
    contexts = num_chunks * (cached + loads.budget * (num_chunks - 1) / 2)  # tokens before each chunk, summed
    own = num_chunks * loads.base + rest * per_token + loads.per_context * contexts
    # chunking.predicted_ttft, whose prompts come here by class and length. Since it last spoke, it has gone on.
    done = age * loads.share
    urgent = np.maximum(loads.urgent[:, rank] - done, 0.0) + loads.booked_urgent[:, rank]
    peers = loads.seconds[:, rank]
    left = peers.sum(axis=1)
    left = np.clip(1 - (done - loads.urgent[:, rank]) / np.maximum(left, 1e-9), 0.0, 1.0)
    among = np.minimum(peers * left[:, None], loads.counts[:, rank] * own[:, None]).sum(axis=1)
    among += np.minimum(loads.booked_seconds[:, rank], loads.booked_counts[:, rank] * own[:, None]).sum(axis=1)
    refused = (urgent + among + own) / loads.share
    share = np.maximum(loads.share - loads.overtaking[:, rank], 0.05)  # who is more urgent and comes later goes first
    missing = np.maximum(1 - loads.places[:, rank], 0.0)
    pages = np.ceil((total - cached) / loads.page_size) + 1
    missing = np.maximum(missing, np.maximum(pages - loads.pages[:, rank], 0.0) / loads.stream_pages)
    room = missing * loads.turnover
    ttft = np.maximum((urgent + among) / share, room) + own / share + loads.step / 2

    chunk = np.where(loads.adaptive > 0, loads.floor, np.maximum(loads.budget - loads.streams.sum(axis=1), 1.0))
    chunk = np.minimum(chunk, rest)
    context = cached + rest / 2
    mixed = loads.gap + chunk * (loads.per_token + loads.per_attended * context) + loads.per_context * context
    carries = (loads.adaptive == 0) | (rank <= loads.tightest)  # nobody waits for the prompt of a less urgent class
    more = _lateness(mixed, loads.streams, classes) - loads.lateness
    prompt_late = np.where(carries, more * rest / np.maximum(chunk, 1.0), 0.0)

    num_output = min(query.max_tokens, EXPECTED_TOKENS)
    token = loads.per_decode + loads.per_context * total
    gap = loads.future_gap + token
    more = _lateness(gap, loads.all_streams, classes) - loads.future_lateness
    stream_late = num_output * (more + slo.weight * np.maximum(gap - slo.tpot_s, 0.0))
    deadline = np.maximum(slo.ttft_s, 2 * own)
    return Prediction(own, refused, ttft, deadline, room, gap, prompt_late, stream_late, num_output * token)


def _lateness(gap: Floats, streams: Floats, classes: Sequence[SloClass]) -> Floats:
    """`lateness`, of every replica."""
    late: Floats = sum(
        (np.maximum(gap - slo.tpot_s, 0.0) * (slo.weight * streams[:, rank]) for rank, slo in enumerate(classes)),
        np.zeros(len(gap)),
    )
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
    if query.may_refuse:
        _admit(loads, it, slo, first)
    due = RISK * max(slo.ttft_s, 2 * float(it.prefill[first].min()))
    num_output = min(query.max_tokens, EXPECTED_TOKENS)
    here = slo.weight * it.ttft + WORK * it.prefill
    here += LATE * (slo.weight * np.maximum(it.ttft - due, 0.0) + it.prompt_late)
    there = slo.weight * SPEED * num_output * it.gap + WORK * it.tokens + LATE * it.stream_late
    jitter = candidates.names ^ np.uint32(zlib.crc32(query.request_id.encode()))
    spread = 1 + TIE / 2**32 * (jitter * np.uint32(2654435761))  # wraps: a hash, the same at every router
    best: Choice | None = None
    if len(alone):
        cost = (here[alone] + there[alone]) * spread[alone]
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
    return best


def _admit(loads: Loads, it: Prediction, slo: SloClass, first: Slots) -> None:
    """Overloaded, where each of `first` would refuse the request."""
    late = np.where((loads.rejects[first] > 0) & (loads.busy[first] > 0), (it.refused - it.deadline)[first], -inf)
    at = int(late.argmin())
    if late[at] > 0:
        raise Overloaded(
            f"the first token would come in {it.refused[first[at]]:.1f} s; class {slo.name!r} promises "
            f"{it.deadline[first[at]]:.1f} s. Retry in {late[at]:.1f} s, or ask for a less urgent class",
            retry_after=float(late[at]),
        )


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
