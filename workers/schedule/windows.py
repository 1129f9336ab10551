"""Pages of layers with windows: a chunk has to wait for some, and windows leave others behind."""

from crossdock.workers.schedule import kv
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.table import RequestTable


def chunk_within(table: RequestTable, encoding: Encoding, request: Request, start: int, num_tokens: int) -> int:
    """Return how many of the `num_tokens` tokens from `start` on a running prompt has pages for.

    A group with a window has pages for the next chunk once the last one has ended; 0 before that. Where another request
    took them, pages for the shortest chunk are found as for a stream.
    """
    least = max(encoding.least_tokens(request, start, table.pages.page_size), 1) if request.items else 1
    held = table.pages.num_tokens_held(request.owner)
    lacks = held < start + least and num_tokens
    if lacks and not request.num_in_flight_tokens and request.id not in table.assumed_ended:
        kv.reach(table, request, start + least)
        held = table.pages.num_tokens_held(request.owner)
    return max(min(num_tokens, held - start), 0)


def slide(table: RequestTable, request: Request) -> None:
    """Give back the pages that windows have passed, and reserve as many for the tokens of the prompt to come."""
    pages = table.pages
    owner = request.owner
    pages.slide(owner, request.num_computed_tokens)
    for group, most in enumerate(table.needs.most):
        if most is not None and not request.is_decoding:
            missing = table.needs.pages(request.num_tokens) - len(pages.pages_of(owner, group))
            missing = min(missing, most - pages.num_held(owner, group), pages.block_pool.num_available)
            pages.allocate(owner, max(missing, 0), group)
