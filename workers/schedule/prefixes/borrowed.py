"""Prefixes that another replica sends, for requests that wait here for their first chunk: see awaited.py.

A request waits from the question on; pages are taken here only for what the other replica offers. The request waits,
without news, as long as the missing tokens would take to compute. So a fetch that fails costs no more seconds than it
could have saved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from crossdock.workers.schedule import kv
from crossdock.workers.schedule.forecast import Forecast
from crossdock.workers.schedule.prefixes.awaited import Awaited, AwaitedPrefix
from crossdock.workers.schedule.request.page_hashes import PageHash
from crossdock.workers.schedule.request.request import Request, Status
from crossdock.workers.schedule.table import RequestTable


@dataclass(slots=True, eq=False)
class _Fetch:
    """The fetch of one request's prefix."""

    request: Request
    num_pages: int  # pages of the prefix that the other replica has, or is believed to have
    num_here: int  # pages of the prefix that need not come any more
    longest_s: float  # without news, whatever the prediction
    prefix: AwaitedPrefix | None = None  # None: nothing is granted yet


@dataclass(slots=True)
class BorrowedPrefixes:
    """The fetches for requests of one table, by a key of the caller's."""

    table: RequestTable
    forecast: Forecast
    awaited: Awaited
    _fetches: dict[str, _Fetch] = field(default_factory=dict)
    _quarantined: dict[str, str] = field(default_factory=dict)  # owners of pages that may be written to, by key

    def expect(self, key: str, request: Request, now: float, longest_s: float) -> Sequence[PageHash]:
        """Let a waiting request wait for a prefix that another replica has. Return the hashes of the prefix's pages.

        `longest_s`: seconds without news for which the request waits at most."""
        size = self.table.pages.page_size
        hashes = request.prefix_hashes(min(request.submission.source_tokens, request.num_tokens - 1), size)
        num_here = kv.match_prefix(self.table, request).num_pages
        fetch = self._fetches[key] = _Fetch(request, len(hashes), num_here, longest_s)
        self._wait(fetch, now)
        return hashes

    def grant(self, key: str, num_tokens: int, now: float) -> AwaitedPrefix | None:
        """Take pages for the first `num_tokens` tokens, which the other replica has.

        None: nothing is missing here, the request waits no more, or there are too few pages."""
        fetch = self._fetches.get(key)
        num_pages = num_tokens // self.table.pages.page_size
        if fetch is None or not self._seconds_left(fetch, now) or not 0 < num_pages <= fetch.num_pages:
            return None
        prefix = self.awaited.begin(fetch.request, num_pages, fetch.request.coming.until)
        if prefix is not None and not self._is_one_piece(prefix):
            self.awaited.end(prefix)
            return None
        if prefix is not None:
            fetch.prefix = prefix
            fetch.num_pages = num_pages
            fetch.num_here = prefix.num_landed
            self._wait(fetch, now)
        return prefix

    def is_granted(self, key: str) -> bool:
        """Return whether pages are taken for the prefix."""
        return key in self._fetches and self._fetches[key].prefix is not None

    def land(self, key: str, num_tokens: int, now: float) -> None:
        """Note that the first `num_tokens` tokens are here, and the state after them if they are all."""
        fetch = self._fetches.get(key)
        if fetch is not None and fetch.prefix is not None:
            size = self.table.pages.page_size
            fetch.num_here = num_tokens // size
            self.awaited.num_tokens["replica"] += max(fetch.num_here - fetch.prefix.num_landed, 0) * size
            self.awaited.land(fetch.prefix, fetch.num_here)
            self._wait(fetch, now)

    def end(self, key: str, *, may_be_written: bool) -> bool:
        """Let the request start with what is here. Return whether it has waited.

        `may_be_written`: the other pages are in quarantine until `stopped`."""
        fetch = self._fetches.pop(key, None)
        if fetch is None:
            return False
        fetch.request.coming.until = 0.0
        if fetch.prefix is not None:
            self.awaited.end(fetch.prefix, may_be_written)
            if may_be_written:
                self._quarantined[key] = fetch.prefix.owner
        return True

    def stopped(self, key: str) -> None:
        """Note that the other replica writes to no page of this fetch any more."""
        owner = self._quarantined.pop(key, None)
        if owner is not None:
            self.table.pages.end_quarantine(owner)

    def overdue(self, now: float) -> list[str]:
        """Return the fetches that no request waits for any more: it has ended, or has waited too long."""
        return [key for key, fetch in self._fetches.items() if not self._seconds_left(fetch, now)]

    def patience(self, now: float) -> float | None:
        """Return the seconds until a request stops waiting; None: no request waits."""
        return min((self._seconds_left(fetch, now) for fetch in self._fetches.values()), default=None)

    def patience_of(self, key: str, now: float) -> float | None:
        """Return the seconds until the request of a fetch stops waiting; None: the fetch has ended."""
        fetch = self._fetches.get(key)
        return None if fetch is None else self._seconds_left(fetch, now)

    def _is_one_piece(self, prefix: AwaitedPrefix) -> bool:
        """Return whether all pages after those that are here are empty: the other replica writes all of them."""
        pages = self.table.pages
        empty = {each.page for each in prefix.empty}
        groups = pages.live_pages_of(prefix.owner)
        written = {page for start, live in groups for page in live[max(prefix.num_landed - start, 0) :]}
        return written == empty and bool(prefix.state) == bool(pages.state_pages)

    def _seconds_left(self, fetch: _Fetch, now: float) -> float:
        """Return the seconds until the request stops waiting; 0 where it waits no more."""
        is_waiting = fetch.request.status is Status.WAITING
        return max(fetch.request.coming.until - now, 0.0) if is_waiting else 0.0

    def _wait(self, fetch: _Fetch, now: float) -> None:
        """Set the time at which the request stops waiting, unless there is news by then."""
        size = self.table.pages.page_size
        seconds = fetch.longest_s
        if fetch.num_pages > fetch.num_here:
            tokens = fetch.num_here * size, fetch.num_pages * size
            seconds = min(self.forecast.compute_seconds(fetch.request, *tokens), seconds)
        fetch.request.coming.until = now + seconds
