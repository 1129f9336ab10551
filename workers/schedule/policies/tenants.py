"""Fair shares of a replica's time: the seconds that each tenant is charged, and whose turn comes next.

Each SLO class has a virtual time for each tenant: charged seconds / weight. The tenant with the least goes first. A
tenant that returns begins at the least of those that wait, so that no credit comes from idle time. This is VTC, in
seconds: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp2
from typing import NamedTuple

from crossdock.workers.schedule.request.request import Request

MOST_NAMED = 64  # tenants that totals name; the seconds of all further ones are those of `OTHERS`
OTHERS = "others"
_RENAMED_S = 10.0  # from one choice of these tenants to the next
_HALVED_S = 300.0  # after which a charge counts half in that choice
_MOST_KNOWN = 1024  # tenants whose recent charges are known after a choice
MEMORY_S = 60.0  # since its last prompt, for which a tenant counts as there: the pause of a person who reads
_KEPT_SHARE = 1 / 16  # of a replica's slots: for tenants that come back, who would wait for another's stream to end
_ROUNDING = 1e-9  # seconds


@dataclass(slots=True)
class _Turns:
    """The virtual times of tenants in one class, in seconds of a tenant with weight 1."""

    times: dict[str, float] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)  # tenants with prompts that are not computed
    seen: dict[str, float] = field(default_factory=dict)  # when each tenant last had one, within `MEMORY_S`
    least: float = 0.0  # of the tenants that wait; the last one while none does

    def note(self, waiting: set[str], now: float) -> None:
        """Note which tenants wait now. Those that did not are lifted to the least of the others."""
        times = self.times
        stayed = waiting & self.waiting or self.waiting
        if stayed:
            self.least = max(self.least, min([times[name] for name in stayed]))
        for name in waiting - self.waiting:
            times[name] = max(times.get(name, 0.0), self.least)
        if waiting != self.waiting:
            self.times = {name: time for name, time in times.items() if name in waiting or time > self.least}
        if waiting:
            self.least = min([self.times[name] for name in waiting])
        self.waiting = waiting
        if waiting or self.seen:
            seen = self.seen | dict.fromkeys(waiting, now)
            self.seen = {name: at for name, at in seen.items() if now - at < MEMORY_S}


class _Recent(NamedTuple):
    """The seconds that a tenant was charged recently."""

    seconds: float = 0.0
    at: float = 0.0  # when they counted so much

    def counted(self, now: float) -> float:
        """Return the seconds as they count at `now`."""
        return self.seconds * exp2(-max(now - self.at, 0.0) / _HALVED_S)


@dataclass(slots=True)
class Names:
    """Which tenants totals name: those that were charged most recently, so that names that are used once hide none."""

    charged: dict[tuple[str, int], float] = field(default_factory=dict)  # seconds by tenant and class, since its name
    _named: set[str] = field(default_factory=set)
    _recent: dict[str, _Recent] = field(default_factory=dict)
    _now: float = 0.0
    _chosen_at: float = 0.0

    def pass_time(self, now: float) -> None:
        """Choose again whom to name, if there are more tenants than names and the last choice is old."""
        self._now = now
        if len(self._recent) > MOST_NAMED and not 0.0 <= now - self._chosen_at < _RENAMED_S:
            self._chosen_at = now
            self._choose(now)

    def charge(self, name: str, priority: int, seconds: float) -> None:
        """Count seconds of a tenant in a class."""
        recent = self._recent.get(name, _Recent())
        self._recent[name] = _Recent(recent.counted(self._now) + seconds, self._now)
        if name not in self._named and len(self._named) < MOST_NAMED:
            self._named.add(name)
        self._count(name if name in self._named else OTHERS, priority, seconds)

    def _count(self, name: str, priority: int, seconds: float) -> None:
        self.charged[name, priority] = self.charged.get((name, priority), 0.0) + seconds

    def _choose(self, now: float) -> None:
        by_seconds = sorted(((each.counted(now), name) for name, each in self._recent.items()), reverse=True)
        self._recent = {name: _Recent(seconds, now) for seconds, name in by_seconds[:_MOST_KNOWN]}
        chosen = {name for _, name in by_seconds[:MOST_NAMED]}
        for name, priority in [key for key in self.charged if key[0] in self._named - chosen]:
            self._count(OTHERS, priority, self.charged.pop((name, priority)))
        self._named = chosen


@dataclass(slots=True)
class Tenants:
    """Counts what the tenants of one replica were charged, and orders them by that.

    While no request names a tenant, nothing is counted and no order depends on tenants. All have the same turn where
    prompts are computed in order of arrival.
    """

    are_ordered: bool = True
    in_use: bool = False  # a request has named its tenant
    names: Names = field(default_factory=Names)
    _turns: defaultdict[int, _Turns] = field(default_factory=lambda: defaultdict(_Turns))  # by priority

    @property
    def charged(self) -> dict[tuple[str, int], float]:
        """The seconds by tenant and class, of tenants that have a name since they got the name."""
        return self.names.charged

    def by_name(self) -> dict[str, float]:
        """Return the seconds that each tenant was charged, in all classes."""
        found = defaultdict[str, float](float)
        for (name, _), seconds in dict(self.charged).items():
            found[name] += seconds
        return dict(found)

    def note(self, requests: Iterable[Request], now: float) -> None:
        """Note whose prompts wait before a step is scheduled. `requests`: those with tokens left to compute."""
        self.names.pass_time(now)
        waiting = defaultdict[int, set[str]](set)
        for request in requests:
            waiting[request.priority].add(request.tenant)
        for priority in waiting.keys() | self._turns.keys():
            self._turns[priority].note(waiting[priority], now)

    def time(self, request: Request) -> float:
        """Return the virtual time of a request's tenant: the lower goes first among the requests of a class."""
        if not self.are_ordered:
            return 0.0
        turns = self._turns[request.priority]
        time = turns.times.get(request.tenant, 0.0)
        return time if time > turns.least else turns.least

    def lead_s(self, request: Request) -> float:
        """Return how far the virtual time of a request's tenant is ahead of the least in its class, in seconds."""
        return self.time(request) - self._turns[request.priority].least if self.are_ordered else 0.0

    def is_in_turn(self, request: Request) -> bool:
        """Return whether no tenant that waits in the request's class has had less."""
        return not self.are_ordered or self.time(request) <= self._turns[request.priority].least + _ROUNDING

    def are_rivals(self, request: Request, other: Request) -> bool:
        """Return whether two requests of one class have different tenants, whose turns alternate."""
        return self.are_ordered and request.priority == other.priority and request.tenant != other.tenant

    def kept_slots(self, request: Request, running: Iterable[Request], num_slots: int) -> int:
        """Return how many free slots a request must leave to other tenants of its class, which sent some recently.

        A tenant that has fewer than its equal share need leave none. One tenant alone may take all.
        """
        seen = self._turns[request.priority].seen if self.are_ordered else {}
        if len(seen.keys() | {request.tenant}) < 2:
            return 0
        holders = [other.tenant for other in running if other.priority == request.priority]
        is_below = holders.count(request.tenant) * len(seen) < len(holders)
        return 0 if is_below else int(_KEPT_SHARE * num_slots)

    def charge(self, request: Request, seconds: float) -> None:
        """Charge predicted seconds to a request and its tenant."""
        request.charged_s += seconds
        self.spend(request, seconds)

    def spend(self, request: Request, seconds: float) -> None:
        """Charge the tenant of a request, of which other requests may have spent a part."""
        turns = self._turns[request.priority]
        name = request.tenant
        turns.times[name] = max(turns.times.get(name, 0.0), turns.least) + seconds / request.submission.weight
        self.names.charge(name, request.priority, seconds)
