"""Requests whose prompt is computed by one replica and whose tokens are made by another."""

from crossdock.workers.schedule import kv
from crossdock.workers.schedule.admission import num_places
from crossdock.workers.schedule.order import order_prefills
from crossdock.workers.schedule.pace import next_due
from crossdock.workers.schedule.request import FinishReason, Leg, Request, Status
from crossdock.workers.schedule.table import RequestTable


def grant(table: RequestTable, now: float) -> list[Request]:
    """Reserve pages for requests that another replica prefills, in prompt order, while there are pages and places.

    Returns the requests that got pages. The first `num_computed_tokens` of each are cached here and need no transfer.
    """
    granted = []
    arriving = [request for request in table.waiting if request.leg is Leg.RECEIVE]
    if not arriving:
        return []
    for request in order_prefills(arriving, now, table.prefilled.tokens, table.config.starvation_s):
        if num_places(table, request.priority) <= 0 or not kv.admit(table, request, kv.match_prefix(table, request)):
            break
        granted.append(request)
    return granted


def commit(table: RequestTable, request: Request, num_tokens: int) -> None:
    """Note that the first `num_tokens` of a held request have arrived: other requests can share their full pages."""
    start, request.num_computed_tokens = request.num_computed_tokens, num_tokens
    kv.index_full_pages(table, request, start)


def start_decoding(table: RequestTable, request: Request, token_id: int, now: float) -> None:
    """Let a held request decode: all its pages have arrived, and `token_id`, sampled by the other replica."""
    assert request.status is Status.HELD
    commit(table, request, request.num_tokens)
    request.token_ids.append(token_id)
    request.due = next_due(request.due, now, table.tpot_s(request))
    table.resume(request)


def take_over(table: RequestTable, request: Request, now: float) -> None:
    """Compute the prompt of a request here, because the other replica is lost.

    What has arrived is found again by its hashes. Pages that the other replica may still write to are quarantined
    until `pages.end_quarantine(owner)`.
    """
    assert request.leg is Leg.RECEIVE
    request.leg = Leg.LOCAL
    if request.status is Status.HELD:
        table.recall(request, now)


def finish_sent(table: RequestTable, request: Request) -> None:
    """End a held request here: the other replica has all its pages."""
    table.end(request, FinishReason.SHIPPED)
