"""The pages of a pool: each is free, owned by so many, or cached. Who the owners are, owners' own files know.

A cached page is in the prefix index and has no owner. Pages in quarantine are in none of these states here.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from crossdock.workers.schedule.memory.cached_pages import CachedPages, EvictionPrice
from crossdock.workers.schedule.memory.prefix_index import PrefixIndex
from crossdock.workers.schedule.request.page_hashes import PageHash

STATES = -1
"""Stands for a group in the pages of states."""

OnEvict: TypeAlias = Callable[[int, PageHash, Sequence[int], float], None]
"""Called before the content of an evicted page is lost: its group, its hash, the page, or all pages of a snapshot,
and the seconds to compute it again; 0: not known."""


class BlockPool:
    """Counts the owners of each page, and hands out pages without one."""

    def __init__(
        self,
        num_pages: int,
        page_tokens: float,
        prefixes: PrefixIndex,
        state_pages: int,
        on_evict: OnEvict | None = None,
    ) -> None:
        """`page_tokens`: see `EvictionPrice`. `state_pages`: how many pages a snapshot has."""
        self.prefixes = prefixes
        self.price = EvictionPrice(num_pages, page_tokens)
        self.cached = CachedPages(self.price, num_pages)  # indexed and unowned
        self.num_owners = array("i", [0]) * num_pages  # by page; numpy reads it without a copy
        self.num_shared = 0  # pages with several owners
        self.hash_of: list[PageHash | None] = [None] * num_pages  # by page; None: not indexed
        self._group_of = array("b", [0]) * num_pages  # by page, as it was last allocated
        self._new = range(num_pages)  # free, and never used before
        self._free = deque[int]()  # free, and used before
        self._state_pages = state_pages
        self._on_evict = on_evict

    @property
    def num_available(self) -> int:
        """Return how many pages `take` could hand out now: free ones, and cached ones that can be evicted."""
        return len(self._new) + len(self._free) + len(self.cached)

    @property
    def num_empty(self) -> int:
        """Return how many pages `take` could hand out before it evicts a cached one."""
        return len(self._new) + len(self._free)

    def can_allocate(self, num_pages: int, shared: Sequence[int] = ()) -> bool:
        """Return whether `num_pages` pages are available beside the pages to share; a shared cached page is used up."""
        return num_pages + sum(1 for page in shared if page in self.cached) <= self.num_available

    def take(self, num_pages: int, group: int) -> list[int]:
        """Give an owner so many pages; without free ones, evict cached pages."""
        assert num_pages <= self.num_available, f"{num_pages} pages needed, {self.num_available} available"
        pages = [*self._new[:num_pages]]
        self._new = self._new[num_pages:]
        pages += [self._free.popleft() if self._free else self._evict() for _ in range(num_pages - len(pages))]
        for page in pages:
            self.num_owners[page] = 1
            self._group_of[page] = group
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Give owned or cached pages, those of a prefix, one owner more."""
        for page in pages:
            assert self.num_owners[page] or page in self.cached, f"page {page} has no owner and is not cached"
            self.num_owners[page] += 1
            if self.num_owners[page] == 2:
                self.num_shared += 1
        self.cached.share(pages)

    def give_back(self, pages: Sequence[int]) -> int:
        """Take one owner from each of these pages in order, and return how many have none now."""
        num_unowned = 0
        cached = []
        for page in reversed(pages):  # the end of a prefix is evicted first: without its beginning it is useless
            self.num_owners[page] = num_left = self.num_owners[page] - 1
            if num_left == 1:
                self.num_shared -= 1
            elif num_left == 0:
                num_unowned += 1
                if self.hash_of[page] is None:
                    self._free.append(page)
                else:
                    cached.append(page)
        self.cached.add(cached)
        return num_unowned

    def withdraw(self, page: int) -> None:
        """Take a page from its last owner and from the index; it is not free before `free`."""
        self.num_owners[page] = 0
        self._forget(page)

    def free(self, pages: Sequence[int]) -> None:
        """Hand out withdrawn pages again."""
        self._free.extend(pages)

    def clear_cache(self) -> int:
        """Remove every prefix from the index. Returns how many cached pages that freed."""
        num_cached = len(self.cached)
        on_evict = self._on_evict
        self._on_evict = None
        while self.cached:
            self._free.append(self._evict())
        self._on_evict = on_evict
        for page in [page for index in self.prefixes.by_group for page in index.values()]:
            self._forget(page)
        for snapshot in [*self.prefixes.snapshots.values()]:
            self._forget(snapshot[0])
        if self.prefixes.events is not None:
            self.prefixes.events.cleared()
        return num_cached

    def _evict(self) -> int:
        page = self.cached.evict()
        if self._on_evict is not None:
            self.offer(page, self._on_evict)
        if self._group_of[page] == STATES:  # the other pages of the snapshot were last used at the same time
            self._free.extend(self.cached.evict() for _ in range(self._state_pages - 1))
        self._forget(page)
        return page

    def offer(self, page: int, take: OnEvict) -> None:
        """Offer the content of a page for storage, if the page is cached."""
        group = self._group_of[page]
        page_hash = self.hash_of[page]
        if page_hash is not None and not self.num_owners[page]:
            pages = self.prefixes.snapshots[page_hash] if group == STATES else (page,)
            take(group, page_hash, pages, self.price.page_seconds)

    def _forget(self, page: int) -> None:
        """Take a page from the index; of a snapshot all pages."""
        page_hash = self.hash_of[page]
        self.hash_of[page] = None
        if page_hash is not None:
            group = self._group_of[page]
            if group == STATES:
                for other in self.prefixes.snapshots.pop(page_hash):
                    self.hash_of[other] = None
                return
            self.prefixes.remove(group, page_hash)
