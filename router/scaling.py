"""How many replicas each pool should have, and what each is kept for, from what the replicas say of themselves.

Demand is counted in replicas: the share of its time that a replica's work takes, plus what it would take to work off
what waits within its class's time to first token; or the share of its pages or places in use, if that is more. One rule
serves pools for prompts, for tokens and for both, and the ratio between them follows from it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil

from pydantic import BaseModel, ConfigDict, Field

from crossdock.workers.report.advertise import LiveProfile
from crossdock.workers.report.profile import Role, SchedulingProfile
from crossdock.workers.schedule.cost import StepCost


class ScalingConfig(BaseModel):
    """When pools grow and shrink. Their bounds are their own `min_replicas` and `max_replicas`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    utilisation: float = Field(0.7, gt=0, le=1, description="Share of a replica's time that its work should take.")
    interval_s: float = Field(2.0, gt=0, description="How often demand is looked at.")
    up_delay_s: float = Field(10.0, ge=0, description="How long demand must have been too high before a pool grows.")
    down_delay_s: float = Field(300.0, ge=0, description="How long it must have been low before one replica goes.")
    flip_roles: bool = Field(
        False, description="Replicas kept for prompts are kept for tokens instead, or the reverse, when the mix shifts."
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one pool."""

    role: Role
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Resize:
    """A pool should have so many replicas."""

    pool: str
    replicas: int
    reason: str


@dataclass(frozen=True, slots=True)
class Flip:
    """A replica should be kept for something else."""

    replica: str
    role: Role
    reason: str


def demand(profile: SchedulingProfile, live: LiveProfile, done_per_s: float) -> float:
    """How many replicas like this one its work needs. `done_per_s`: seconds of prompts it has computed per second."""
    cost = StepCost.of(live.cost) if live.cost else profile.cost
    classes = profile.slo_classes
    waiting = sum(prompts.seconds / classes[prompts.priority].ttft_s for prompts in live.prompts)
    time = done_per_s + waiting
    if tightest := [slo.tpot_s for slo, streams in zip(classes, live.streams, strict=False) if streams]:
        time += (cost.base + cost.decode_seconds(sum(live.streams), live.context_tokens)) / tightest[0]
    pages = 1 - live.free_pages[-1] / profile.num_pages if live.free_pages else 0.0
    places = sum(live.streams) / profile.max_num_seqs
    return max(time, pages, places)


@dataclass(slots=True)
class _Member:
    pool: str
    profile: SchedulingProfile
    first: tuple[float, LiveProfile]  # when it was heard, since the last decision
    last: tuple[float, LiveProfile]

    @property
    def role(self) -> Role:
        return self.last[1].role or self.profile.role

    @property
    def demand(self) -> float:
        seconds = self.last[0] - self.first[0]
        done = self.last[1].done_seconds - self.first[1].done_seconds
        return demand(self.profile, self.last[1], done / seconds if seconds > 0 else 0.0)


@dataclass(slots=True)
class Scaling:
    """What should be, by what is heard. All times are seconds on one clock of the caller's."""

    config: ScalingConfig
    pools: Mapping[str, Bounds]
    targets: dict[str, int] = field(default_factory=dict)  # replicas, by pool, as last asked for
    _members: dict[str, _Member] = field(default_factory=dict)
    _high_since: dict[str, float] = field(default_factory=dict)  # by pool
    _low_since: dict[str, float] = field(default_factory=dict)
    _short_since: dict[Role, float] = field(default_factory=dict)

    def hear(self, name: str, pool: str, profile: SchedulingProfile, live: LiveProfile, now: float) -> None:
        """What a replica says of itself."""
        it = self._members.get(name)
        if it is None or it.last[1].incarnation != live.incarnation:
            self._members[name] = _Member(pool, profile, (now, live), (now, live))
        else:
            it.last = now, live

    def forget(self, name: str) -> None:
        """A replica is gone."""
        self._members.pop(name, None)

    def decide(self, now: float) -> list[Resize | Flip]:
        """What to change now. It is taken to be done: it is not asked for again."""
        wanted, enough = self._wanted()
        actions: list[Resize | Flip] = []
        for pool, bounds in self.pools.items():
            actions += self._resize(pool, bounds, wanted, enough, now)
        if self.config.flip_roles:
            actions += self._flip("prefill", "decode", wanted, enough, now)
            actions += self._flip("decode", "prefill", wanted, enough, now)
        for it in self._members.values():
            it.first = it.last
        return actions

    def _wanted(self) -> tuple[dict[Role, int], dict[Role, int]]:
        """Replicas of each role: how many demand asks for, and how many would do without asking for more at once."""
        total: dict[Role, float] = {}
        for it in self._members.values():
            role = it.role
            total[role] = total.get(role, 0.0) + it.demand
        most = self.config.utilisation
        return (
            {role: ceil(each / most) for role, each in total.items()},
            {role: ceil(each / (_HYSTERESIS * most)) for role, each in total.items()},
        )

    def _resize(
        self, pool: str, bounds: Bounds, wanted: Mapping[Role, int], enough: Mapping[Role, int], now: float
    ) -> Iterable[Resize]:
        if bounds.least == bounds.most:
            return
        num_here = sum(1 for it in self._members.values() if it.pool == pool)
        target = self.targets.setdefault(pool, min(max(bounds.least, num_here), bounds.most))
        away = self._count(pool, bounds.role, at_home=True) - self._count(pool, bounds.role, at_home=False)
        high = min(max(wanted.get(bounds.role, 0) + away, bounds.least), bounds.most)
        low = min(max(enough.get(bounds.role, 0) + away, bounds.least), bounds.most)
        high_since = _since(self._high_since, pool, high > target, now)
        low_since = _since(self._low_since, pool, low < target, now)
        if high_since is not None and now - high_since >= self.config.up_delay_s:
            target, reason = high, f"demand for {wanted[bounds.role]}"
        elif low_since is not None and now - low_since >= self.config.down_delay_s:
            target, reason = target - 1, f"{low} are enough"
        else:
            return
        self._high_since.pop(pool, None)
        self._low_since.pop(pool, None)
        self.targets[pool] = target
        yield Resize(pool, target, reason)

    def _count(self, pool: str, role: Role, *, at_home: bool) -> int:
        """Replicas of this pool that are kept for something else now; or those of others that are kept for `role`."""
        if at_home:
            return sum(1 for it in self._members.values() if it.pool == pool and it.role != role)
        return sum(1 for it in self._members.values() if it.pool != pool and it.role == role)

    def _flip(
        self, short: Role, spare: Role, wanted: Mapping[Role, int], enough: Mapping[Role, int], now: float
    ) -> Iterable[Flip]:
        """One replica of role `spare` changes to `short`, if pools cannot give what that one lacks."""
        its = [name for name, it in self._members.items() if it.role == spare]
        have = sum(1 for it in self._members.values() if it.role == short)
        may_grow = any(
            bounds.role == short and self.targets.get(pool, bounds.least) < bounds.most
            for pool, bounds in self.pools.items()
        )
        lacks = wanted.get(short, 0) > have and not may_grow
        spares = len(its) > max(enough.get(spare, 0), 1)
        since = _since(self._short_since, short, lacks and spares, now)
        if since is None or now - since < self.config.up_delay_s:
            return
        del self._short_since[short]
        # First one that comes home by it, then the least busy.
        name = min(its, key=lambda it: (self._home(it) != short, self._members[it].demand, it))
        yield Flip(name, short, f"demand for {wanted[short]} {short}, {have} there")

    def _home(self, name: str) -> Role:
        bounds = self.pools.get(self._members[name].pool)
        return bounds.role if bounds is not None else "mixed"


_HYSTERESIS = 0.85  # of the utilisation: a pool shrinks only to where it would not grow again at once


def _since(times: dict[str, float] | dict[Role, float], key: str, holds: bool, now: float) -> float | None:
    """Since when a condition has held; None: it does not."""
    its: dict[str, float] = times  # type: ignore[assignment]
    if not holds:
        its.pop(key, None)
        return None
    return its.setdefault(key, now)
