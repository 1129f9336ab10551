"""Preemption: where pages run short, requests lose theirs, the least urgent first, and compute them again later.

Transfers make way for more urgent requests too: the router places these requests again.
"""

from collections.abc import Sequence

from crossdock.workers.schedule.policies.order import first_victim
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import Leg
from crossdock.workers.schedule.table import RequestTable


def make_way(table: RequestTable, request: Request, needed: int, hits: Sequence[int]) -> bool:
    """Preempt less urgent requests if that frees the pages that `request` lacks; else preempt none.

    `needed`: pages beside `hits`, with the room for outputs. Where preemption is not enough, less urgent requests whose
    pages are being transferred are returned to the router. Their pages come back later, so that the answer is False.
    """
    less_urgent = [other for other in table.running if other.priority > request.priority]
    if table.assumed_ended and any(other.id in table.assumed_ended for other in less_urgent):
        table.needs_preemption = True
    victims = [
        other
        for other in less_urgent
        if not table.keeps_pages(other) and (other.is_decoding or not table.is_starving(other))
    ]
    pages = table.pages
    freed = pages.num_freed_by([victim.owner for victim in victims], besides=hits)
    freed += sum(map(table.num_growth_pages, victims))
    if not pages.block_pool.can_allocate(needed - freed, shared=hits):
        return_transfers(table, request, needed - freed, hits)
        return False
    while not pages.block_pool.can_allocate(needed, shared=hits):
        victim = first_victim(victims, table.tenants)
        victims.remove(victim)
        needed -= table.num_growth_pages(victim)
        _preempt(table, victim)
    return True


def preempt_for(table: RequestTable, request: Request) -> bool:
    """Preempt a request for the sake of a stream's page; False if the stream must wait, or was itself preempted."""
    if table.assumed_ended:
        table.needs_preemption = True
        return False
    victims = [other for other in table.running if not table.keeps_pages(other)]
    if not table.num_returning_pages() and (transfers := _returnable(table, request.priority)):
        table.give_back(first_victim(transfers, table.tenants))
    if table.num_returning_pages():
        victims = [other for other in victims if other.priority > request.priority]
        if not victims:
            return False
    victim = first_victim(victims, table.tenants)
    _preempt(table, victim)
    return victim is not request


def keep_state(table: RequestTable, request: Request) -> None:
    """Keep the state of a request that is about to release it, as a snapshot, if the state ends with a full page."""
    pages = table.pages
    end = request.num_computed_tokens
    if pages.enable_prefix_caching and end and end % pages.page_size == 0 and not request.num_in_flight_tokens:
        pages.states.keep(request.owner, request.prefix_hashes(end, pages.page_size))


def _preempt(table: RequestTable, request: Request) -> None:
    if table.pages.state_pages:
        keep_state(table, request)
    table.preempt(request)


def return_transfers(table: RequestTable, request: Request, needed: int, hits: Sequence[int]) -> None:
    """Return less urgent requests with transfers to the router if `needed` pages will be available then; else none."""
    pages = table.pages
    chosen = list[Request]()
    transfers = _returnable(table, request.priority)
    coming = table.num_returning_pages()
    while not pages.block_pool.can_allocate(needed - coming, shared=hits):
        if not transfers:
            return
        victim = first_victim(transfers, table.tenants)
        transfers.remove(victim)
        chosen.append(victim)
        coming += pages.num_freed_by([victim.owner], besides=hits) + table.num_growth_pages(victim)
    for victim in chosen:
        table.give_back(victim)


def _returnable(table: RequestTable, priority: int) -> list[Request]:
    """Return the requests less urgent than `priority` whose pages are being transferred, or will be, in or out."""
    return [
        other
        for other in (*table.running, *table.held)
        if other.leg is not Leg.LOCAL
        and other.priority > priority
        and not other.num_in_flight_tokens
        and other.id not in table.assumed_ended
        and not table.is_starving(other)
    ]
