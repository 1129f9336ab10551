"""Fair shares of a replica's time: the seconds that each tenant is charged, and whose turn comes next.

Each SLO class has a virtual time for each tenant: charged seconds / weight. The tenant with the least goes first. A
tenant that returns begins at the least of those that wait, so that no credit comes from idle time. This is VTC, in
seconds: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from crossdock.workers.schedule.request import Request

MOST_NAMED = 64  # tenants that totals name; the seconds of all further ones are those of `OTHERS`
OTHERS = "others"
MEMORY_S = 60.0  # since its last prompt, for which a tenant counts as there: the pause of a person who reads
_KEPT_SHARE = 1 / 16  # of a replica's places: for tenants that come back, who would wait for another's stream to end
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


@dataclass(slots=True)
class Tenants:
    """Counts what the tenants of one replica were charged, and orders them by that.

    While no request names a tenant, nothing is counted and all have the same turn. They also have where prompts are
    computed in order of arrival.
    """

    are_ordered: bool = True
    in_use: bool = False  # a request has named its tenant
    charged: dict[tuple[str, int], float] = field(default_factory=dict)  # seconds since the start, by tenant and class
    _turns: defaultdict[int, _Turns] = field(default_factory=lambda: defaultdict(_Turns))  # by priority
    _named: set[str] = field(default_factory=set)

    def by_name(self) -> dict[str, float]:
        """Return the seconds that each tenant was charged since the start, in all classes."""
        found = defaultdict[str, float](float)
        for (name, _), seconds in dict(self.charged).items():
            found[name] += seconds
        return dict(found)

    def note(self, requests: Iterable[Request], now: float) -> None:
        """Note whose prompts wait before a step is scheduled. `requests`: those with tokens left to compute."""
        waiting = defaultdict[int, set[str]](set)
        for request in requests:
            waiting[request.priority].add(request.payer)
        for priority in waiting.keys() | self._turns.keys():
            self._turns[priority].note(waiting[priority], now)

    def time(self, request: Request) -> float:
        """Return the virtual time of a request's tenant: the lower goes first among the requests of a class."""
        if not (self.in_use and self.are_ordered):
            return 0.0
        turns = self._turns[request.priority]
        time = turns.times.get(request.payer, 0.0)
        return time if time > turns.least else turns.least

    def lead_s(self, request: Request) -> float:
        """Return how far the virtual time of a request's tenant is ahead of the least in its class, in seconds."""
        return self.time(request) - self._turns[request.priority].least if self.are_ordered else 0.0

    def is_in_turn(self, request: Request) -> bool:
        """Return whether no tenant that waits in the request's class has had less."""
        if not (self.in_use and self.are_ordered):
            return True
        return self.time(request) <= self._turns[request.priority].least + _ROUNDING

    def are_rivals(self, request: Request, other: Request) -> bool:
        """Return whether two requests of one class have different tenants, whose turns alternate."""
        return self.are_ordered and request.priority == other.priority and request.payer != other.payer

    def kept_places(self, request: Request, running: Iterable[Request], num_places: int) -> int:
        """Return how many free places a request must leave to other tenants of its class, which sent some recently.

        A tenant that has fewer than its equal share need leave none. One tenant alone may take all.
        """
        seen = self._turns[request.priority].seen if self.in_use and self.are_ordered else {}
        if len(seen.keys() | {request.payer}) < 2:
            return 0
        holders = [other.payer for other in running if other.priority == request.priority]
        is_below = holders.count(request.payer) * len(seen) < len(holders)
        return 0 if is_below else int(_KEPT_SHARE * num_places)

    def seconds_before(self, request: Request, other: Request, own_seconds: float) -> float:
        """Return the most seconds that another tenant gets until a request's tenant has had `own_seconds` more."""
        lead = own_seconds / request.weight + self.time(request) - self.time(other)
        return max(lead, 0.0) * other.weight

    def charge(self, request: Request, seconds: float) -> None:
        """Charge predicted seconds to a request and its tenant."""
        request.charged_s += seconds
        self.spend(request, seconds)

    def spend(self, request: Request, seconds: float) -> None:
        """Charge the tenant of a request, of which other requests may have spent a part."""
        turns, name = self._turns[request.priority], request.payer
        turns.times[name] = max(turns.times.get(name, 0.0), turns.least) + seconds / request.weight
        if name not in self._named:
            if len(self._named) < MOST_NAMED:
                self._named.add(name)
            else:
                name = OTHERS
        key = name, request.priority
        self.charged[key] = self.charged.get(key, 0.0) + seconds
