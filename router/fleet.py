"""One router: it learns what replicas advertise and report, counts what it has placed on them, and places requests.

No clock and no network: time and messages come in, placements go out. Several routers need no coordinator: each gets
the reports of every replica, and counts its own in-flight loads only until the replica's report includes them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from crossdock.router import baselines
from crossdock.router.fetching import with_sources
from crossdock.router.loading import with_loads
from crossdock.router.loads import Slots
from crossdock.router.placement import Candidates, Options, Placement, SlotPair, choose, first_token_s
from crossdock.router.predict import PromptPrediction, lacks_room, predict_prompt, with_output
from crossdock.router.prefixes import Prefixes, num_shared, pages_by_slot
from crossdock.router.query import Query
from crossdock.router.replica_table import ReplicaState, ReplicaTable
from crossdock.router.tenants import fair_ahead
from crossdock.router.work import InFlightLoad
from crossdock.workers.report.live_profile import LiveProfile, PageChanges
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.formula import Floats
from crossdock.workers.schedule.request.page_hashes import PageHash
from crossdock.workers.schedule.request.slo import SloClass


class RouterConfig(BaseModel):
    """How a router places requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal[
        "seconds",
        "round-robin",
        "least-requests",
        "power-of-two",
        "prefix-affinity",
        "block-cost",
        "pinned",
        "remaining-work",
    ] = Field("seconds", description="seconds: by the predicted time on each replica; the others are for comparison.")
    shipping: Literal["auto", "always", "never"] = Field(
        "auto",
        description="One replica computes the prompt, or sends pages of a prefix, for another: "
        "where that is better, wherever possible, never; always fetches where that is better.",
    )
    unlike_weights: Literal["apart", "mixed"] = Field(
        "apart",
        description="Replicas with unlike weights, as of two formats: apart exchange no pages and no running streams, "
        "whose tokens would change; mixed do.",
    )
    ttl_s: float = Field(3.0, gt=0, description="Silence after which a replica counts as busy as the busiest.")
    max_prefix_pages: int = Field(
        2_000_000,
        ge=0,
        description="Page hashes known at most, about 300 bytes each. Fewer than replicas cache: hits are lost.",
    )


_INSTANT = 1e-9  # seconds of a prompt that costs nothing: one of 0 s is computed by another replica


MOST_IN_USE = 16
"""Replicas whose cached pages are compared with those of running requests. More would cost time at every decision."""


@dataclass(slots=True)
class Fleet:
    """The replicas as one router sees them. All times are seconds on one clock of the caller's."""

    config: RouterConfig = field(default_factory=lambda: RouterConfig.model_validate({}))
    prefixes: Prefixes = field(init=False)
    in_tiers: tuple[Prefixes, Prefixes] = field(init=False)  # below pools: in a replica's fastest tier, and its second
    table: ReplicaTable = field(init=False)
    num_chosen: int = 0
    _placed: dict[str, tuple[Query, Sequence[str]]] = field(default_factory=dict)  # by request, with its replicas

    def __post_init__(self) -> None:
        self.prefixes, *in_tiers = [Prefixes(self.config.max_prefix_pages) for _ in range(3)]
        self.in_tiers = in_tiers[0], in_tiers[1]
        self.table = ReplicaTable(self.config.ttl_s)

    # -- replicas ----------------------------------------------------------------------------------------------------

    def join(self, name: str, profile: SchedulingProfile, now: float) -> None:
        """Add a replica that has started. Until its first live profile it counts as silent."""
        self.leave(name)
        self.table.join(name, profile, now)

    def leave(self, name: str) -> None:
        """Remove a replica that takes no new requests. Its in-flight loads end."""
        slot = self.table.leave(name)
        if slot is not None:
            for prefixes in (self.prefixes, *self.in_tiers):
                prefixes.forget(slot)

    def hear(self, name: str, live: LiveProfile, now: float) -> None:
        """Take in a replica's live profile. A profile that is not newer than the last one only shows that the replica
        is alive."""
        replica = self.table.by_name.get(name)
        if replica is not None:
            self.table.hear(replica, live, now)

    def hear_pages(self, name: str, changes: PageChanges) -> None:
        """Take in which prefixes a replica has gained and lost."""
        replica = self.table.by_name.get(name)
        if replica is not None:
            self.prefixes.hear(replica.slot, changes)
            for number, prefixes in zip(range(len(changes.stored)), self.in_tiers, strict=False):
                prefixes.hear(replica.slot, changes.of_tier(number))

    # -- requests ----------------------------------------------------------------------------------------------------

    def choose(self, query: Query, now: float, exclude: Collection[str] = ()) -> Placement:
        """Return where a request should go. Books nothing.

        Raises:
            Overloaded: no replica can keep the request's promise, and every replica refuses late requests.
            LookupError: there is no replica left to choose.
        """
        if query.weights or self.table.paused or self.table.outdated:
            exclude = {*exclude, *self._closed_to(query)}
        may_ship = query.may_ship and not query.is_prompt_alone and query.num_tokens >= self.page_size
        shipping = self.config.shipping if may_ship else "never"
        candidates = self.table.candidates(shipping, exclude, is_prompt_alone=query.is_prompt_alone)
        self.num_chosen += 1
        if (placement := self._on_the_only(query, now, candidates)) is not None:
            return placement
        self.table.refresh(now)
        options = self._with_prefixes(query, now, candidates, exclude)
        if self.config.policy == "seconds":
            pair = choose(options)
        else:
            pair = baselines.place(baselines.POLICIES[self.config.policy], self.table, options, self.num_chosen)
        return self._placement(options, pair)

    def book(self, query: Query, placement: Placement) -> None:
        """Count a request as given to the replicas of `placement`, to which it is on its way."""
        self._placed[query.request_id] = query, placement.replicas
        cached, priority = placement.cached_tokens, self.table.loads.priority_of(query.slo_class)
        for replica in self._replicas_of(query.request_id):
            size = replica.profile.page_size
            seconds = max(placement.prefill_seconds, _INSTANT) if replica.name == placement.replicas[0] else 0.0
            decodes = replica.name == placement.decode and not query.is_prompt_alone
            held = int(self._num_held(replica, query, cached)) // size
            here = min(self.prefixes.num_reported(replica.slot, query.page_hashes), cached // size)
            pages = replica.profile.needs.at_once(query.num_tokens + query.expected_output * decodes, held)
            in_flight = InFlightLoad(query, priority, seconds, pages, decodes, self.table.now, max(here - held, 0))
            replica.place(query.request_id, in_flight)
            self.prefixes.expect(replica.slot, query.page_hashes)
        if placement.source in self.table.by_name:
            self.table.send(self.table.by_name[placement.source], placement.source_seconds)

    def taken(self, request_id: str, name: str, sequence: int) -> None:
        """Note that the replica has taken the request: its live profiles after number `sequence` include it."""
        if name in self.table.by_name:
            self.table.by_name[name].take(request_id, sequence)

    def first_token(self, request_id: str) -> None:
        """Note that the request's prompt is computed."""
        for replica in self._replicas_of(request_id):
            replica.first_token(request_id)

    def settle(self, request_id: str) -> None:
        """Remove a request that has ended, or that no replica took."""
        for replica in self._replicas_of(request_id):
            self.prefixes.end_expected(replica.slot, self._placed[request_id][0].page_hashes)
            replica.settle(request_id)
        self._placed.pop(request_id, None)

    # -- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.table)

    @property
    def classes(self) -> Sequence[SloClass]:
        """The SLO classes, most urgent first: those of the replica that joined last."""
        return self.table.classes

    @property
    def page_size(self) -> int:
        """Tokens per page hash. Replicas whose pages have another size have no prefix hits."""
        for replica in self.table.by_name.values():
            return replica.profile.page_size
        return 1

    def num_booked(self, name: str) -> int:
        """Return the requests that this router has on a replica."""
        replica = self.table.by_name[name]
        return len(replica.pending) + len(replica.included)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _replicas_of(self, request_id: str) -> list[ReplicaState]:
        """Return the replicas that have a request and have not left."""
        _, names = self._placed.get(request_id, (None, ()))
        return [self.table.by_name[name] for name in names if name in self.table.by_name]

    def _closed_to(self, query: Query) -> Collection[str]:
        """Return the replicas that a request must not go to: they would give it other tokens, have outdated weights, or
        are paused. Where all others are paused, requests wait at paused ones."""
        table = self.table
        others = [each.name for each in table.by_name.values() if query.weights not in ("", each.profile.weights)]
        out = table.paused | table.outdated
        return out.union(others) if table.by_name.keys() - out else table.outdated.union(others)

    def _predict(
        self, query: Query, ages: Floats, held: Floats | None, slots: Slots | None, cached: Floats
    ) -> PromptPrediction[Floats]:
        """Return the prediction for a prompt at every replica, or at those in `slots`, which have `cached` tokens.

        `held`: see `predict_prompt`."""
        loads = self.table.loads
        if slots is not None:
            ages = ages[slots]
            loads = loads.at(slots)
            held = None if held is None else held[slots]
        fair = self._fair(query, slots) if query.tenant else None
        prediction = predict_prompt(loads, query, cached, ages, held, fair)
        if query.adapter:
            waits = self.table.adapter_waits(query.adapter)
            prediction.ttft += waits if slots is None else waits[slots]
        return prediction

    def _fair(self, query: Query, slots: Slots | None) -> Callable[[Floats, Floats], Floats]:
        """Return the argument `fair` of `predict_prompt` for a tenant at every replica, or at those in `slots`."""
        every = self.table.by_slot
        replicas = every if slots is None else [every[slot] for slot in slots]
        priority = self.table.loads.priority_of(query.slo_class)
        return partial(fair_ahead, replicas, priority, query.tenant, query.weight)

    def _slo(self, query: Query) -> SloClass:
        return self.classes[self.table.loads.priority_of(query.slo_class)]

    def _usable(self, query: Query) -> Sequence[PageHash]:
        """Return the hashes of the pages that a prompt may find in a cache. At least one token is left to compute: the
        first output token needs its logits."""
        return query.page_hashes[: (query.num_tokens - 1) // self.page_size]

    def _in_use(self, query: Query, cached: Floats, ages: Floats) -> Floats | None:
        """Return how many of the `cached` tokens, `[slot]`, lie in pages that other requests hold, where the prompt
        lacks room, or others do. Cached pages that no request holds count as free, but a prompt takes its own.
        None: the prompt has room at every replica, and none waits for pages."""
        loads = self.table.loads
        tokens = query.num_tokens + query.expected_output
        lacks = lacks_room(loads, loads.priority_of(query.slo_class), tokens, ages) | (loads.room.num_lacking > 0)
        if not lacks.any():  # the usual case
            return None
        found = cached.copy()
        for slot in np.flatnonzero((cached > 0) & lacks)[:MOST_IN_USE]:
            found[slot] = self._num_held(self.table.replica_in(int(slot)), query, cached[slot])
        return found

    def _num_held(self, replica: ReplicaState, query: Query, cached: float) -> float:
        """Return how many of the `cached` tokens of a prompt lie in pages that other requests of a replica hold.

        Requests that have a token hold their pages. Waiting requests count too if all of them have room.
        """
        if not cached:
            return 0.0
        row = self.table.row_of(replica)
        priority = row.priority_of(query.slo_class)
        all_start, held, most = row.room.free_pages[priority] >= 0, 0, cached / self.page_size
        for in_flight in (*replica.pending.values(), *replica.included.values()):
            if in_flight.has_first or all_start:
                held = max(held, num_shared(query.page_hashes, in_flight.query.page_hashes))
            if held >= most:
                break
        idle = row.room.longest_now[priority] - row.room.empty_pages * self.page_size  # tokens, at most
        return float(min(max(held * self.page_size, cached - max(idle, 0.0)), cached))

    def _on_the_only(self, query: Query, now: float, candidates: Candidates) -> Placement | None:
        """Return the placement on the only replica there is, predicted over floats, where only its times are open. None
        where the request may load or encode, wait for room, be refused, or share with other tenants."""
        is_plain = not (query.tenant or query.items or query.adapter or any(map(len, self.in_tiers)))
        if not is_plain or self.config.policy != "seconds" or len(candidates.prefills):
            return None
        if (only := self.table.only_row(now)) is None:
            return None
        row, age = only
        lacks = lacks_room(row, row.priority_of(query.slo_class), query.num_tokens + query.expected_output, age)
        if lacks or (query.may_refuse and row.refuses_late):
            return None
        cached = float(self.page_size * len(self.prefixes.match(self._usable(query))[0]))
        prediction = with_output(predict_prompt(row, query, cached, age), row, query, cached)
        slot = int(candidates.alone[0])
        options = Options(query, self._slo(query), candidates, self.table.loads, cached, prediction)
        return self._placement(options, SlotPair(slot, slot))

    def _with_prefixes(self, query: Query, now: float, candidates: Candidates, exclude: Collection[str]) -> Options:
        """Return the options where replicas load pages from tiers, or fetch them from others, where that is best."""
        fastest, second = self.in_tiers
        tiers = (fastest, second) if len(second) else (fastest,) if len(fastest) else ()
        hashes, size, num_slots = self._usable(query), self.page_size, len(self.table.by_slot)
        cached, *by_tier = [size * pages_by_slot(each, num_slots) for each in self.prefixes.match(hashes, tiers)]
        ages = self.table.ages(now)
        in_use = self._in_use(query, cached, ages)
        predict = partial(self._predict, query, ages, in_use)
        loads = self.table.loads
        prediction = with_output(predict(None, cached), loads, query, cached)
        options = Options(query, self._slo(query), candidates, loads, cached, prediction)
        if by_tier:
            options = with_loads(options, by_tier, predict, self.table.tiers_of)
        may_fetch = self.config.policy == "seconds" and self.config.shipping != "never" and query.may_ship
        if not may_fetch or len(self.table) < 2 or not cached.any():  # a lone replica can fetch from none
            return options

        def reported(slot: int) -> float:
            return size * self.prefixes.num_reported(slot, hashes)

        return with_sources(options, ages, predict, self.table.link_waits(exclude), reported)

    def _brought(self, options: Options, slot: int) -> tuple[str, dict[str, Any]]:
        """Return a word for how the replica in `slot` gets pages that it lacks, and what the placement says of that."""
        alternatives = dict(options.alternatives)
        if len(options.loading):
            alternatives["load"] = round(float(options.prediction.ttft[options.loading].min()), 6)
        if alternatives and len(options.candidates.prefills):
            pairs = options.candidates.prefills, options.candidates.decodes
            alternatives["ship"] = round(first_token_s(options, *pairs), 6)
        if fetch := options.fetches.get(slot):
            source = self.table.replica_in(fetch.source).name
            sent = {"source": source, "source_tokens": int(fetch.tokens), "source_seconds": fetch.seconds}
            return " fetched", {"alternatives": alternatives, **sent}
        return " loaded" * (slot in options.loading), {"alternatives": alternatives}

    def _placement(self, options: Options, pair: SlotPair) -> Placement:
        """Return the placement of a request on a pair of replicas."""
        prefill, decode, slo, prediction = pair.prefill, pair.decode, options.slo, options.prediction
        first, last = self.table.replica_in(prefill), self.table.replica_in(decode)
        ttft, alone, cached = [_at(each, prefill) for each in (prediction.ttft, prediction.alone, options.cached)]
        if prefill != decode:
            ttft = first_token_s(options, np.array([prefill]), np.array([decode]))
        late = slo.weight * max(ttft - slo.ttft_deadline(alone), 0.0)
        late += _at(prediction.prompt_lateness, prefill) + _at(prediction.decode_lateness, decode)
        how, brought = self._brought(options, prefill)
        reason = self.config.policy + how
        if self.config.policy == "seconds":
            reason = ("local" if prefill == decode else "shipped") + how
            reason += " cached" * bool(2 * cached >= options.query.num_tokens) + " late" * bool(late > 0)
        return Placement(
            decode=last.name,
            prefill=first.name if first is not last else None,
            reason=reason,
            predicted_ttft=ttft,
            predicted_gap=_at(prediction.gap, decode),
            late=late,
            cached_tokens=int(cached),
            prefill_seconds=_at(prediction.prefill, prefill),
            weights=last.profile.weights if self.config.unlike_weights == "apart" else "",
            **brought,
        )


def _at(figures: Floats | float, slot: int) -> float:
    """Return the figure of the replica in a slot, or the only replica's."""
    return float(figures[slot] if isinstance(figures, np.ndarray) else figures)
