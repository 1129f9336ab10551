"""Pages for requests: reuse a cached prefix, reserve before the first chunk, grow, preempt, index full pages."""

from collections.abc import Sequence

from crossdock.workers.schedule.pages import PageHash, hash_pages
from crossdock.workers.schedule.request import Leg, Request, Status
from crossdock.workers.schedule.table import RequestTable


def match_prefix(table: RequestTable, request: Request) -> list[int]:
    """Return the cached pages that the request can start from.

    At least one token is left to compute, because its logits are needed.
    """
    pages = table.pages
    if not pages.enable_prefix_caching or request.sampling.prompt_logprobs is not None:
        return []
    return pages.match_prefix(_page_hashes(request, pages.page_size)[: (request.num_tokens - 1) // pages.page_size])


def admit(table: RequestTable, request: Request, hits: Sequence[int]) -> bool:
    """Reserve pages for all tokens of a waiting request and start it; False if there are too few pages.

    All pages are reserved before the first chunk, so that no prompt starts that cannot end. One page is left for each
    request that runs or arrives, so that the next step preempts none. `hits`: the result of `match_prefix`.
    """
    pages = table.pages
    num_new = -(-request.num_tokens // pages.page_size) - len(hits)
    needed = num_new + _num_reserved(table)
    if not pages.can_allocate(needed, shared=hits) and not _make_way(table, request, num_new, hits):
        return False
    pages.share(request.owner, hits)
    pages.allocate(request.owner, num_new)
    request.num_computed_tokens = len(hits) * pages.page_size
    if not request.num_preemptions:
        request.num_cached_tokens = request.num_computed_tokens
    table.start(request)
    return True


def grow(table: RequestTable, request: Request) -> bool:
    """Give a stream a page for its newest token if that token begins one; False if the stream cannot decode now.

    Without a free page, requests are preempted: the least urgent class first, in it the last admitted. That may be the
    stream itself.
    """
    if request.status is not Status.RUNNING:
        return False
    pages = table.pages
    while len(request.token_ids) > len(pages.pages_of(request.owner)) * pages.page_size:
        if pages.num_available:
            pages.allocate(request.owner, 1)
            break
        if table.assumed_ended:
            table.needs_preemption = True
            return False
        victim = _next_victim([other for other in table.running if not table.keeps_pages(other)])
        table.preempt(victim)
        if victim is request:
            return False
    return True


def index_full_pages(table: RequestTable, request: Request, start: int) -> None:
    """Let other requests share the full pages among the computed tokens from `start` on."""
    size = table.pages.page_size
    num_full = request.num_computed_tokens // size
    if num_full > start // size and table.pages.enable_prefix_caching:
        table.pages.index(request.owner, _page_hashes(request, size)[:num_full], first=start // size)


def _num_reserved(table: RequestTable) -> int:
    """Return the pages that must stay available: one for each request that runs or arrives."""
    return len(table.running) + sum(1 for other in table.held if other.leg is Leg.RECEIVE)


def _make_way(table: RequestTable, request: Request, num_new: int, hits: Sequence[int]) -> bool:
    """Preempt less urgent requests if that frees the `num_new` pages that `request` needs; else preempt none."""
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
    if not pages.can_allocate(num_new + _num_reserved(table) - len(victims) - freed, shared=hits):
        return False
    while not pages.can_allocate(num_new + _num_reserved(table), shared=hits):
        victim = _next_victim(victims)
        victims.remove(victim)
        table.preempt(victim)
    return True


def _next_victim(requests: Sequence[Request]) -> Request:
    """Return the request to preempt first: the last admitted of the least urgent class."""
    return max(enumerate(requests), key=lambda pair: (pair[1].priority, pair[0]))[1]


def _page_hashes(request: Request, page_size: int) -> Sequence[PageHash]:
    """Return the hashes of the request's full pages; each page is hashed once."""
    if len(request.page_hashes) < request.num_tokens // page_size:
        request.page_hashes = hash_pages(request.token_ids, page_size, request.cache_salt, request.page_hashes)
    return request.page_hashes
