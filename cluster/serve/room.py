"""Sentences about replicas that find no room on the machines of a cluster. Pure: what Ray knows comes in."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from crossdock.cluster.config import DEVICES, ClusterConfig, PoolConfig

_LOOK_S = 1.0  # between two looks
_TELL_AFTER_S = 5.0  # a start: Ray needs a moment to place what fits
_TINY = 0.01  # a bundle may have a thousandth of a core, which stands for none

Resources = Mapping[str, float]


class Machine(NamedTuple):
    """The resources of a machine, and those that are free now."""

    total: Resources
    free: Resources
    labels: Mapping[str, str]


class Demand(NamedTuple):
    """A number of actors or groups that Ray could not place, each of which asks for `resources` in all."""

    resources: Resources
    number: int


def lacking_room(
    models: Sequence[ClusterConfig], demands: Sequence[Demand], machines: Sequence[Machine]
) -> Iterator[str]:
    """Yield a sentence for each pool with replicas that Ray could not place: what they ask for, what the cluster has.

    Every pool's own `num_gpus` must be set. Another application's demand of the same kind counts as the pool's.
    """
    waiting = Counter[tuple[float, ...]]()
    for demand in demands:
        waiting[_shape(demand.resources)] += demand.number
    for pool in (pool for each in models for pool in each.pools):
        shape = _shape(pool.devices)
        if not any(shape) and not pool.node_labels:
            continue  # a replica that reserves nothing waits for no room
        if count := min(waiting[shape], max(pool.replicas, 1)):
            waiting[shape] -= count
            if sentence := _sentence(pool, count, machines):
                yield sentence


def _sentence(pool: PoolConfig, count: int, machines: Sequence[Machine]) -> str | None:
    """Return the sentence about `count` replicas; None: a machine has room, and Ray will place one there."""
    asked = {name: number for name, number in pool.devices.items() if number > _TINY}
    labels = "".join(f" with {name}={value}" for name, value in pool.node_labels.items())
    suitable = [each for each in machines if pool.node_labels.items() <= each.labels.items()]
    wants = f"{count} of {max(pool.replicas, 1)} replicas of pool {pool.name!r} wait for room"
    each = f", each for {_amounts(asked)}" if asked else ""
    where = f"{len(suitable)} machine{'s' * (len(suitable) != 1)}{labels}"
    if not suitable:
        return f"{wants}{each}: the cluster has no machine{labels}"
    total, free = ({name: sum(kind.get(name, 0) for kind in found) for name in asked} for found in _kinds(suitable))
    missing = {name: count * number - free[name] for name, number in asked.items() if count * number > free[name]}
    has = f"the cluster has {_amounts(total)} on {where}, {_amounts(free)} free"
    if missing:
        return f"{wants}{each}: {has}; {_amounts(missing)} missing"
    if any(all(machine.free.get(name, 0) >= number for name, number in asked.items()) for machine in suitable):
        return None
    return f"{wants}{each}: {has}, but no machine has it free for a whole replica"


def _kinds(machines: Sequence[Machine]) -> Sequence[Sequence[Resources]]:
    return [each.total for each in machines], [each.free for each in machines]


def _shape(resources: Resources) -> tuple[float, ...]:
    """Return the numbers by which a demand is told from another one."""
    return tuple(round(resources.get(name, 0), 1) for name in DEVICES)


def _amounts(resources: Resources) -> str:
    return " and ".join(f"{number:g} {name}{'s' * (number != 1)}" for name, number in resources.items())


class RoomWatch:
    """Tells what replicas wait for, when that changes, and ends a start that has waited too long."""

    def __init__(self, begun: float, patience_s: float) -> None:
        self._begun = begun
        self._patience_s = patience_s
        self._since: float | None = None  # when replicas began to wait
        self._told: list[str] = []
        self._looked_at: float | None = None

    def is_due(self, now: float) -> bool:
        """Return whether to look again: once a second."""
        is_due = self._looked_at is None or now - self._looked_at >= _LOOK_S
        if is_due:
            self._looked_at = now
        return is_due

    def hear(self, sentences: Sequence[str], now: float) -> list[str]:
        """Return the sentences that are new.

        Raises:
            TimeoutError: replicas have waited for longer than `patience_s`; the message says for what.
        """
        if not sentences:
            self._since = None
            return []
        self._since = self._since if self._since is not None else now
        if now - self._since >= self._patience_s:
            raise TimeoutError(
                f"{'; '.join(sentences)}. No room came in {self._patience_s:g} s (application.room_timeout_s): add "
                f"machines, end what uses them, or lower replicas, num_gpus or num_cpus of the pool"
            )
        if now - self._begun < _TELL_AFTER_S or sentences == self._told:
            return []
        self._told = list(sentences)
        return self._told
