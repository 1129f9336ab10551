"""Pages for requests: reuse a cached prefix, reserve before the first chunk, grow, preempt, index full pages.

Transfers make way for more urgent requests too: the router places these requests again.
"""

from collections.abc import Sequence

from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.memory.prefix_index import PrefixHit
from crossdock.workers.schedule.policies.order import first_victim
from crossdock.workers.schedule.request.coming_pages import ArrivingTail
from crossdock.workers.schedule.request.page_hashes import PageHash
from crossdock.workers.schedule.request.request import Request, Status
from crossdock.workers.schedule.request.submission import Leg
from crossdock.workers.schedule.table import RequestTable


def may_share(table: RequestTable, request: Request) -> bool:
    """Return whether cached pages are of use for a request."""
    return table.pages.enable_prefix_caching and not request.needs_whole_prompt


def match_prefix(table: RequestTable, request: Request) -> PrefixHit:
    """Return the cached pages that the request can start from.

    At least one token is left to compute, because its logits are needed.
    """
    pages = table.pages
    if not may_share(table, request):
        return pages.prefixes.match(())
    hashes = request.prefix_hashes(request.num_tokens - 1, pages.page_size)
    if request.leg is Leg.RECEIVE:  # with the transfer comes the state, and what windows see
        position = request.num_tokens if None in pages.windows else None  # else no group would tell prompts apart
        return pages.prefixes.match(hashes, needs_state=False, position=position)
    return pages.prefixes.match(hashes)


def next_page(table: RequestTable, request: Request) -> PageHash | None:
    """Return the hash of the first page of a waiting prompt that is not cached; None: no full page is left."""
    hashes = request.prefix_hashes(request.num_tokens - 1, table.pages.page_size)
    num_cached = match_prefix(table, request).num_pages
    return hashes[num_cached] if num_cached < len(hashes) and may_share(table, request) else None


def with_tail(hit: PrefixHit, tail: ArrivingTail, pages: PagePool) -> PrefixHit:
    """Return a hit of the whole prefix, of a pool of one group: the pages of `hit`, and those that `tail` fills."""
    filled = pages.pages_of(tail.owner)[hit.num_pages : tail.num_pages]
    return PrefixHit(max(tail.num_pages, hit.num_pages), ([*hit.by_group[0], *filled],))


def admit(table: RequestTable, request: Request, hit: PrefixHit, set_aside: int = 0) -> bool:
    """Reserve pages for all tokens of a waiting request and start it; False if there are too few pages.

    All pages are reserved before the first chunk, so that every started prompt can end. A group with a window reserves
    as many as it holds at once; for a prompt that another replica computes, the pages that later tokens see.
    Room is left for the outputs of all requests, so that none is preempted soon. `hit`: the result of `match_prefix`.
    `set_aside`: pages that requests before this one are about to take.
    """
    pages = table.pages
    num_cached = hit.num_pages
    hit = with_tail(hit, tail, pages) if (tail := request.coming.tail) is not None else hit
    hits = hit.pages
    is_arriving = request.leg is Leg.RECEIVE
    new = (table.needs.to_receive if is_arriving else table.needs.to_start)(request.num_tokens, hit)
    room = table.room_for_outputs()
    if table.running or table.held:  # a request that is alone can have the whole pool
        room += table.num_growth_pages(request)
    needed = sum(new) + pages.state_pages + set_aside + room
    if not pages.block_pool.can_allocate(needed, shared=hits) and not _make_way(table, request, needed, hits):
        table.lacks_pages = True
        return False
    pages.share(request.owner, hit)
    if is_arriving:
        pages.leave_out(request.owner, request.num_tokens)
    for group, num_pages in enumerate(new):
        pages.allocate(request.owner, num_pages, group)
    if pages.state_pages:
        pages.states.allocate(request.owner, arrives=request.leg is Leg.RECEIVE)
    request.num_computed_tokens = num_cached * pages.page_size
    if not request.num_preemptions:
        request.num_cached_tokens = request.num_computed_tokens
    table.start(request)
    return True


def reach(table: RequestTable, request: Request, num_tokens: int) -> bool:
    """Give a running request a page in each group for the last of `num_tokens` tokens; False if it must wait.

    Without a free page, requests are preempted: the least urgent first, among equals the last admitted, perhaps the
    stream itself. Where pages come back soon, the stream waits for one instead, unless it is more urgent than others.
    """
    if request.status is not Status.RUNNING:
        return False
    pages = table.pages
    while short := pages.groups_short_of(request.owner, num_tokens):
        if pages.block_pool.num_available >= len(short):
            for group in short:
                pages.allocate(request.owner, 1, group)
            break
        if not _preempt_for(table, request):
            return False
    return True


def _preempt_for(table: RequestTable, request: Request) -> bool:
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


def index_full_pages(table: RequestTable, request: Request, start: int) -> None:
    """Let other requests share the full pages among the computed tokens from `start` on."""
    size = table.pages.page_size
    num_full = request.num_computed_tokens // size
    if num_full > start // size and table.pages.enable_prefix_caching:
        table.pages.index(request.owner, request.prefix_hashes(num_full * size, size), start // size, request)


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


def _make_way(table: RequestTable, request: Request, needed: int, hits: Sequence[int]) -> bool:
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
