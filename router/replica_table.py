"""The replicas that one router knows: a state for each, and a slot for each in the arrays of `Loads`."""

import zlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import get_args

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from crossdock.router.loads import Loads, Row, Slots, blank
from crossdock.router.placement import Candidates
from crossdock.router.rows import StepPace, row
from crossdock.router.work import InFlightLoad
from crossdock.workers.report.live_profile import Learnt, LiveProfile, TierLoads
from crossdock.workers.report.profile import Role, SchedulingProfile
from crossdock.workers.schedule.cost.formula import Floats
from crossdock.workers.schedule.request.slo import SloClass
from crossdock.workers.schedule.request.weight_version import WeightVersion

ROLES: Sequence[Role] = get_args(Role)
_FIRST_CAPACITY = 8  # slots; doubled when they run out
_SEEN = 64  # pending requests of which the row may lack one


def _counted() -> defaultdict[str, int]:
    """Return a mapping that gives each new key a number of its own."""
    return defaultdict(count(1).__next__)


@dataclass(slots=True)
class ReplicaState:
    """One replica as a router sees it: its profiles, and the requests that this router placed on it.

    A request is `pending` until a live profile includes it, and `included` from then until it ends.
    """

    name: str
    slot: int
    profile: SchedulingProfile
    dirty: set[int]  # of all replicas: slots whose entries in `Loads` must be written before the next choice
    live: LiveProfile | None = None
    pending: dict[str, InFlightLoad] = field(default_factory=dict)  # by request
    included: dict[str, InFlightLoad] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)  # pending requests it took: the last live profile without each
    paces: dict[tuple[float, ...], StepPace] = field(default_factory=dict)  # see `row`
    row: Row | None = None  # made for the last choice; None: it must be made again
    num_unseen: int = 0  # pending requests that the row lacks

    def touch(self) -> None:
        """Note that the row must be made again."""
        self.row = None
        self.dirty.add(self.slot)

    @property
    def role(self) -> Role:
        """The role that this replica has now."""
        return (self.live and self.live.role) or self.profile.role

    @property
    def num_requests(self) -> int:
        """The number of requests: reported ones, and ones placed since the report."""
        live = self.live
        reported = (
            sum(live.streams.counts) + sum(live.streams.arriving) + sum(p.count for p in live.prefills.groups)
            if live
            else 0
        )
        return reported + len(self.pending)

    def has_adapter(self, adapter: str) -> bool:
        """Return whether the replica has reported an adapter, or has been given a request that needs the adapter."""
        is_loaded = self.live is not None and adapter in self.live.adapters.fingerprints
        return is_loaded or any(in_flight.query.adapter == adapter for in_flight in self.pending.values())

    def count_tokens(self) -> tuple[int, int]:
        """Return (uncached prompt tokens that are not computed yet, tokens in the contexts of streams)."""
        waiting = 0
        context = 0
        if self.live:
            waiting = sum(prompts.tokens for prompts in self.live.prefills.groups)
            context = self.live.streams.context_tokens
        for in_flight in self.pending.values():
            if in_flight.has_first:
                context += in_flight.query.num_tokens
            elif in_flight.seconds:
                waiting += in_flight.query.num_tokens
        return waiting, context

    def is_news(self, live: LiveProfile) -> bool:
        """Return whether a live profile is newer than the one known: of a later sequence, or of another incarnation."""
        known = self.live
        return known is None or known.incarnation != live.incarnation or known.sequence < live.sequence

    def report(self, live: LiveProfile) -> None:
        """Replace the live profile, and move the requests it includes out of the pending ones.

        A new incarnation has none of the requests that the one before had taken.
        """
        if self.live is not None and self.live.incarnation != live.incarnation:
            for request_id in self.taken:
                del self.pending[request_id]
            self.taken.clear()
            self.included.clear()
        self.live = live
        self.paces.clear()
        for request_id in [key for key, sequence in self.taken.items() if sequence < live.sequence]:
            del self.taken[request_id]
            self.included[request_id] = self.pending.pop(request_id)
        self.touch()

    def take(self, request_id: str, sequence: int) -> None:
        """Note that the replica has taken the request: its live profiles after number `sequence` include it."""
        if request_id not in self.pending:
            return
        if self.live is not None and self.live.sequence > sequence:
            self.included[request_id] = self.pending.pop(request_id)
            self.touch()
        else:
            self.taken[request_id] = sequence

    def first_token(self, request_id: str) -> None:
        """Note that the prompt is computed."""
        in_flight = self.pending.get(request_id) or self.included.get(request_id)
        if in_flight is None or in_flight.has_first:
            return
        in_flight.take_first_token()
        if request_id in self.pending:
            self.touch()

    def place(self, request_id: str, in_flight: InFlightLoad) -> None:
        """Add a request.

        A request of OpenAI's may have 2,048 inputs, which are placed one after the other. To make a row takes time for
        each pending request, so the row of many lacks up to one in `_SEEN` of them.
        """
        self.pending[request_id] = in_flight
        self.num_unseen += 1
        if self.num_unseen * _SEEN >= len(self.pending):
            self.touch()

    def settle(self, request_id: str) -> None:
        """Remove a request."""
        self.included.pop(request_id, None)
        self.taken.pop(request_id, None)
        if self.pending.pop(request_id, None) is not None:
            self.touch()


@dataclass(slots=True)
class ReplicaTable:
    """All replicas of one router, by name and by slot. A slot is reused when its replica has left.

    A replica that has been silent for `silence_s`, or has not reported yet, is stale. It counts as busy as the busiest
    replica of its kind that is not stale, or as busy as it last reported, whichever is more; and as having every
    request that this router ever placed there. So a silent replica attracts no crowd, and is not shut out.
    """

    silence_s: float
    classes: Sequence[SloClass] = ()
    by_name: dict[str, ReplicaState] = field(default_factory=dict)
    by_slot: list[ReplicaState | None] = field(default_factory=list)
    paused: set[str] = field(default_factory=set)  # names of replicas that compute nothing for now
    newest: WeightVersion = WeightVersion()  # noqa: RUF009  # of all that replicas have ever reported
    outdated: set[str] = field(default_factory=set)  # names of replicas with older weights
    loads: Loads = field(init=False)
    groups: NDArray[np.int64] = field(init=False)  # [slot]: pages travel only within a group
    name_hashes: NDArray[np.uint32] = field(init=False)  # [slot]
    roles: NDArray[np.int64] = field(init=False)  # [slot]: places in `ROLES`; -1 in an empty slot
    heard_at: Floats = field(init=False)  # [slot]: time of the last message; infinity in an empty slot
    news_at: Floats = field(init=False)  # [slot]: time of the last new live profile
    sends_until: Floats = field(init=False)  # [slot]: time at which the replica has sent the prefixes asked for so far
    now: float = 0.0  # time of the last choice
    _all_heard_since: float = inf  # a time since which every replica has been heard
    _group_of: dict[str, int] = field(default_factory=_counted)  # by compatibility, of the replicas there are
    _candidates: dict[tuple[str, bool], Candidates] = field(default_factory=dict)  # by what they depend on
    _dirty: set[int] = field(default_factory=set)  # see `ReplicaState`
    _stale: set[int] = field(default_factory=set)  # slots whose rows are made again at every choice

    def __post_init__(self) -> None:
        self.groups = np.zeros(0, dtype=np.int64)
        self.name_hashes = np.zeros(0, dtype=np.uint32)
        self.roles = np.zeros(0, dtype=np.int64)
        self.heard_at = self.news_at = self.sends_until = np.zeros(0)
        self._allocate(_FIRST_CAPACITY)

    def __len__(self) -> int:
        return len(self.by_name)

    def join(self, name: str, profile: SchedulingProfile, now: float) -> None:
        if tuple(self.classes) != profile.slo_classes:
            self.classes = profile.slo_classes
            self._allocate(len(self.by_slot))
        if None not in self.by_slot:
            self._allocate(2 * len(self.by_slot))
        slot = self.by_slot.index(None)
        self.by_name[name] = self.by_slot[slot] = ReplicaState(name, slot, profile, self._dirty)
        self.name_hashes[slot] = zlib.crc32(name.encode())
        self.groups[slot] = self._group_of[_group(name, profile)]
        self.roles[slot] = ROLES.index(profile.role)
        self.heard_at[slot] = self.news_at[slot] = self.sends_until[slot] = now
        self._all_heard_since = min(self._all_heard_since, now)
        self._dirty.add(slot)
        self._stale.add(slot)
        if self.newest.number:
            self.outdated.add(name)  # until it reports
        self._candidates.clear()

    def leave(self, name: str) -> int | None:
        """Remove a replica. Return its slot, or None if there is no such replica."""
        replica = self.by_name.pop(name, None)
        if replica is None:
            return None
        self.by_slot[replica.slot] = None
        self.paused.discard(name)
        self.outdated.discard(name)
        group = _group(name, replica.profile)
        if not any(_group(other.name, other.profile) == group for other in self.by_name.values()):
            del self._group_of[group]
        self.heard_at[replica.slot] = inf
        self.roles[replica.slot] = -1
        self._dirty.discard(replica.slot)
        self._stale.discard(replica.slot)
        self._candidates.clear()
        return replica.slot

    def hear(self, replica: ReplicaState, live: LiveProfile, now: float) -> None:
        self.heard_at[replica.slot] = now
        if not replica.is_news(live):
            return
        role = replica.role
        replica.report(live)
        (self.paused.add if live.is_paused else self.paused.discard)(replica.name)
        if live.weights.number > self.newest.number:
            self.newest = live.weights
            self.outdated = set(self.by_name)
        (self.outdated.add if live.weights.number < self.newest.number else self.outdated.discard)(replica.name)
        if replica.role != role:
            self.roles[replica.slot] = ROLES.index(replica.role)
            self._candidates.clear()
        self.news_at[replica.slot] = now

    def adapter_waits(self, adapter: str) -> Floats:
        """Return the seconds `[slot]` until each replica has loaded an adapter: 0 where it has, or soon will have."""
        waits = np.zeros(len(self.by_slot))
        for replica in self.by_name.values():
            if replica.live is not None and not replica.has_adapter(adapter):
                waits[replica.slot] = replica.live.adapters.load_s
        return waits

    def tiers_of(self, slot: int) -> TierLoads:
        """Return the prices of loads at the replica in a slot, as it last reported them."""
        return self.row_of(self.replica_in(slot)).tiers

    def replica_in(self, slot: int) -> ReplicaState:
        replica = self.by_slot[slot]
        assert replica is not None, f"slot {slot} is empty"
        return replica

    # -- rows --------------------------------------------------------------------------------------------------------

    def refresh(self, now: float) -> None:
        """Bring the rows of all replicas up to date."""
        self._advance(now)
        for slot in self._dirty - self._stale:
            self.row_of(self.replica_in(slot)).write(self.loads, slot)
        self._dirty.clear()
        if self._stale:
            self._guess_stale()

    def only_row(self, now: float) -> tuple[Row, float] | None:
        """Return the up-to-date row of the only replica, and the seconds since its last report. None where there are
        several, or it is stale. Writes no array."""
        if len(self.by_name) != 1:
            return None
        self._advance(now)
        if self._stale:
            return None
        [replica] = self.by_name.values()
        return self.row_of(replica), now - float(self.news_at[replica.slot])

    def row_of(self, replica: ReplicaState) -> Row:
        """Return the row of a replica, as the last choice saw it unless it has changed since."""
        if replica.row is None:
            since = float(self.news_at[replica.slot])
            pending = replica.pending.values()
            replica.num_unseen = 0
            replica.row = row(replica.profile, replica.live, pending, self.classes, replica.paces, since)
        return replica.row

    def ages(self, now: float) -> Floats:
        """Return the seconds since each replica last reported something new. 0 for stale replicas: whether they have
        made progress is unknown."""
        ages = now - self.news_at
        if self._stale:
            ages[list(self._stale)] = 0.0
        return ages

    def link_waits(self, exclude: Collection[str]) -> Floats:
        """Return the seconds until each replica's link is free of the prefixes that this router has asked for; infinity
        for silent replicas and those in `exclude`."""
        waits = np.maximum(self.sends_until - self.now, 0.0)
        waits[[*self._stale, *self._slots_of(exclude)]] = inf
        return waits

    def send(self, replica: ReplicaState, seconds: float) -> None:
        """Count a prefix that a replica is asked for, whose pages take `seconds` on its link."""
        self.sends_until[replica.slot] = max(self.now, self.sends_until[replica.slot]) + seconds

    def _advance(self, now: float) -> None:
        """Note the time, and which replicas are stale then."""
        self.now = now
        if not self._stale and now - self._all_heard_since <= self.silence_s:
            return
        stale = set(np.flatnonzero(now - self.heard_at > self.silence_s).tolist())
        stale |= {slot for slot in self._stale if self.replica_in(slot).live is None}
        for slot in stale ^ self._stale:
            self.replica_in(slot).touch()
        self._stale = stale
        self._all_heard_since = float(self.heard_at.min())

    def _guess_stale(self) -> None:
        """Bring the rows of stale replicas up to date, which count as the class says."""
        fresh = (replica.live for replica in self.by_name.values() if replica.slot not in self._stale)
        busiest = max(fresh, key=_work, default=None)
        for slot in self._stale:
            replica = self.replica_in(slot)
            live = max((replica.live, busiest), key=_work)
            booked = [*replica.pending.values(), *replica.included.values()]
            live = live and structs.replace(live, learnt=Learnt(gap_share=live.learnt.gap_share))
            replica.row = row(replica.profile, live, booked, self.classes, {})
            replica.row.write(self.loads, slot)
        for figures in self.loads.joins[:9]:  # when their steps end is unknown
            figures[[*self._stale]] = 0.0

    def _allocate(self, capacity: int) -> None:
        """Make arrays for `capacity` slots and the present classes. Every row must be made again."""
        more = capacity - len(self.by_slot)
        self.by_slot += [None] * more
        self.groups = np.append(self.groups, np.zeros(more, dtype=np.int64))
        self.name_hashes = np.append(self.name_hashes, np.zeros(more, dtype=np.uint32))
        self.roles = np.append(self.roles, np.full(more, -1))
        self.heard_at = np.append(self.heard_at, np.full(more, inf))
        self.news_at = np.append(self.news_at, np.zeros(more))
        self.sends_until = np.append(self.sends_until, np.zeros(more))
        self.loads = blank(capacity, self.classes)
        for replica in self.by_name.values():
            replica.paces.clear()
            replica.touch()
        self._candidates.clear()

    # -- candidates --------------------------------------------------------------------------------------------------

    def candidates(self, shipping: str, exclude: Collection[str] = (), *, is_prompt_alone: bool = False) -> Candidates:
        """Return the slots that a request may be placed on. `shipping`: auto, pairs compete with single replicas;
        always, single replicas are left out if there is any pair; never, there are no pairs. `is_prompt_alone`: prefill
        replicas compute requests without an output, and decode replicas only where there is no other.

        Raises:
            LookupError: there is no replica left to choose.
        """
        key = shipping, is_prompt_alone
        if not exclude and key in self._candidates:
            return self._candidates[key]
        is_left = self.roles >= 0
        is_left[self._slots_of(exclude)] = False
        mixed, prefills, decodes = (self.with_role(role, np.flatnonzero(is_left)) for role in ROLES)
        first, last = (prefills, decodes) if is_prompt_alone else (decodes, prefills)
        alone = np.concatenate([mixed, first]) if len(mixed) or len(first) else last
        if not len(alone):
            raise LookupError("no replica is left to choose from")
        near = np.concatenate([prefills, mixed])
        far = np.concatenate([decodes, mixed])
        if shipping == "never" or not len(prefills) + len(decodes):
            near = far = near[:0]
        elif shipping == "always":
            paired = prefills[np.isin(self.groups[prefills], self.groups[far])]
            if len(paired):
                alone = alone[:0]
                near = paired
        found = Candidates(alone, near, far, self.groups, self.name_hashes)
        if not exclude:
            self._candidates[key] = found
        return found

    def with_role(self, role: Role, slots: Slots) -> Slots:
        """Leave out those of `slots` whose replicas have another role."""
        found: Slots = slots[self.roles[slots] == ROLES.index(role)]
        return found

    def _slots_of(self, names: Collection[str]) -> list[int]:
        """Return the slots of the replicas of these names that have not left."""
        return [self.by_name[name].slot for name in names if name in self.by_name]


def _group(name: str, profile: SchedulingProfile) -> str:
    """Return the name of the group of replicas that a replica exchanges pages with: it alone, if it has no dock."""
    return profile.compatibility if profile.peer else f"alone {name}"


def _work(live: LiveProfile | None) -> float:
    """Return how busy a replica is, to compare replicas: seconds of prompts, plus one per stream."""
    if live is None:
        return -1.0
    return (
        sum(prompts.seconds for prompts in live.prefills.groups) + sum(live.streams.counts) + sum(live.streams.arriving)
    )
