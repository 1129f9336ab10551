"""How many replicas each pool should have, and which role each replica should be assigned, from live profiles.

Demand is counted in replicas. A replica's demand is the share of time that its work takes. The share to compute the
backlog of prompts within their times to first token is added. Where the share of pages or places in use is more,
demand is that share. One rule serves pools of every role, and the ratio between prefill and decode follows from it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from pydantic import BaseModel, ConfigDict, Field

from crossdock.workers.report.advertise import LiveProfile
from crossdock.workers.report.profile import Role, SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepCost

SHRINK_MARGIN = 0.85
"""Share of the target utilisation that the smaller pool must stay below before a pool shrinks, so that it does not grow
again at once. `pytest tests/router/test_scaling.py -k steady_load` shows that no pool moves back and forth."""


class ScalingConfig(BaseModel):
    """When pools grow and shrink. Their bounds are their own `min_replicas` and `max_replicas`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    utilisation: float = Field(0.7, gt=0, le=1, description="Share of a replica's time that its work should take.")
    interval_s: float = Field(2.0, gt=0, description="Seconds between two looks at demand.")
    up_delay_s: float = Field(10.0, ge=0, description="How long demand must have been too high before a pool grows.")
    down_delay_s: float = Field(
        300.0, ge=0, description="How long demand must have been low before a pool gives up one replica."
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


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """The work of all replicas of one role, which decides how many of them there should be."""

    replicas: int = 0  # that have the role
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
    streams: int  # that the replica has, which stay
    load: RoleLoad  # of the role that it is assigned
    spare_load: RoleLoad  # of the role that it had


def demand(profile: SchedulingProfile, live: LiveProfile, done_per_s: float) -> float:
    """Return how many replicas like this one the work needs. `done_per_s`: seconds of prompts computed per second."""
    classes = profile.slo_classes
    waiting = sum(prompts.seconds / classes[prompts.priority].ttft_s for prompts in live.prompts)
    time = done_per_s + waiting
    if tightest := [slo.tpot_s for slo, streams in zip(classes, live.streams, strict=False) if streams]:
        time += step_seconds(profile, live) / tightest[0]
    pages = 1 - live.free_pages[-1] / profile.num_pages if live.free_pages else 0.0
    places = sum(live.streams) / profile.max_num_seqs
    return max(time, pages, places)


def step_seconds(profile: SchedulingProfile, live: LiveProfile) -> float:
    """Return the predicted seconds of a step that computes one token of each stream; 0 without streams."""
    cost = StepCost.of(live.cost) if live.cost else profile.cost
    streams = sum(live.streams)
    return cost.decode_step_seconds(streams, live.context_tokens) if streams else 0.0


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
    def streams(self) -> int:
        return sum(self.last[1].streams) if self.last is not None else 0

    @property
    def demand(self) -> float:
        return demand(self.profile, self.last[1], self.done_per_s) if self.last is not None else 0.0

    @property
    def done_per_s(self) -> float:
        """Seconds of prompts computed per second since the last decision."""
        if self.first is None or self.last is None or self.last[0] <= self.first[0]:
            return 0.0
        return (self.last[1].done_seconds - self.first[1].done_seconds) / (self.last[0] - self.first[0])

    def add_to(self, load: RoleLoad) -> RoleLoad:
        """Return the load with this replica's work."""
        if self.last is None:
            return replace(load, replicas=load.replicas + 1)
        live = self.last[1]
        return RoleLoad(
            load.replicas + 1,
            load.demand + self.demand,
            load.prompt_share + self.done_per_s,
            load.waiting_s + sum(prompts.seconds for prompts in live.prompts),
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

    Where one replica is not known yet, or not any more, no pool shrinks and no role changes: the demand on that replica
    would be missing.
    """

    config: ScalingConfig
    pools: Mapping[str, Bounds]
    targets: dict[str, int] = field(default_factory=dict)
    """Replicas, by pool: as they are when this begins, and then as last decided. A pool that is missing has as many as
    have joined."""
    _members: dict[str, _Member] = field(default_factory=dict)
    _high_since: dict[str, float] = field(default_factory=dict)  # by pool
    _low_since: dict[str, float] = field(default_factory=dict)  # by pool
    _short_since: dict[str, float] = field(default_factory=dict)  # by role

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
        actions: list[Resize | Flip] = []
        for pool, bounds in self.pools.items():
            actions += self._resize(pool, bounds, needs.get(bounds.role, _NO_NEED), now)
        if self.config.flip_roles:
            for short, spare in _PAIRS:
                actions += self._flip(short, spare, needs, now)
        for member in self._members.values():
            member.first = member.last
        return actions

    def _needs(self) -> dict[Role, _Need]:
        """Return the load of each role that a replica has, and how many replicas it needs."""
        loads: dict[Role, RoleLoad] = {}
        for member in self._members.values():
            loads[member.role] = member.add_to(loads.get(member.role, RoleLoad()))
        most = self.config.utilisation
        return {
            role: _Need(load, ceil(load.demand / most), ceil(load.demand / (SHRINK_MARGIN * most)))
            for role, load in loads.items()
        }

    def _resize(self, pool: str, bounds: Bounds, need: _Need, now: float) -> Iterable[Resize]:
        if bounds.least == bounds.most:
            return
        num_here = sum(1 for member in self._members.values() if member.pool == pool)
        target = self.targets.setdefault(pool, min(max(bounds.least, num_here), bounds.most))
        away = num_here - need.load.replicas  # with other roles, less those of other pools that have this role
        high = min(max(need.wanted + away, bounds.least), bounds.most)
        low = min(max(need.enough + away, bounds.least), bounds.most)
        high_since = _since(self._high_since, pool, high > target, now)
        low_since = _since(self._low_since, pool, low < target and self._is_complete, now)
        if high_since is not None and now - high_since >= self.config.up_delay_s:
            target, reason = high, f"demand for {need.wanted}"
        elif low_since is not None and now - low_since >= self.config.down_delay_s:
            target, reason = target - 1, f"{low} are enough"
        else:
            return
        self._high_since.pop(pool, None)
        self._low_since.pop(pool, None)
        before, self.targets[pool] = self.targets[pool], target
        yield Resize(pool, target, reason, before, need.load)

    @property
    def _is_complete(self) -> bool:
        """Whether a live profile of every replica is known."""
        return all(member.is_known for member in self._members.values())

    def _flip(self, short: Role, spare: Role, needs: Mapping[Role, _Need], now: float) -> Iterable[Flip]:
        """Assign one replica of role `spare` the role `short`, if the pools of `short` cannot grow."""
        spares = [name for name, member in self._members.items() if member.role == spare]
        need, other = needs.get(short, _NO_NEED), needs.get(spare, _NO_NEED)
        have = need.load.replicas
        may_grow = any(
            bounds.role == short and self.targets.get(pool, bounds.least) < bounds.most
            for pool, bounds in self.pools.items()
        )
        is_short = need.wanted > have and not may_grow
        has_spare = len(spares) > max(other.enough, 1) and self._is_complete
        since = _since(self._short_since, short, is_short and has_spare, now)
        if since is None or now - since < self.config.up_delay_s:
            return
        del self._short_since[short]
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
