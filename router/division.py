"""Divide the devices of a cluster among the pools of its models: the most pressed pool gets the next replica.

The pressure of a pool is its demand, in seconds of work that come per second, over its replicas. Work waits longest
where the pressure is largest, so the largest pressure is made small.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

MOVE_MARGIN = 0.85
"""Share of the receiver's pressure that the giver must stay below after a move. Without it noise would move replicas
back and forth, each time for the seconds of a start."""
_ROUNDING = 1e-9
_NEWEST = 0.5  # weight of the newest start: a second start finds files in the page cache


@dataclass(frozen=True, slots=True)
class Claim:
    """The replicas of one pool: those that it has, and those that it needs."""

    size: int
    least: int
    wanted: int
    demand: float  # replicas that its work needs, all of their time
    each: Mapping[str, float]  # devices of one replica, by Ray's name

    def pressure(self, size: int) -> float:
        """Return the demand on each replica, were there so many."""
        if self.demand <= 0:
            return 0.0
        return self.demand / size if size else inf


def divide(claims: Mapping[str, Claim], room: Mapping[str, float]) -> dict[str, int]:
    """Return how many replicas each pool should have, by name. `room`: devices of the cluster, by Ray's name.

    A pool grows towards what it wants, into free room or in the place of others' replicas. It never falls below its
    least, and gives up a replica only for a pool whose pressure is clearly larger. Where all pools have what they want,
    or no move helps, sizes stay as they are.
    """
    sizes = {name: claim.size for name, claim in claims.items()}
    while True:
        hungry = [name for name, claim in claims.items() if sizes[name] < claim.wanted]
        hungry.sort(key=lambda name: -claims[name].pressure(sizes[name]))
        after = next((grown for name in hungry if (grown := _grown(name, sizes, claims, room)) is not None), None)
        if after is None:
            return sizes
        sizes = after


def fits(sizes: Mapping[str, int], claims: Mapping[str, Claim], room: Mapping[str, float]) -> bool:
    """Report whether the cluster has the devices of so many replicas."""
    names = {device for claim in claims.values() for device in claim.each}
    used = {
        device: sum(sizes[name] * claim.each.get(device, 0.0) for name, claim in claims.items()) for device in names
    }
    return all(number <= room.get(device, 0.0) + _ROUNDING for device, number in used.items())


def _grown(
    name: str, sizes: Mapping[str, int], claims: Mapping[str, Claim], room: Mapping[str, float]
) -> dict[str, int] | None:
    """Return the sizes with one more replica of a pool, in the place of others' where no room is free; None: others
    need theirs as much."""
    after = {**sizes, name: sizes[name] + 1}
    limit = MOVE_MARGIN * claims[name].pressure(sizes[name])
    while not fits(after, claims, room):
        givers = [
            other
            for other, claim in claims.items()
            if other != name
            and after[other] > claim.least
            and claim.pressure(after[other] - 1) < limit
            and any(claim.each.get(device) and number for device, number in claims[name].each.items())
        ]
        if not givers:
            return None
        giver = min(givers, key=lambda other: claims[other].pressure(after[other] - 1))
        after[giver] -= 1
    return after


@dataclass(slots=True)
class Starts:
    """The starts of models: those that run, and how long earlier ones took. All times are on the caller's clock.

    A replica that wakes would begin here like one that starts, with seconds of its own.
    """

    guesses: Mapping[str, float]  # seconds of each model's first start
    learnt: dict[str, float] = field(default_factory=dict)  # by model
    _begun: dict[str, float] = field(default_factory=dict)  # by model

    def begin(self, model: str, now: float) -> None:
        """Note that the first replica of a model is starting."""
        self._begun[model] = now

    def end(self, model: str, now: float) -> float | None:
        """Note that a replica of the model is up. Returns the seconds that its start took; None: there was none."""
        begun = self._begun.pop(model, None)
        if begun is None:
            return None
        before = self.learnt.get(model, now - begun)
        self.learnt[model] = _NEWEST * (now - begun) + (1 - _NEWEST) * before
        return now - begun

    def remaining(self, model: str, now: float) -> float:
        """Return the predicted seconds until a replica of the model is up; its whole start where none has begun.

        A start that takes longer than predicted is expected to take a tenth of that longer.
        """
        whole = self.learnt.get(model, self.guesses.get(model, 0.0))
        return max(whole - (now - self._begun.get(model, now)), whole / 10)
