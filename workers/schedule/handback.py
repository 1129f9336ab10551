"""Transfers that make way for more urgent requests: the router places these requests again."""

from collections.abc import Sequence

from crossdock.workers.schedule.order import first_victim
from crossdock.workers.schedule.request import Request
from crossdock.workers.schedule.submission import Leg
from crossdock.workers.schedule.table import RequestTable


def return_transfers(table: RequestTable, request: Request, needed: int, hits: Sequence[int]) -> None:
    """Return less urgent requests with transfers to the router if `needed` pages will be available then; else none."""
    pages, chosen = table.pages, list[Request]()
    transfers = returnable(table, request.priority)
    coming = table.num_returning_pages()
    while not pages.stock.can_allocate(needed - coming, shared=hits):
        if not transfers:
            return
        victim = first_victim(transfers, table.tenants)
        transfers.remove(victim)
        chosen.append(victim)
        coming += pages.num_freed_by([victim.owner], besides=hits) + table.num_growth_pages(victim)
    for victim in chosen:
        table.give_back(victim)


def returnable(table: RequestTable, priority: int) -> list[Request]:
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
