"""Sizes of pools and roles of replicas in simulated time, in place of `cluster/serve/scaler.py` and Serve."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from crossdock.cluster.simulate.clock import Clock
from crossdock.cluster.simulate.fleet import SimulatedFleet, SimulatedPool
from crossdock.cluster.simulate.replica import SimulatedReplica
from crossdock.router.scaling import Bounds, Flip, Resize, Scaling


@dataclass(frozen=True, slots=True)
class Decision:
    """A change that was made `at` so many seconds."""

    at: float
    action: Resize | Flip


class ScaledCluster(Protocol):
    """Has the replicas that a scaler changes: the simulation."""

    @property
    def clock(self) -> Clock: ...

    @property
    def replicas(self) -> Mapping[str, SimulatedReplica]:
        """The replicas that are alive, by name."""

    @property
    def held(self) -> Iterable[str]:
        """The models that requests wait for."""

    @property
    def has_work(self) -> bool:
        """Whether a request is in flight or still to come."""

    def start(self, pool: SimulatedPool, now: float) -> None:
        """Start a replica of a pool."""

    def retire(self, name: str, now: float) -> None:
        """Send a replica no new requests, and end it when its running ones have ended."""

    def published(self, replica: SimulatedReplica, now: float) -> None:
        """Report a replica's live profile to the routers and the scaler."""


@dataclass(slots=True)
class SimulatedScaler:
    """Looks at the demand every `interval_s`, as long as there is work, and applies what `Scaling` decides."""

    fleet: SimulatedFleet
    cluster: ScaledCluster
    decisions: list[Decision] = field(default_factory=list)
    scaling: Scaling = field(init=False)
    _retired: set[str] = field(default_factory=set)  # replicas that take no new requests
    _starting: dict[str, list[int]] = field(default_factory=dict)  # by pool: numbers of the starts that are wanted
    _num_starts: int = 0

    def __post_init__(self) -> None:
        bounds = {
            pool.name: Bounds(pool.role, pool.replicas, pool.most, pool.model, {"GPU": pool.gpus})
            for pool in self.fleet.pools
        }
        sizes = {pool.name: pool.replicas for pool in self.fleet.pools}
        room = None if self.fleet.gpus is None else {"GPU": float(self.fleet.gpus)}
        self.scaling = Scaling(self.fleet.scaling, bounds, sizes, room)

    def run(self) -> None:
        """Look at the demand from now on."""
        self.cluster.clock.at(self.cluster.clock.now + self.fleet.scaling.interval_s, self._decide)

    def _decide(self, now: float) -> None:
        for model in self.cluster.held:
            self.scaling.ask(model, now)
        for action in self.scaling.decide(now):
            self.decisions.append(Decision(now, action))
            if isinstance(action, Flip):
                replica = self.cluster.replicas[action.replica]
                replica.publisher.assign_role(action.role)
                self.cluster.published(replica, now)
            else:
                self._resize(next(pool for pool in self.fleet.pools if pool.name == action.pool), action.replicas, now)
        if self.cluster.has_work:
            self.run()

    def _resize(self, pool: SimulatedPool, target: int, now: float) -> None:
        """Start replicas, or give up those that are starting first, then the newest."""
        starting = self._starting.setdefault(pool.name, [])
        up = [name for name, each in self.cluster.replicas.items() if each.pool is pool and name not in self._retired]
        for _ in range(target - len(up) - len(starting)):
            self._num_starts += 1
            starting.append(self._num_starts)
            self.cluster.clock.at(now + self.fleet.start_s, partial(self._started, pool, self._num_starts))
        for _ in range(len(up) + len(starting) - target):
            if starting:
                starting.pop()
                continue
            name = up.pop()
            self._retired.add(name)
            self.scaling.leave(name)
            self.cluster.retire(name, now)

    def _started(self, pool: SimulatedPool, number: int, now: float) -> None:
        starting = self._starting[pool.name]
        used = sum(each.pool.gpus for each in self.cluster.replicas.values())
        if number in starting and self.fleet.gpus is not None and used + pool.gpus > self.fleet.gpus:
            again = partial(self._started, pool, number)  # replicas that were given up still finish their streams
            self.cluster.clock.at(now + self.fleet.scaling.interval_s, again)
        elif number in starting:
            starting.remove(number)
            self.cluster.start(pool, now)
