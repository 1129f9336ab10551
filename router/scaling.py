"""How many replicas each pool should have, and which role each replica should be assigned, from live profiles.

Demand is counted in replicas. A replica's demand is the share of time that its work takes. The share to compute the
backlog of prompts within their times to first token is added. Where the share of pages or slots in use is more,
demand is that share. One rule serves pools of every role, and the ratio between prefill and decode follows from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from pydantic import BaseModel, ConfigDict, Field

from crossdock.router.division import Claim, divide
from crossdock.workers.report.live_profile import LiveProfile
from crossdock.workers.report.profile import Role, SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepCost

SHRINK_MARGIN = 0.85
"""Share of the target utilisation that the smaller pool must stay below before a pool shrinks, so that it does not grow
again at once. `pytest tests/router/test_scaling.py -k steady_load` shows that no pool moves back and forth."""

_ASKED_S = 3.0  # after its last question a request that waits for a model is taken to have left


class ScalingConfig(BaseModel):
    """When pools grow and shrink. Their bounds are their own `min_replicas` and `max_replicas`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    utilisation: float = Field(0.7, gt=0, le=1, description="Share of a replica's time that its work should take.")
    interval_s: float = Field(2.0, gt=0, description="Seconds between two looks at demand.")
    up_delay_s: float = Field(10.0, ge=0, description="How long demand must have been too high before a pool grows.")
    down_delay_s: float = Field(
        300.0, ge=0, description="How long demand must have been low before a pool gives up one replica."
    )
    zero_after_s: float = Field(
        600.0, gt=0, description="How long a model must have had no work before its last replica ends (replicas: 0)."
    )
    devices: dict[str, float] | None = Field(
        None, description="Devices that several models divide, {GPU: 8} or {CPU: 32}; null: those of Ray's cluster."
    )
    flip_roles: bool = Field(
        False, description="Assign prefill replicas to decode, or the reverse, when the mix of requests shifts."
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """The role of one pool, and how many replicas it may have."""

    role: Role
    least: int
    most: int
    model: str = ""  # the model that its replicas serve
    each: Mapping[str, float] = field(default_factory=dict)  # devices of a replica, by Ray's name


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """The work of all replicas of one role, which decides how many of them there should be."""

    replicas: int = 0  # replicas with the role
    demand: float = 0.0  # replicas that the work needs, all of their time
    prompt_share: float = 0.0  # seconds of prompts computed per second
    waiting_s: float = 0.0  # predicted seconds of the prompts that wait
    step_s: float = 0.0  # predicted seconds of a step with all streams of a replica, at the slowest one
    streams: int = 0


@dataclass(frozen=True, slots=True)
class Resize:
    """A decision: this pool should have so many replicas."""

    pool: str
    replicas: int
    reason: str
    replicas_before: int
    load: RoleLoad


@dataclass(frozen=True, slots=True)
class Flip:
    """A decision: this replica should be assigned another role."""

    replica: str
    role: Role
    reason: str
    role_before: Role
    streams: int  # streams of the replica, which stay
    load: RoleLoad  # of the role that it is assigned
    spare_load: RoleLoad  # of the role that it had


def demand(profile: SchedulingProfile, live: LiveProfile, done_per_s: float) -> float:
    """Return how many replicas like this one the work needs. `done_per_s`: seconds of prompts computed per second."""
    classes = profile.slo_classes
    waiting = sum(prompts.seconds / classes[prompts.priority].ttft_s for prompts in live.prefills.groups)
    time = done_per_s + waiting
    if tightest := [slo.tpot_s for slo, streams in zip(classes, live.streams.counts, strict=False) if streams]:
        time += step_seconds(profile, live) / tightest[0]
    pages = 1 - live.room.free_pages[-1] / profile.num_pages if live.room.free_pages else 0.0
    slots = sum(live.streams.counts) / profile.max_num_seqs
    return max(time, pages, slots)


def step_seconds(profile: SchedulingProfile, live: LiveProfile) -> float:
    """Return the predicted seconds of a step that computes one token of each stream; 0 without streams."""
    cost = StepCost.of(live.learnt.cost) if live.learnt.cost else profile.cost
    streams = sum(live.streams.counts)
    return cost.decode_step_seconds(streams, live.streams.context_tokens, *live.adapters.use.now) if streams else 0.0


@dataclass(slots=True)
class _Member:
    """One replica, and what it reported at the last decision and most recently: (time, live profile)."""

    pool: str
    profile: SchedulingProfile
    first: tuple[float, LiveProfile] | None = None
    last: tuple[float, LiveProfile] | None = None
    is_known: bool = False  # how much it does per second has been seen

    @property
    def role(self) -> Role:
        return (self.last and self.last[1].role) or self.profile.role

    @property
    def is_paused(self) -> bool:
        """Whether the replica computes nothing until its operator lets it go on."""
        return self.last is not None and self.last[1].is_paused

    @property
    def streams(self) -> int:
        return sum(self.last[1].streams.counts) if self.last is not None else 0

    @property
    def demand(self) -> float:
        return demand(self.profile, self.last[1], self.done_per_s) if self.last is not None else 0.0

    @property
    def done_per_s(self) -> float:
        """Seconds of prompts computed per second since the last decision."""
        if self.first is None or self.last is None or self.last[0] <= self.first[0]:
            return 0.0
        (began, first) = self.first
        (ended, last) = self.last
        return (last.prefills.done_seconds - first.prefills.done_seconds) / (ended - began)

    def add_to(self, load: RoleLoad) -> RoleLoad:
        """Return the load with this replica's work."""
        if self.last is None:
            return replace(load, replicas=load.replicas + 1)
        live = self.last[1]
        return RoleLoad(
            load.replicas + 1,
            load.demand + self.demand,
            load.prompt_share + self.done_per_s,
            load.waiting_s + sum(prompts.seconds for prompts in live.prefills.groups),
            max(load.step_s, step_seconds(self.profile, live)),
            load.streams + self.streams,
        )


@dataclass(frozen=True, slots=True)
class _Need:
    """How many replicas of one role there should be."""

    load: RoleLoad
    wanted: int  # by demand
    enough: int  # the most that would not make a smaller pool grow again at once


_NO_NEED = _Need(RoleLoad(), 0, 0)
_PAIRS: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))  # the short role, and the other


@dataclass(slots=True)
class Scaling:
    """Decides sizes and roles from live profiles. All times are seconds on one clock of the caller's.

    Where one replica is not known yet, or not any more, no pool of its model shrinks and no role changes: the demand on
    that replica would be missing. While an operator has paused a replica of a model, or put it to sleep, no pool of the
    model grows either: work waits because the operator wants so, and the operator wakes what sleeps.
    """

    config: ScalingConfig
    pools: Mapping[str, Bounds]
    targets: dict[str, int] = field(default_factory=dict)
    """Replicas, by pool: as they are when this begins, and then as last decided. A pool that is missing has as many as
    have joined."""
    room: Mapping[str, float] | None = None  # devices that the pools divide, by Ray's name; None: as many as they want
    _members: dict[str, _Member] = field(default_factory=dict)
    _high_since: dict[str, float] = field(default_factory=dict)  # by pool
    _low_since: dict[str, float] = field(default_factory=dict)  # by pool
    _asked_at: dict[str, float] = field(default_factory=dict)  # by model: when a request last waited for a replica
    _idle_since: dict[str, float] = field(default_factory=dict)  # by model
    _short_since: dict[str, float] = field(default_factory=dict)  # by model and role

    def join(self, name: str, pool: str, profile: SchedulingProfile) -> None:
        """Add a replica that is up. Its work is unknown until its first live profile."""
        self._members[name] = _Member(pool, profile)

    def hear(self, name: str, live: LiveProfile, now: float) -> None:
        """Take in a replica's live profile."""
        member = self._members.get(name)
        if member is None:
            return
        if member.last is None or member.last[1].incarnation != live.incarnation:
            member.first = now, live
            member.is_known = False
        member.last = now, live

    def lose(self, name: str) -> None:
        """Note that a replica cannot be heard any more, though it may be up."""
        member = self._members.get(name)
        if member is not None:
            self.join(name, member.pool, member.profile)

    def leave(self, name: str) -> None:
        """Remove a replica that has left."""
        self._members.pop(name, None)

    def undo(self, resize: Resize) -> None:
        """Note that a decision could not be carried out. It may be made again."""
        self.targets[resize.pool] = resize.replicas_before

    def decide(self, now: float) -> list[Resize | Flip]:
        """Return the changes to make now. The caller is assumed to make them: no change is returned twice."""
        for member in self._members.values():
            member.is_known |= member.first is not None and member.first is not member.last
        needs = self._needs()
        for model in self._models:
            work = any(need.load.demand > 0 for (each, _), need in needs.items() if each == model)
            is_up = any(self._model_of(member) == model for member in self._members.values())
            idle = is_up and not work and self._is_complete(model) and not self._is_asked(model, now)
            _since(self._idle_since, model, idle, now)
        actions: list[Resize | Flip] = [*self._resized(needs, now)]
        if self.config.flip_roles:
            for model in self._models:
                for short, spare in _PAIRS:
                    actions += self._flip(model, short, spare, needs, now)
        for member in self._members.values():
            member.first = member.last
        return actions

    def _needs(self) -> dict[tuple[str, Role], _Need]:
        """Return the load of each model's role that a replica has, and how many replicas it needs."""
        loads: dict[tuple[str, Role], RoleLoad] = {}
        for member in self._members.values():
            key = self._model_of(member), member.role
            loads[key] = member.add_to(loads.get(key, RoleLoad()))
        most = self.config.utilisation
        return {
            key: _Need(load, ceil(load.demand / most), ceil(load.demand / (SHRINK_MARGIN * most)))
            for key, load in loads.items()
        }

    def _model_of(self, member: _Member) -> str:
        bounds = self.pools.get(member.pool)
        return "" if bounds is None else bounds.model

    def ask(self, model: str, now: float) -> None:
        """Note that a request waits for a model that has no replica."""
        self._asked_at[model] = now

    @property
    def _models(self) -> Sequence[str]:
        return list(dict.fromkeys(bounds.model for bounds in self.pools.values()))

    def _is_asked(self, model: str, now: float) -> bool:
        return now - self._asked_at.get(model, -inf) <= _ASKED_S + self.config.interval_s

    def _idle_s(self, model: str, now: float) -> float:
        """Return for how long a model has had no work."""
        return now - self._idle_since.get(model, now)

    def _may_sleep(self, model: str) -> bool:
        """Return whether the model may be without replicas."""
        return all(bounds.least == 0 for bounds in self.pools.values() if bounds.model == model)

    def _resized(self, needs: Mapping[tuple[str, Role], _Need], now: float) -> Iterable[Resize]:
        """Yield the new sizes: those that make room come before those that take it."""
        claims = dict[str, Claim]()
        reasons = dict[str, str]()
        for pool, bounds in self.pools.items():
            need = needs.get((bounds.model, bounds.role), _NO_NEED)
            claims[pool], reasons[pool] = self._claim(pool, bounds, need, now)
        if self.room is None:
            sizes = {pool: max(claim.size, claim.wanted) for pool, claim in claims.items()}
        else:
            sizes = divide(claims, self.room)
        for model in filter(self._may_sleep, self._models):
            own = [pool for pool, bounds in self.pools.items() if bounds.model == model]
            if not all(sizes[pool] for pool in own):  # its pools end and start together
                sizes |= dict.fromkeys(own, 0)
        shrunk = {
            pool: self._shrunk(pool, claims[pool], needs, now) for pool in sizes if sizes[pool] == claims[pool].size
        }
        sizes |= {pool: size for pool, (size, _) in shrunk.items()}
        reasons |= {pool: reason for pool, (_, reason) in shrunk.items() if reason}
        for pool in sorted(sizes, key=lambda pool: sizes[pool] - claims[pool].size):
            before = claims[pool].size
            if sizes[pool] == before:
                continue
            self._high_since.pop(pool, None)
            self._low_since.pop(pool, None)
            self.targets[pool] = sizes[pool]
            given = sizes[pool] < before and pool not in shrunk
            load = needs.get((self.pools[pool].model, self.pools[pool].role), _NO_NEED).load
            yield Resize(pool, sizes[pool], "others need it more" if given else reasons[pool], before, load)

    def _claim(self, pool: str, bounds: Bounds, need: _Need, now: float) -> tuple[Claim, str]:
        """Return the replicas that a pool claims, and why."""
        target = self._target(pool, bounds)
        away = self._away(pool, need)
        sleeps = self._may_sleep(bounds.model)
        model = bounds.model
        if bounds.least == bounds.most:
            return Claim(target, target, target, need.load.demand, bounds.each), ""
        if sleeps and target == 0:
            wanted = int(self._is_asked(model, now))
            return Claim(0, 0, wanted, float(wanted), bounds.each), "a request waits"
        high = min(max(need.wanted + away, bounds.least), bounds.most)
        is_paused = any(member.is_paused for member in self._of(model))
        high_since = _since(self._high_since, pool, high > target and not is_paused, now)
        is_due = high_since is not None and now - high_since >= self.config.up_delay_s
        gives = sleeps and self._idle_s(model, now) >= self.config.up_delay_s  # its place, to models with work
        least = bounds.least if not sleeps or gives else 1
        wanted = high if is_due else min(high, target)
        return Claim(target, least, wanted, need.load.demand, bounds.each), f"demand for {need.wanted}"

    def _shrunk(self, pool: str, claim: Claim, needs: Mapping[tuple[str, Role], _Need], now: float) -> tuple[int, str]:
        """Return the size of a pool that no other pool needs, and why it is smaller than before."""
        bounds = self.pools[pool]
        target = claim.size
        if bounds.least == bounds.most or target == 0:
            return target, ""
        sleeps = self._may_sleep(bounds.model)
        if sleeps and self._idle_s(bounds.model, now) >= self.config.zero_after_s:
            return 0, f"no work for {self.config.zero_after_s:g} s"
        need = needs.get((bounds.model, bounds.role), _NO_NEED)
        enough = max(need.enough, 1) + self._away(pool, need)  # the replica that ends may be the last of its role
        low = min(max(enough, bounds.least, int(sleeps)), bounds.most)
        low_since = _since(self._low_since, pool, low < target and self._is_complete(bounds.model), now)
        if low_since is None or now - low_since < self.config.down_delay_s:
            return target, ""
        return target - 1, f"{low} are enough"

    def _target(self, pool: str, bounds: Bounds) -> int:
        return self.targets.setdefault(pool, min(max(bounds.least, self._num_here(pool)), bounds.most))

    def _num_here(self, pool: str) -> int:
        return sum(1 for member in self._members.values() if member.pool == pool)

    def _away(self, pool: str, need: _Need) -> int:
        """Return the pool's replicas with other roles, less those of other pools that have this role."""
        return self._num_here(pool) - need.load.replicas

    def _is_complete(self, model: str) -> bool:
        """Return whether a live profile of every replica of the model is known, and none is paused."""
        return all(member.is_known and not member.is_paused for member in self._of(model))

    def _of(self, model: str) -> Iterable[_Member]:
        return (member for member in self._members.values() if self._model_of(member) == model)

    def _flip(
        self, model: str, short: Role, spare: Role, needs: Mapping[tuple[str, Role], _Need], now: float
    ) -> Iterable[Flip]:
        """Assign one replica of role `spare` the role `short`, if the model's pools of `short` cannot grow."""
        members = [(name, each) for name, each in self._members.items() if self._model_of(each) == model]
        spares = [name for name, member in members if member.role == spare]
        need = needs.get((model, short), _NO_NEED)
        other = needs.get((model, spare), _NO_NEED)
        have = need.load.replicas
        may_grow = any(
            (bounds.model, bounds.role) == (model, short) and self.targets.get(pool, bounds.least) < bounds.most
            for pool, bounds in self.pools.items()
        )
        is_short = need.wanted > have and not may_grow
        has_spare = len(spares) > max(other.enough, 1) and self._is_complete(model)
        since = _since(self._short_since, f"{model}/{short}", is_short and has_spare, now)
        if since is None or now - since < self.config.up_delay_s:
            return
        del self._short_since[f"{model}/{short}"]
        # A replica that returns to the role of its pool goes first, then the least busy one.
        name = min(spares, key=lambda name: (self._home_role(name) != short, self._members[name].demand, name))
        reason = f"demand for {need.wanted} {short}, {have} there"
        yield Flip(name, short, reason, spare, self._members[name].streams, need.load, other.load)

    def _home_role(self, name: str) -> Role:
        bounds = self.pools.get(self._members[name].pool)
        return bounds.role if bounds is not None else "mixed"


def _since(times: dict[str, float], key: str, holds: bool, now: float) -> float | None:
    """Return since when a condition has held; None if it does not hold."""
    if not holds:
        times.pop(key, None)
        return None
    return times.setdefault(key, now)
