"""Everything one router knows of the replicas: what they advertise, what they have last said of themselves, and what
this router has given them since. No clock and no network: time and messages come in, placements go out.

Several routers need no coordinator: each hears every replica, and counts its own bookings only until the replica has
said something that includes them.
"""

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from crossdock.router import baselines
from crossdock.router.placement import (
    Booking,
    Candidates,
    Floats,
    Loads,
    Placement,
    Prediction,
    Query,
    Slots,
    blank,
    choose,
    predict,
    row,
)
from crossdock.router.prefixes import Prefixes
from crossdock.workers.report.advertise import LiveProfile, PageChanges
from crossdock.workers.report.profile import Role, SchedulingProfile
from crossdock.workers.schedule.pages import PageHash
from crossdock.workers.schedule.slo import SloClass, priority_of


class RouterConfig(BaseModel):
    """Which replica serves a request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["seconds", "round-robin", "least-requests", "power-of-two", "prefix-affinity", "block-cost"] = (
        Field("seconds", description="seconds: by what each replica is predicted to take; the others are to compare.")
    )
    shipping: Literal["auto", "always", "never"] = Field(
        "auto", description="Prompts computed on one replica for another: where that is better, wherever it can, never."
    )
    ttl_s: float = Field(3.0, gt=0, description="Silence after which a replica counts as busy as the busiest.")
    max_prefix_pages: int = Field(500_000, ge=0, description="Page hashes known at most, about 300 bytes each.")


_NOWHERE: tuple[tuple[str, ...], Sequence[PageHash]] = ((), ())


@dataclass(slots=True)
class _Replica:
    """One replica, and what this router has given it. A booking is `unseen` until a live profile includes it."""

    name: str
    slot: int
    profile: SchedulingProfile
    live: LiveProfile | None = None
    unseen: dict[str, Booking] = field(default_factory=dict)  # by request
    seen: dict[str, Booking] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)  # of the unseen: the live profile after which they are in it

    @property
    def role(self) -> Role:
        """What it is kept for now."""
        return (self.live and self.live.role) or self.profile.role

    def change(self, request_id: str, booking: Booking) -> None:
        """The booking of a request is now another."""
        (self.unseen if request_id in self.unseen else self.seen)[request_id] = booking


@dataclass(slots=True)
class Fleet:
    """The replicas as one router sees them. All times are seconds on one clock of the caller's.

    A replica that has been silent for `ttl_s` is taken to be as busy as the busiest that is not, or as it last said it
    was, whichever is more, and to have all that this router ever gave it: it draws no crowd, and is not shut out.
    """

    config: RouterConfig = field(default_factory=lambda: RouterConfig.model_validate({}))
    prefixes: Prefixes = field(init=False)
    classes: Sequence[SloClass] = ()
    num_chosen: int = 0
    _replicas: dict[str, _Replica] = field(default_factory=dict)
    _slots: list[_Replica | None] = field(default_factory=list)
    _loads: Loads = field(init=False)
    _heard: Floats = field(init=False)  # when it last said anything; an empty slot is never late
    _news: Floats = field(init=False)  # when it last said something new
    _all_heard: float = inf  # since when each has said something, or before
    _groups: NDArray[np.int64] = field(init=False)
    _names: NDArray[np.uint32] = field(init=False)
    _roles: dict[str, Slots] = field(default_factory=dict)
    _everyone: dict[bool, Candidates] = field(default_factory=dict)  # by whether the request may ship
    _group_of: dict[str, int] = field(default_factory=dict)  # by compatibility
    _dirty: set[int] = field(default_factory=set)  # whose rows are to be made anew; they know of nothing `seen`
    _stale: set[int] = field(default_factory=set)  # theirs are, at each choice; they do
    _placed: dict[str, tuple[tuple[str, ...], Sequence[PageHash]]] = field(default_factory=dict)  # by request

    def __post_init__(self) -> None:
        self.prefixes = Prefixes(self.config.max_prefix_pages)
        self._allocate(8)

    # -- replicas ----------------------------------------------------------------------------------------------------

    def join(self, name: str, profile: SchedulingProfile, now: float) -> None:
        """A replica is up. What it has to do it says itself; until then it counts as stale."""
        if name in self._replicas:
            self.leave(name)
        if tuple(self.classes) != profile.slo_classes:
            self.classes = profile.slo_classes
            self._allocate(len(self._slots))
        slot = self._slots.index(None) if None in self._slots else self._grow()
        it = self._replicas[name] = self._slots[slot] = _Replica(name, slot, profile)
        self._names[slot] = zlib.crc32(name.encode())
        pairable = profile.compatibility if profile.peer else f"alone {name}"
        self._groups[slot] = self._group_of.setdefault(pairable, len(self._group_of))
        self._heard[slot] = self._news[slot] = now
        self._all_heard = min(self._all_heard, now)
        self._dirty.add(slot)
        self._stale.add(it.slot)
        self._forget_roles()

    def leave(self, name: str) -> None:
        """A replica takes nothing new. Its bookings are over."""
        it = self._replicas.pop(name, None)
        if it is None:
            return
        self._slots[it.slot] = None
        self._heard[it.slot] = inf
        self._dirty.discard(it.slot)
        self._stale.discard(it.slot)
        self.prefixes.forget(it.slot)
        self._forget_roles()

    def hear(self, name: str, live: LiveProfile, now: float) -> None:
        """What a replica says of itself. What it had said before, late or again, only shows that it lives."""
        it = self._replicas.get(name)
        if it is None:
            return
        self._heard[it.slot] = now
        if it.live is not None and it.live.incarnation == live.incarnation and it.live.sequence >= live.sequence:
            return
        if it.role != (live.role or it.profile.role):
            self._forget_roles()
        it.live = live
        self._news[it.slot] = now
        for request_id in [key for key, taken in it.taken.items() if taken < live.sequence]:
            del it.taken[request_id]
            it.seen[request_id] = it.unseen.pop(request_id)
        self._dirty.add(it.slot)

    def hear_pages(self, name: str, changes: PageChanges) -> None:
        """Which prefixes a replica has, or has no longer."""
        it = self._replicas.get(name)
        if it is not None:
            self.prefixes.hear(it.slot, changes)

    # -- requests ----------------------------------------------------------------------------------------------------

    def choose(self, query: Query, now: float, exclude: Collection[str] = ()) -> Placement:
        """Where a request goes; books nothing.

        Raises:
            Overloaded: its promise cannot be kept anywhere, and all refuse what would be late.
            LookupError: nobody is left to choose from.
        """
        candidates = self._candidates(query, exclude)
        self._refresh(now)
        priority = self._priority(query.slo_class)
        cached = self._cached(query)
        age = now - self._news
        if self._stale:
            age[list(self._stale)] = 0.0  # nobody knows whether it has gone on
        it = predict(self._loads, query, priority, cached, age, self.classes)
        slo = self.classes[priority]
        self.num_chosen += 1
        if self.config.policy == "seconds":
            best = choose(self._loads, query, cached, it, slo, candidates)
            prefill, decode = best.prefill, best.decode
        else:
            prefill, decode = self._follow(baselines.POLICIES[self.config.policy], query, cached, candidates)
        return self._placement(query, it, prefill, decode, cached)

    def book(self, query: Query, placement: Placement, now: float) -> None:
        """The request is on its way to the replicas of `placement`."""
        priority = self._priority(query.slo_class)
        pair = placement.prefill is not None
        names = (placement.decode,) if placement.prefill is None else (placement.decode, placement.prefill)
        self._placed[query.request_id] = names, query.page_hashes
        for name in names:
            it = self._replicas.get(name)
            if it is None:
                continue
            computes = not pair or name == placement.prefill
            pages = ceil((query.num_tokens - placement.cached_tokens) / it.profile.page_size)
            seconds = max(placement.prefill_seconds, 1e-9) if computes else 0.0
            booking = Booking(priority, query.num_tokens, seconds, pages, decodes=name == placement.decode)
            it.unseen[query.request_id] = booking
            self._dirty.add(it.slot)
            self.prefixes.expect(it.slot, query.page_hashes)

    def taken(self, request_id: str, name: str, sequence: int) -> None:
        """The replica has taken the request; live profiles after number `sequence` include it."""
        it = self._replicas.get(name)
        if it is None or request_id not in it.unseen:
            return
        if it.live is not None and it.live.sequence > sequence:
            it.seen[request_id] = it.unseen.pop(request_id)
            self._dirty.add(it.slot)
        else:
            it.taken[request_id] = sequence

    def first_token(self, request_id: str, now: float) -> None:
        """Its prompt is computed."""
        for name in self._placed.get(request_id, _NOWHERE)[0]:
            it = self._replicas.get(name)
            booking = it and (it.unseen.get(request_id) or it.seen.get(request_id))
            if it and booking and not booking.has_first:
                it.change(request_id, replace(booking, has_first=True))
                if request_id in it.unseen:
                    self._dirty.add(it.slot)

    def settle(self, request_id: str) -> None:
        """It is over, or was never taken."""
        names, hashes = self._placed.pop(request_id, _NOWHERE)
        for name in names:
            it = self._replicas.get(name)
            if it is not None:
                self.prefixes.end_expected(it.slot, hashes)
                it.seen.pop(request_id, None)
                it.taken.pop(request_id, None)
                if it.unseen.pop(request_id, None) is not None:
                    self._dirty.add(it.slot)

    # -- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def page_size(self) -> int:
        """Tokens per page hash; replicas whose pages are of another size have no hits."""
        return next((it.profile.page_size for it in self._replicas.values()), 1)

    def num_booked(self, name: str) -> int:
        """Requests that this router has at a replica."""
        it = self._replicas[name]
        return len(it.unseen) + len(it.seen)

    # -- how it is kept ----------------------------------------------------------------------------------------------

    def _priority(self, slo_class: str) -> int:
        try:
            return priority_of(self.classes, slo_class)
        except ValueError:
            return len(self.classes) - 1  # the replica will say so

    def _grow(self) -> int:
        self._allocate(2 * len(self._slots))
        return self._slots.index(None)

    def _allocate(self, capacity: int) -> None:
        """Tables for so many replicas and as many classes as there are; all rows have to be made anew."""
        groups, names = np.zeros(capacity, dtype=np.int64), np.zeros(capacity, dtype=np.uint32)
        heard, news = np.full(capacity, inf), np.zeros(capacity)
        if self._slots:
            had = len(self._slots)
            groups[:had], names[:had], heard[:had], news[:had] = self._groups, self._names, self._heard, self._news
        self._slots += [None] * (capacity - len(self._slots))
        self._groups, self._names, self._heard, self._news = groups, names, heard, news
        self._loads = blank(capacity, max(len(self.classes), 1))
        self._dirty.update(it.slot for it in self._replicas.values())

    def _refresh(self, now: float) -> None:
        """Brings the rows of all replicas of which something has changed up to date."""
        if self._stale or now - self._all_heard > self.config.ttl_s:
            self._find_stale(now)
        for slot in self._dirty - self._stale:
            it = self._slots[slot]
            if it is not None:
                row(it.profile, it.live, it.unseen.values(), self.classes).put(self._loads, slot)
        self._dirty.clear()
        worst = self._busiest() if self._stale else None
        for slot in self._stale:
            it = self._slots[slot]
            assert it is not None
            live = max((it.live, worst), key=_work)
            booked = [*it.unseen.values(), *it.seen.values()]
            row(it.profile, live and replace(live, cost=()), booked, self.classes).put(self._loads, slot)

    def _find_stale(self, now: float) -> None:
        """Who has been silent for too long, or has not said anything yet."""
        stale = set(np.flatnonzero(now - self._heard > self.config.ttl_s).tolist())
        stale |= {slot for slot in self._stale if (it := self._slots[slot]) is not None and it.live is None}
        self._dirty |= stale ^ self._stale
        self._stale = stale
        self._all_heard = float(self._heard.min())

    def _busiest(self) -> LiveProfile | None:
        """What the busiest of the replicas that are not silent has to do."""
        fresh = (it.live for it in self._replicas.values() if it.slot not in self._stale)
        return max(fresh, key=_work, default=None)

    def _cached(self, query: Query) -> Floats:
        """Tokens of the prompt that each replica has. At least one is left to compute: its logits are wanted."""
        cached = np.zeros(len(self._slots))
        size = self.page_size
        for slots, num_pages in self.prefixes.match(query.page_hashes[: (query.num_tokens - 1) // size]):
            while slots:
                slot = slots.bit_length() - 1
                cached[slot] = num_pages * size
                slots &= ~(1 << slot)
        return cached

    def _candidates(self, query: Query, exclude: Collection[str]) -> Candidates:
        ships = self.config.shipping != "never" and query.may_ship and query.num_tokens >= self.page_size
        if exclude:
            return self._those_but(exclude, ships)
        if ships not in self._everyone:
            self._everyone[ships] = self._those_but((), ships)
        return self._everyone[ships]

    def _those_but(self, exclude: Collection[str], ships: bool) -> Candidates:
        mixed, prefills, decodes = (self._slots_of(role) for role in ("mixed", "prefill", "decode"))
        if exclude:
            out = [it.slot for name in exclude if (it := self._replicas.get(name)) is not None]
            mixed, prefills, decodes = (slots[~np.isin(slots, out)] for slots in (mixed, prefills, decodes))
        alone = np.concatenate([mixed, decodes]) if len(mixed) or len(decodes) else prefills
        if not len(alone):
            raise LookupError("no replica is left to choose from")
        near, far = np.concatenate([prefills, mixed]), np.concatenate([decodes, mixed])
        if not ships or not len(prefills) + len(decodes):
            near = far = near[:0]
        elif self.config.shipping == "always":
            paired = prefills[np.isin(self._groups[prefills], self._groups[far])]
            if len(paired):
                alone, near = alone[:0], paired
        return Candidates(alone, near, far, self._groups, self._names)

    def _slots_of(self, role: str) -> Slots:
        if not self._roles:
            for each in ("mixed", "prefill", "decode"):
                its = [it.slot for it in self._replicas.values() if it.role == each]
                self._roles[each] = np.array(sorted(its), dtype=np.intp)
        return self._roles[role]

    def _forget_roles(self) -> None:
        self._roles.clear()
        self._everyone.clear()

    def _follow(
        self, policy: Callable[[baselines.View], int], query: Query, cached: Floats, candidates: Candidates
    ) -> tuple[int, int]:
        """What a policy that knows no seconds chooses: a pair, where there are replicas kept for prompts."""

        def pick(slots: Slots) -> int:
            requests = [self._num_requests(slot) for slot in slots]
            tokens = [self._num_tokens(slot) for slot in slots]
            view = baselines.View(
                np.array(requests, dtype=float),
                cached[slots],
                np.array([it[0] for it in tokens], dtype=float),
                np.array([it[1] for it in tokens], dtype=float),
                self._loads.page_size[slots],
                query.num_tokens,
                zlib.crc32(query.request_id.encode()),
                self.num_chosen,
            )
            return int(slots[policy(view)])

        kept = np.intersect1d(candidates.prefills, self._slots_of("prefill"))
        if not len(kept) or not len(candidates.decodes):
            alone = candidates.alone if len(candidates.alone) else candidates.decodes
            mixed = np.intersect1d(alone, self._slots_of("mixed"))
            slot = pick(mixed if len(mixed) else alone)
            return slot, slot
        prefill = pick(kept)
        far = candidates.decodes[self._groups[candidates.decodes] == self._groups[prefill]]
        if not len(far):
            return prefill, prefill
        return prefill, pick(far)

    def _num_requests(self, slot: int) -> int:
        it = self._slots[slot]
        assert it is not None
        live = it.live
        known = sum(live.streams) + sum(live.arriving) + sum(p.count for p in live.prompts) if live else 0
        return known + len(it.unseen)

    def _num_tokens(self, slot: int) -> tuple[int, int]:
        """(uncached prompt tokens that wait, tokens of context that streams hold)"""
        it = self._slots[slot]
        assert it is not None
        live = it.live
        waiting = sum(p.tokens for p in live.prompts) if live else 0
        context = live.context_tokens if live else 0
        for booking in it.unseen.values():
            if booking.has_first:
                context += booking.tokens
            elif booking.seconds:
                waiting += booking.tokens
        return waiting, context

    def _placement(self, query: Query, it: Prediction, prefill: int, decode: int, cached: Floats) -> Placement:
        first, last = self._slots[prefill], self._slots[decode]
        assert first is not None
        assert last is not None
        ttft = float(it.ttft[prefill])
        slo = self.classes[self._priority(query.slo_class)]
        late = slo.weight * max(ttft - slo.ttft_deadline(float(it.prefill[prefill])), 0.0)
        late += float(it.prompt_late[prefill] + it.stream_late[decode])
        reason: str = self.config.policy
        if self.config.policy == "seconds":
            reason = "local" if prefill == decode else "shipped"
            reason += " cached" * bool(2 * cached[prefill] >= query.num_tokens) + " late" * bool(late > 0)
        return Placement(
            last.name,
            first.name if first is not last else None,
            reason,
            ttft,
            float(it.gap[decode]),
            late,
            int(cached[prefill]),
            float(it.prefill[prefill]),
        )


def _work(live: LiveProfile | None) -> float:
    """How busy a replica is, to compare it with others: seconds of prompts, and each stream as one."""
    if live is None:
        return -1.0
    return sum(prompts.seconds for prompts in live.prompts) + sum(live.streams) + sum(live.arriving)
