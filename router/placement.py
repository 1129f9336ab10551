r"""Where a request goes: `choose` compares what it would cost on every replica, and on every pair of replicas.

Costs are seconds. A second of lateness counts `LATE_WEIGHT` times a second of work. So placements that keep every
promise are compared by time alone, the others by their lateness, weighed by class. A cached prefix is fewer seconds and
needs no rule of its own. One replica and two are compared in the same way. Pure functions over arrays of slots.

The comments on constants give what another value does in simulation (2026-11-22, means of `--seeds 2`, whose intervals
are wider than most of these effects). The commands are called, in this order, knee, loaded and pools:

    crossdock simulate benchmarks/fleet.yaml -w chat --prompt-tokens 2048 --output-tokens 64 \
        --service-tier interactive --request-rate 45 --duration 20
    crossdock simulate benchmarks/fleet.yaml --long-share 0.2 --request-rate 120 --duration 20
    crossdock simulate --pools prefill=2xh100-8b,decode=2xh100-8b --long-share 0.1 --request-rate 140 --duration 20
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from crossdock.router.loads import Loads, Slots
from crossdock.router.predict import Prediction, PromptPrediction
from crossdock.router.query import Query
from crossdock.workers.schedule.cost.formula import Floats
from crossdock.workers.schedule.request.slo import SloClass
from crossdock.workers.schedule.request.submission import Overloaded

LATE_WEIGHT = 100.0
"""Cost of one weighted second of lateness, in seconds of work: large, so that a promise is broken only where every
placement breaks one. knee: with 1, good requests fall from 95.4 to 95.1 %; from 10 on nothing changes."""

DEADLINE_SHARE = 0.85
"""Share of a TTFT deadline that a predicted TTFT may use before it counts as late, because predictions err. knee: with
1, good requests fall from 95.4 to 95.0 %; with 0.6 they stay."""

DECODE_WEIGHT = 0.1
"""Cost of one second of the request's own decoding, in seconds of its TTFT: a user reads while tokens come. knee: with
1, good requests fall from 95.4 to 93.8 %; loaded: with 0, from 97.1 to 96.9 %."""

TIE_SHARE = 0.02
"""Costs are multiplied by a hash between 1 and 1 + this share, so that routers with the same knowledge do not all
choose the same one of nearly equal replicas. knee: with 0, good requests fall from 95.4 to 94.6 %, with 0.2 to
95.1 %."""

HANDOVER_S = 0.005
"""Seconds that a pair costs besides the transfer of pages, for messages and a registration: of the order of the round
trips in benchmarks/records/nixl.md. pools: 18.8 % of requests are shipped, with 0 20.4 %, with 0.05 15.4 %."""

EVICTION_WEIGHT = 2.0
"""Cost of one second of prefill that evicted pages will need again, in seconds of work: a replica works for it, and the
request that needs it waits for it. 64 agents on eight replicas of 1,500 pages (simulated, 2026-11-23):
with 0, 0.5, 1, 2, 4, 8 and 32, 87, 87.5, 89.4, 90.6, 91.2, 91.1 and 90.1 % of prompt tokens are cached."""

PAIR_CANDIDATES = 4
"""Replicas of least cost that are tried as a pair's prefill replica, and as its decode replica. More would cost time at
every decision. pools: with 1, 16.4 % of requests are shipped instead of 18.8 %; with 100, the same as with 4."""


class Placement(Struct, frozen=True):
    """Where a request goes. With a `prefill` replica, that one computes the prompt and ships its pages."""

    decode: str
    prefill: str | None = None
    source: str | None = None  # the replica that sends pages of the prefix to the one that computes the prompt
    source_tokens: int = 0  # of its prefix, at the source
    source_seconds: float = 0.0  # for which the source's link is busy with the pages
    alternatives: Mapping[str, float] = {}  # predicted TTFT of each, where some have a prefix
    reason: str = ""
    predicted_ttft: float = 0.0  # seconds
    predicted_gap: float = 0.0  # seconds between its tokens, once it decodes
    late: float = 0.0  # seconds by which it and other requests would miss their promises, weighted by class
    cached_tokens: int = 0  # of its prompt, at the replica that computes the rest
    prefill_seconds: float = 0.0  # of that replica's time that the rest takes
    weights: str = ""  # of the decode replica, where a stream is bound to them; see `SchedulingProfile`

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas that work on the request, the one that generates last."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


class SlotPair(NamedTuple):
    """The replica slots of a placement; `prefill` equals `decode` where one replica does everything."""

    prefill: int
    decode: int
    cost: float = 0.0  # weighted seconds; 0: costs were not compared


@dataclass(frozen=True, slots=True)
class Candidates:
    """The replica slots that may be chosen."""

    alone: Slots  # for everything
    prefills: Slots  # for the prompt alone
    decodes: Slots  # for the output alone
    groups: NDArray[np.int64]  # of every slot: pages travel only within a group
    name_hashes: NDArray[np.uint32]  # of every slot: all routers break ties alike

    @property
    def first(self) -> Slots:
        """Return the slots that may make the first token."""
        return np.concatenate([self.alone, self.prefills]) if len(self.prefills) else self.alone


class Fetch(NamedTuple):
    """From where a replica would fetch pages."""

    source: int  # its slot
    tokens: float  # of the prompt, that the source has
    seconds: float  # for which the source's link is busy with the pages


class Options(NamedTuple):
    """A request, the replicas that may take it, and the prediction of the request at each replica."""

    query: Query
    slo: SloClass
    candidates: Candidates
    loads: Loads
    cached: Any  # [slot]: tokens of the prompt in its pool, or loaded; not those fetched. A float of an only replica
    prediction: Prediction[Any]  # with the best way to the pages of the prompt that each replica lacks
    loading: Sequence[int] | Slots = ()  # replicas that load pages from tiers
    alternatives: Mapping[str, float] = {}  # see `Placement`
    fetches: Mapping[int, Fetch] = {}  # by slot of a replica that fetches pages from another

    def due_s(self) -> float:
        """Return the TTFT from which on the request counts as late."""
        alone = self.prediction.alone.take(self.candidates.first)
        return DEADLINE_SHARE * self.slo.ttft_deadline(float(alone.min()))

    def prompt_costs(self, due: float, prediction: PromptPrediction[Floats]) -> Floats:
        """Return the weighted seconds of computing the prompt: until its token, of its work, and of lateness.

        The seconds by which longer prompts come later count, also as lateness, as if the prompt itself came later.
        `due`: see `due_s`. `prediction`: that of these options, or of some of the replicas with more pages."""
        ttft = prediction.ttft + prediction.delays
        late = self.slo.weight * np.maximum(ttft - due, 0.0)
        costs: Floats = self.slo.weight * ttft + prediction.prefill + LATE_WEIGHT * (late + prediction.prompt_lateness)
        return costs


def choose(options: Options) -> SlotPair:
    """Return the placement of least cost.

    Raises:
        Overloaded: no replica can keep the promise, and every replica refuses late requests.
    """
    query, slo, candidates, prediction = options.query, options.slo, options.candidates, options.prediction
    due = options.due_s()
    prompt_cost = options.prompt_costs(due, prediction)
    pace = slo.weight * DECODE_WEIGHT * query.expected_output * prediction.gap
    evicted = EVICTION_WEIGHT * prediction.evicted
    output_cost = pace + prediction.decode_work + LATE_WEIGHT * prediction.decode_lateness + evicted
    spread = _tie_spread(query.request_id, candidates.name_hashes)
    best: SlotPair | None = None
    if len(alone := candidates.alone):
        costs = ((prompt_cost + output_cost) * spread)[alone]
        at = int(costs.argmin())
        best = SlotPair(int(alone[at]), int(alone[at]), float(costs[at]))
    if len(candidates.prefills) and len(candidates.decodes):
        prompt_cost += evicted  # a pair keeps the pages of the prompt on both replicas
        room = prediction.room_wait
        room_cost = output_cost + slo.weight * (room + LATE_WEIGHT * np.maximum(room - due, 0.0))
        for group in np.unique(candidates.groups[candidates.prefills]):
            near = least(_within(candidates.prefills, group, candidates), prompt_cost * spread, PAIR_CANDIDATES)
            far = least(_within(candidates.decodes, group, candidates), room_cost * spread, PAIR_CANDIDATES)
            costs = prompt_cost[near, None] + output_cost[far] + _handover_costs(options, due, near, far)
            costs *= np.sqrt(spread[near, None] * spread[far])
            costs[near[:, None] == far] = inf
            if costs.size and (best is None or costs.min() < best.cost):
                row, column = divmod(int(costs.argmin()), len(far))
                best = SlotPair(int(near[row]), int(far[column]), float(costs[row, column]))
    assert best is not None, "there must be a replica to choose"
    check_promise(options, best)
    return best


def check_promise(options: Options, chosen: SlotPair) -> None:
    """Raise Overloaded where the `chosen` replica would refuse the request as late, and all that may take it would."""
    slot, prediction = chosen.prefill, options.prediction
    if not options.query.may_refuse or not options.loads.refuses_late[slot]:
        return
    if slot == chosen.decode and _late_s(options, slot, prediction.room_wait[slot]) <= 0:
        return  # the usual case: the other replicas need not be looked at
    late = late_refusal_s(options)
    at = int(late.argmin())
    if late[at] > 0:
        promised = options.slo.ttft_deadline(float(prediction.alone[options.candidates.first[at]]))
        raise Overloaded.late(options.slo.name, promised, float(late[at]))


def _tie_spread(request_id: str, name_hashes: NDArray[np.uint32]) -> NDArray[np.floating[Any]]:
    """Return a factor from 1 to 1 + `TIE_SHARE` for every slot. A hash of request and replica decides, equal at every
    router."""
    hashes = (name_hashes ^ np.uint32(zlib.crc32(request_id.encode()))) * np.uint32(2654435761)  # wraps
    return 1 + TIE_SHARE / 2**32 * hashes


def _within(slots: Slots, group: np.int64, candidates: Candidates) -> Slots:
    within: Slots = slots[candidates.groups[slots] == group]
    return within


def least(slots: Slots, costs: Floats, most: int) -> Slots:
    """Return the slots of least cost, at most so many. `costs`: of every slot."""
    return slots if len(slots) <= most else slots[costs.take(slots).argpartition(most)[:most]]


def _handover_costs(options: Options, due: float, near: Slots, far: Slots) -> Floats:
    """Return the weighted seconds `[prefill, decode]` that a pair costs beside its prompt and its output.

    The client gets the first token once it is computed; where the decode replica has room only later, once all pages
    have come. The second one needs all pages. They travel from then on while the prompt is computed; those of the last
    chunk, and of the state, afterwards. Where that takes longer than a token may, the stream is late.
    """
    slo = options.slo
    computed = options.prediction.ttft[near, None]
    room = options.prediction.room_wait[far]
    travel, behind = _travel(options, near, far)
    first = np.where(room > computed, room + travel, computed)
    gap = HANDOVER_S + np.maximum(computed + behind, room + travel) - first
    late = np.maximum(first - due, 0.0) - np.maximum(computed - due, 0.0) + np.maximum(gap - slo.tpot_s, 0.0)
    costs: Floats = slo.weight * (first - computed + gap + LATE_WEIGHT * late)
    return costs


def first_token_s(options: Options, near: Slots, far: Slots) -> float:
    """Return the least seconds to a first token of all pairs, as `_handover_costs` has them."""
    computed, room = options.prediction.ttft[near, None], options.prediction.room_wait[far]
    if (room <= computed).all():
        return float(computed.min())
    travel, _ = _travel(options, near, far)
    return float(np.where(room > computed, room + travel, computed).min())


def _travel(options: Options, near: Slots, far: Slots) -> tuple[Floats, Floats]:
    """Return the seconds `[prefill, decode]` for which pages travel, and those of them after the prompt is computed."""
    loads, prediction, num_tokens = options.loads, options.prediction, options.query.num_tokens
    pages = (num_tokens - options.cached[far]) / loads.pages.size[far]
    num_bytes = loads.group_pages(pages, far) * loads.pages.num_bytes[far]
    travel = num_bytes / loads.pages.bytes_per_second[near, None]
    behind = travel_behind(travel, prediction.chunk[near, None], prediction.alone[near, None], num_tokens)
    state = loads.pages.state_pages[far] * loads.pages.num_bytes[far] / loads.pages.bytes_per_second[near, None]
    after = loads.pages.transfer_s[near, None] + state
    return travel + after, behind + after


def travel_behind(travel: Floats, chunk: Floats, alone: Floats, num_tokens: int) -> Floats:
    """Return the seconds by which pages arrive after they are computed. They take `travel` seconds in all, and travel
    while the prompt is computed, which takes `alone` seconds; those of the last `chunk` tokens only afterwards."""
    last = np.minimum(travel, travel * (chunk / max(num_tokens, 1)))
    behind: Floats = np.maximum(travel - alone, last)
    return behind


def late_refusal_s(options: Options) -> Floats:
    """Return by how many seconds the first token of each replica in `candidates.first` is expected to be late; the
    request is refused where that is above 0. -inf for replicas that refuse nothing.

    The replica's own admission does not consider room. Where it would come too late, the router refuses the request."""
    candidates, first = options.candidates, options.candidates.first
    room = options.prediction.room_wait[first]
    if len(candidates.prefills) and len(candidates.decodes):  # a pair waits for room of its decode replica
        room[len(candidates.alone) :] = options.prediction.room_wait[candidates.decodes].min()
    return np.where(options.loads.refuses_late[first] > 0, _late_s(options, first, room), -inf)


def _late_s(options: Options, slots: Slots | int, room: Floats) -> Floats:
    """Return by how many seconds first tokens made in `slots` are expected to be late. `room`: seconds until there is
    some."""
    promised = options.slo.ttft_deadline(options.prediction.alone[slots], np.maximum)
    late: Floats = np.maximum(options.prediction.admission_ttft[slots], room) - promised
    return late
