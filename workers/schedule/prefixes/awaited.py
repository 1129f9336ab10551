"""Prefixes that come from elsewhere while their request waits: from a tier below the pool, or from another replica.

Somebody fills pages that have an owner of their own. The request keeps its place in the queue and keeps no other
request back, until these pages have landed, or have failed, or do not land in time. A page that has landed is indexed:
for the request it is a prefix hit. A page that has not landed is computed.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from crossdock.workers.schedule import kv
from crossdock.workers.schedule.memory.prefix_index import MISSING, PrefixHit
from crossdock.workers.schedule.request.page_hashes import PageHash
from crossdock.workers.schedule.request.request import Request, Status
from crossdock.workers.schedule.table import RequestTable

PageSource: TypeAlias = Literal["host", "files", "replica"]
"""Where pages come from: a tier below the pool, by its name, or another replica."""


class EmptyPage(NamedTuple):
    """A page to fill: page `number` of a prefix, for one group of layers."""

    number: int
    group: int
    page: int


@dataclass(slots=True, eq=False)
class AwaitedPrefix:
    """The pages that somebody fills for a waiting request."""

    request: Request
    owner: str  # of the pages, also of those that were cached before
    hashes: Sequence[PageHash]  # of all pages of the prefix, the last of which is awaited
    num_landed: int  # pages of it that hold their tokens; at first those of the prefix hit
    empty: Sequence[EmptyPage]  # by number; groups with a window have those that the token after the prefix sees
    state: Sequence[int]  # empty pages for the state after the prefix, where layers are recurrent and none is cached


@dataclass(frozen=True, slots=True)
class Awaited:
    """Begins and ends the arrival of prefixes, for the waiting requests of one table."""

    table: RequestTable
    num_tokens: Counter[PageSource] = field(default_factory=Counter)  # whose pages have landed, since the start

    def is_arriving(self, request: Request) -> bool:
        """Return whether the last prefix that a request has waited for may still arrive."""
        return self._owner(request) in self.table.awaited

    def begin(self, request: Request, num_pages: int, until: float) -> AwaitedPrefix | None:
        """Allocate the pages that the pool lacks among the first `num_pages` of a request; the request waits for them.

        The request waits no longer than `until`, in seconds on the clock of arrival times. None: the request cannot
        start now because pages are short, earlier pages for it are still arriving, or nothing is missing.
        """
        table = self.table
        pages = self.table.pages
        if request.status is not Status.WAITING or self.is_arriving(request) or not kv.may_share(table, request):
            return None
        num_cached = kv.match_prefix(table, request).num_pages
        if num_pages <= num_cached:
            return None
        hashes = request.prefix_hashes(num_pages * pages.page_size, pages.page_size)
        whole = pages.prefixes.parts(hashes)
        num_missing = [group.count(MISSING) for group in whole.by_group]
        num_new = sum(num_missing) + (0 if whole.snapshot else pages.state_pages)
        needed = num_new + table.needs.num_to_start(request.num_tokens, whole)
        needed += table.room_for_outputs() + table.num_growth_pages(request)
        if not pages.block_pool.can_allocate(needed, shared=whole.pages):
            return None
        request.coming.num_awaited += 1
        owner = self._owner(request)
        table.awaited[owner] = request
        request.coming.until = until
        request.expected_cached_tokens = num_pages * pages.page_size
        return AwaitedPrefix(request, owner, hashes, num_cached, *self._allocate(owner, whole, num_missing))

    def _allocate(
        self, owner: str, whole: PrefixHit, num_missing: Sequence[int]
    ) -> tuple[list[EmptyPage], Sequence[int]]:
        """Give an owner a prefix with empty pages for what is missing in each group. Returns these, and a state's."""
        pages = self.table.pages
        pages.share(owner, whole)
        empty = [
            EmptyPage(number, group, page)
            for group, count in enumerate(num_missing)
            for number, page in pages.fill_gaps(owner, group, count)
        ]
        if not pages.state_pages or whole.snapshot:
            return sorted(empty), ()
        pages.states.allocate(owner, arrives=True)
        return sorted(empty), pages.states.newest(owner)

    def land(self, prefix: AwaitedPrefix, num_pages: int) -> None:
        """Index the first `num_pages` pages of the prefix, which hold their tokens now; with the last, also its state.

        May be called again with more pages, until `end`."""
        pages = self.table.pages
        before = prefix.num_landed
        prefix.num_landed = num_pages
        if num_pages > before:
            pages.index(prefix.owner, prefix.hashes[:num_pages], before, prefix.request)
            if prefix.state and num_pages == len(prefix.hashes):
                pages.states.index(prefix.owner, prefix.state, prefix.hashes)

    def end(self, prefix: AwaitedPrefix, may_be_written: bool = False, only: Collection[int] | None = None) -> None:
        """Let the request go on: nothing more will land. Pages that have landed stay cached.

        `may_be_written`: pages that have not landed are quarantined, until `pages.end_quarantine(prefix.owner)`.
        `only`: of these, the pages that are being written; None: all of them.
        """
        table = self.table
        if may_be_written and prefix.num_landed < len(prefix.hashes):
            table.pages.quarantine(prefix.owner, prefix.num_landed, only)
        else:
            table.pages.release(prefix.owner)
        del table.awaited[prefix.owner]
        prefix.request.coming.until = 0.0

    def without_waiting(self, prefills: Sequence[Request]) -> list[Request]:
        """Return the prompts that await no pages, neither of their own nor those that come for another prompt."""
        table = self.table
        others = [each for each in prefills if not table.awaits_pages(each)]
        if len(others) == len(prefills) or not (coming := self.pages_coming(prefills)):
            return others
        return [each for each in others if each.status is Status.RUNNING or kv.next_page(table, each) not in coming]

    def pages_coming(self, prefills: Sequence[Request]) -> set[PageHash | None]:
        """Return the hash of the first page that comes for each of these prompts."""
        table = self.table
        return {kv.next_page(table, each) for each in prefills if table.awaits_pages(each)} - {None}

    def patience(self, now: float) -> float | None:
        """Return the seconds until a request waits no longer, whatever has landed; None: no limit."""
        times = [request.coming.until for request in self.table.awaited.values()]
        return min((until - now for until in times if until > now), default=None)

    def _owner(self, request: Request) -> str:
        """Return the owner of the last prefix that a request has waited for; an earlier one may be in quarantine."""
        return f"{request.owner}+{request.coming.num_awaited}"
