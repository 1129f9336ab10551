"""How long a tenant's prompt waits for those of others: at each replica they get their shares while it waits, no more.

Replicas advertise what their tenants wait for and have had. Routers add the prompts that they have booked since.
"""

from collections.abc import Sequence

import numpy as np

from crossdock.router.replica_table import ReplicaState
from crossdock.workers.report.advertise import TenantWork
from crossdock.workers.schedule.cost.formula import Floats


def fair_ahead(
    replicas: Sequence[ReplicaState | None], priority: int, payer: str, weight: float, own: Floats, done: Floats
) -> Floats:
    """Return the most seconds of prompts of its class that go before a prompt of `own` seconds at every replica.

    NaN at replicas where no other tenant waits. `done`: seconds that each has worked off since its report.
    """
    ahead = np.full(len(own), np.nan)
    for slot, replica in enumerate(replicas):
        works = _works(replica, priority) if replica is not None else {}
        if works.keys() - {payer}:
            mine = works.pop(payer, TenantWork(payer, priority, weight, 0.0, 0.0))
            before = max(mine.seconds - done[slot], 0.0)
            turns = (before + own[slot]) / weight + mine.lead_s
            rivals = (min(each.seconds, each.weight * max(turns - each.lead_s, 0.0)) for each in works.values())
            ahead[slot] = before + sum(rivals)
    return ahead


def _works(replica: ReplicaState, priority: int) -> dict[str, TenantWork]:
    """Return the waiting work of each tenant of a class, by name: as reported, and booked since."""
    reported = replica.live.tenants if replica.live is not None else ()
    works = {work.payer: work for work in reported if work.priority == priority}
    for booking in replica.pending.values():
        if booking.payer and booking.priority == priority and booking.seconds and not booking.has_first:
            work = works.get(booking.payer, TenantWork(booking.payer, priority, booking.weight, 0.0, 0.0))
            works[booking.payer] = work._replace(seconds=work.seconds + booking.seconds)
    return works
