"""Takes down the events of the pages of a prefix index and of the tiers below it, in order, for readers outside."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from crossdock.workers.schedule.request.items import page_keys
from crossdock.workers.schedule.request.page_hashes import PageHash
from crossdock.workers.schedule.request.request import Request


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Pages that came into the index, each continuing the one before it."""

    hashes: Sequence[PageHash]
    parent: PageHash | None  # hash of the page before the first one; None: a prompt begins with the first one
    token_ids: Sequence[int]  # of all these pages
    page_keys: Sequence[bytes]  # of the items of each page, as in its hash; empty bytes: the page is text alone
    adapter: str  # name of the adapter that computed the pages; empty: the base model did
    cache_salt: str  # of the request


@dataclass(slots=True)
class RemovedPages:
    """Pages that have left the index, or a tier."""

    hashes: list[PageHash]
    tier: str = ""  # its name; empty: the index


@dataclass(slots=True)
class TieredPages:
    """Pages that came to a tier."""

    hashes: list[PageHash]
    tier: str


class ClearedPages:
    """All pages have left the index at once. Those of tiers stay."""


PageEvent: TypeAlias = StoredPages | RemovedPages | TieredPages | ClearedPages


@dataclass(slots=True)
class PageEvents:
    """The events of the first group of layers, which has no window if any group has none.

    A page that a tier takes when it is evicted comes to the tier before it leaves the index. Somebody takes the events
    after each step: nothing else bounds their number.
    """

    page_size: int  # tokens
    _events: list[PageEvent] = field(default_factory=list)

    def stored(self, request: Request, numbers: Sequence[int]) -> None:
        """Note full pages of a request that were indexed just now, by their ascending numbers in its tokens."""
        begin = 0
        for end in range(1, len(numbers) + 1):
            if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
                self._stored_run(request, numbers[begin], numbers[end - 1] + 1)
                begin = end

    def removed(self, page_hash: PageHash, tier: str = "") -> None:
        """Note a page that has left the index, or the tier of that name."""
        if self._events and isinstance(last := self._events[-1], RemovedPages) and last.tier == tier:
            last.hashes.append(page_hash)
        else:
            self._events.append(RemovedPages([page_hash], tier))

    def tiered(self, page_hash: PageHash, tier: str) -> None:
        """Note a page that came to the tier of that name."""
        if self._events and isinstance(last := self._events[-1], TieredPages) and last.tier == tier:
            last.hashes.append(page_hash)
        else:
            self._events.append(TieredPages([page_hash], tier))

    def cleared(self) -> None:
        """Note that all pages leave the index. What happened to it before does not matter any more."""
        of_tiers = [each for each in self._events if isinstance(each, TieredPages | RemovedPages) and each.tier]
        self._events = [ClearedPages(), *of_tiers]

    def take(self) -> list[PageEvent]:
        """Return the events since the last call."""
        events = self._events
        if events:
            self._events = []
        return events

    def _stored_run(self, request: Request, first: int, end: int) -> None:
        """Note the pages `[first, end)` of a request."""
        size = self.page_size
        hashes = request.prefix_hashes(end * size, size)
        keys = [*page_keys(request.items, first * size, size, end - first)] if request.items else [b""] * (end - first)
        submission = request.submission
        self._events.append(
            StoredPages(
                hashes[first:],
                hashes[first - 1] if first else None,
                request.token_ids[first * size : end * size],
                keys,
                "" if submission.adapter is None else submission.adapter.name,
                submission.cache_salt,
            )
        )
