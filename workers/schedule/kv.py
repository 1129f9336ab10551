"""Pages for requests: reuse a cached prefix, reserve before the first chunk, grow, index full pages."""

from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.memory.prefix_index import PrefixHit
from crossdock.workers.schedule.preemption import make_way, preempt_for
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
    if not pages.block_pool.can_allocate(needed, shared=hits) and not make_way(table, request, needed, hits):
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
        if not preempt_for(table, request):
            return False
    return True


def index_full_pages(table: RequestTable, request: Request, start: int) -> None:
    """Let other requests share the full pages among the computed tokens from `start` on."""
    size = table.pages.page_size
    num_full = request.num_computed_tokens // size
    if num_full > start // size and table.pages.enable_prefix_caching:
        table.pages.index(request.owner, request.prefix_hashes(num_full * size, size), start // size, request)
