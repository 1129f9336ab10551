"""How long a tenant's prompt waits for those of others: at each replica they get their shares while it waits, no more.

Replicas advertise what their tenants wait for and have had. Routers add the prompts that they have booked since.
"""

from collections.abc import Sequence

import numpy as np

from crossdock.router.replica_table import ReplicaState
from crossdock.workers.report.live_profile import TenantWork
from crossdock.workers.schedule.cost.formula import Floats
from crossdock.workers.schedule.first_token import rivals_seconds


def fair_ahead(
    replicas: Sequence[ReplicaState | None], priority: int, tenant: str, weight: float, own: Floats, done: Floats
) -> Floats:
    """Return the most seconds of prompts of its class that go before a prompt of `own` seconds at every replica.

    NaN at replicas where no other tenant waits. `done`: seconds that each has worked off since its report.
    """
    ahead = np.full(len(own), np.nan)
    for slot, replica in enumerate(replicas):
        works = _works(replica, priority) if replica is not None else {}
        if works.keys() - {tenant}:
            mine = works.pop(tenant, TenantWork(tenant, priority, weight, 0.0, 0.0))
            before = max(mine.seconds - done[slot], 0.0)
            turns = (before + own[slot]) / weight + mine.lead_s
            rivals = [(each.seconds, each.weight, each.lead_s) for each in works.values()]
            ahead[slot] = before + rivals_seconds(turns, rivals)
    return ahead


def _works(replica: ReplicaState, priority: int) -> dict[str, TenantWork]:
    """Return the waiting work of each tenant of a class, by name: as reported, and booked since."""
    reported = replica.live.prefills.tenants if replica.live is not None else ()
    works = {work.tenant: work for work in reported if work.priority == priority}
    for in_flight in replica.pending.values():
        query = in_flight.query
        if query.tenant and in_flight.priority == priority and in_flight.seconds and not in_flight.has_first:
            work = works.get(query.tenant, TenantWork(query.tenant, priority, query.weight, 0.0, 0.0))
            works[query.tenant] = work._replace(seconds=work.seconds + in_flight.seconds)
    return works
