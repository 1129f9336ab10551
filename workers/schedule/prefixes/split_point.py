"""Where computing a prefix from its beginning and loading it from its end meet: both end at the same time.

What has not come when the computation gets there is computed. So a load never costs more than it saves, whatever was
predicted.
"""

from bisect import bisect_right

from crossdock.workers.schedule.forecast import Forecast
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.table import RequestTable


def split_point_page(
    forecast: Forecast, request: Request, first: int, end: int, page_s: float, queue_s: float = 0.0
) -> int:
    """Return the page before which pages [first, end) are computed, while those behind are loaded in `page_s` each.

    `queue_s`: seconds until the first of them begins to load."""
    size = forecast.table.pages.page_size

    def computed(page: int) -> float:
        return forecast.compute_seconds(request, first * size, page * size)

    def loaded(page: int) -> float:
        return queue_s + page_s * (end - page)

    page = first + bisect_right(range(first + 1, end + 1), 0.0, key=lambda page: computed(page) - loaded(page))
    return page + 1 if page < end and computed(page + 1) < loaded(page) else page


def chunk_within(table: RequestTable, forecast: Forecast, request: Request, start: int, num_tokens: int) -> int:
    """Return how many of the `num_tokens` tokens from `start` on to compute, and take their pages.

    0: the rest is loaded sooner. The request then waits for it, at most for as long as computing would take."""
    tail = request.coming.tail
    size = table.pages.page_size
    if tail is None or not num_tokens or start >= tail.num_pages * size:
        return num_tokens
    end = start + num_tokens
    if tail.landed_from is not None:
        return min(end, tail.landed_from * size) - start
    page = start // size
    computed = split_point_page(forecast, request, page, page + tail.num_pending, tail.page_s)
    end = min(end, tail.claim(min(computed, end // size)) * size)
    if end <= start and not table.awaits_pages(request):
        seconds = forecast.compute_seconds(request, start, tail.num_pages * size)
        request.coming.until = table.now + seconds
    return max(end - start, 0)


def meet(table: RequestTable, request: Request) -> None:
    """Let a request go on after the pages that have landed, if its tokens before these are computed."""
    tail = request.coming.tail
    size = table.pages.page_size
    if tail is None or tail.landed_from is None or request.num_in_flight_tokens:
        return
    if request.num_computed_tokens >= tail.landed_from * size:
        request.num_cached_tokens += max(tail.num_pages * size - request.num_computed_tokens, 0)
        request.num_computed_tokens = max(tail.num_pages * size, request.num_computed_tokens)
        request.coming.tail = None
