"""The owners of KV pages: reference-counted page ids, a hash-chained prefix index, quarantine. Integers only.

Every page is in exactly one state: *free*, *owned* (by one request or more), *cached* (in the prefix index, without an
owner; retention.py decides which is evicted first) or *quarantined* (without an owner, but a remote writer may still
reach it).
Only `release(owner)` and `end_quarantine(owner)` give pages back.
"""

import hashlib
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from crossdock.workers.schedule.retention import LeastRecentlyUsed, Retention

PageHash: TypeAlias = bytes
"""Names the content of a full page and of all pages before it: equal hashes mean equal prefixes and equal salts."""


def hash_pages(
    token_ids: Sequence[int], page_size: int, salt: str = "", known: Sequence[PageHash] = ()
) -> list[PageHash]:
    """Return the chained hashes of the full pages of `token_ids`.

    `known`: hashes of the first pages, computed before. blake2b, because tenants share an index: with a hash whose
    collisions can be constructed, one tenant could read another's prompt.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else hashlib.blake2b(salt.encode(), digest_size=16).digest()
    content = array("I", token_ids[len(hashes) * page_size : len(token_ids) - len(token_ids) % page_size]).tobytes()
    page_bytes = page_size * array("I").itemsize
    for start in range(0, len(content), page_bytes):
        parent = hashlib.blake2b(parent + content[start : start + page_bytes], digest_size=16).digest()
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, slots=True)
class PageCounts:
    """How many pages are in each state. The states always add up to `total`."""

    free: int
    owned: int
    cached: int
    quarantined: int
    total: int


class PagePool:
    """Hands out page ids. An owner's pages keep their order: page i holds the owner's tokens [i·size, (i+1)·size)."""

    def __init__(
        self, num_pages: int, page_size: int, enable_prefix_caching: bool = True, cached: Retention | None = None
    ) -> None:
        """Create a pool of free pages of `page_size` tokens each. `cached`: None evicts the least recently used page.

        Raises:
            ValueError: `num_pages` or `page_size` is below 1.
        """
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be at least 1, not {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._new = range(num_pages)  # free, and never used before
        self._free = deque[int]()  # free, and used before
        self._num_owners = [0] * num_pages
        self._owned: dict[str, array[int]] = {}  # as C integers: a step copies them, see `StepInputs.of`
        self._hash_of: list[PageHash | None] = [None] * num_pages  # by page; None: not indexed
        self._index: dict[PageHash, int] = {}
        self.cached: Retention = cached if cached is not None else LeastRecentlyUsed()  # indexed and unowned
        self._quarantine: dict[str, list[int]] = {}
        self._changes: dict[PageHash, bool] = {}  # since `take_changes`: True is indexed, False removed

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Return how many pages `allocate` could hand out now: free ones, and cached ones that can be evicted."""
        return len(self._new) + len(self._free) + len(self.cached)

    def pages_of(self, owner: str) -> Sequence[int]:
        """Return the pages of an owner in the order of their tokens; none for an unknown owner."""
        return self._owned.get(owner, ())

    @property
    def num_quarantined(self) -> int:
        """Return how many pages wait until their remote writer is known to have stopped."""
        return sum(map(len, self._quarantine.values()))

    def counts(self) -> PageCounts:
        """Count the pages in each state."""
        free, cached = len(self._new) + len(self._free), len(self.cached)
        owned = sum(1 for owners in self._num_owners if owners)
        return PageCounts(free, owned, cached, self.num_quarantined, self.num_pages)

    def match_prefix(self, hashes: Sequence[PageHash]) -> list[int]:
        """Return the pages of the longest indexed prefix of `hashes`, owned or cached. Their owners do not change."""
        pages = []
        for page_hash in hashes:
            page = self._index.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def can_allocate(self, num_pages: int, shared: Sequence[int] = ()) -> bool:
        """Return whether `num_pages` pages are available beside the pages to share; a shared cached page is used up."""
        return num_pages + sum(1 for page in shared if page in self.cached) <= self.num_available

    def num_freed_by(self, owners: Sequence[str], besides: Sequence[int] = ()) -> int:
        """Return how many pages, `besides` these, would have no owner if all of `owners` released theirs."""
        counts = Counter(page for owner in owners for page in self._owned.get(owner, ()))
        for page in besides:
            counts.pop(page, None)
        return sum(count == self._num_owners[page] for page, count in counts.items())

    def findable(self) -> list[PageHash]:
        """Return the indexed hashes in the order of indexing: the beginning of a prefix before its end."""
        return list(self._index)

    # -- changing --------------------------------------------------------------------------------------------------

    def take_changes(self) -> tuple[list[PageHash], list[PageHash]]:
        """Return the hashes indexed since the last call, in order, and the hashes removed since then.

        A hash that was indexed and removed between two calls is in neither list. So the lists stay shorter than the
        pool even if this is never called.
        """
        changes, self._changes = self._changes, {}
        added = [page_hash for page_hash, is_indexed in changes.items() if is_indexed]
        return added, [page_hash for page_hash, is_indexed in changes.items() if not is_indexed]

    def share(self, owner: str, pages: Sequence[int]) -> None:
        """Add `owner` to the owners of `pages`, which `match_prefix` has just returned."""
        for page in pages:
            assert self._num_owners[page] or page in self.cached, (
                f"page {page} cannot be shared: it has no owner and is not cached"
            )
            self._num_owners[page] += 1
        self.cached.share(pages)
        self._owned.setdefault(owner, array("i")).extend(pages)

    def allocate(self, owner: str, num_pages: int) -> list[int]:
        """Give `owner` so many pages; without free ones, evict cached pages."""
        assert num_pages <= self.num_available, f"{num_pages} pages needed, {self.num_available} available"
        pages = [*self._new[:num_pages]]
        self._new = self._new[num_pages:]
        pages += [self._free.popleft() if self._free else self._evict() for _ in range(num_pages - len(pages))]
        for page in pages:
            self._num_owners[page] = 1
        self._owned.setdefault(owner, array("i")).extend(pages)
        return pages

    def index(self, owner: str, hashes: Sequence[PageHash], first: int) -> None:
        """Index the pages of `owner` from number `first` on under `hashes[first:]`. Their content must be written.

        If a page with the same content is indexed already, that page stays in the index.
        """
        if not self.enable_prefix_caching:
            return
        parent = self._index.get(hashes[first - 1]) if first else None
        for page, page_hash in zip(self._owned[owner][first : len(hashes)], hashes[first:], strict=True):
            if page_hash not in self._index and self._hash_of[page] is None:
                self._index[page_hash] = page
                self._hash_of[page] = page_hash
                self.cached.index(page, parent)
                self._note(page_hash, True)
            parent = self._index.get(page_hash)

    def release(self, owner: str) -> int:
        """Take all pages from `owner`, and return how many of them have no owner now. Unknown owners have none.

        Indexed pages stay in the index until they are evicted, the ends of prefixes first.
        """
        return self._give_back(self._owned.pop(owner, ()))

    def quarantine(self, owner: str, first: int = 0) -> int:
        """Release the pages of `owner`, but quarantine those from number `first` on that have no other owner.

        Quarantined pages are not used before `end_quarantine(owner)`. Returns how many there are.
        """
        held = self._owned.pop(owner, ())
        alone = [page for page in held[first:] if self._num_owners[page] == 1]
        tainted = set(alone)
        self._give_back([page for page in held if page not in tainted])
        for page in alone:
            self._num_owners[page] = 0
            self._forget(page)  # a remote writer may change the content, so the hash no longer holds
        if alone:
            self._quarantine.setdefault(owner, []).extend(alone)
        return len(alone)

    def end_quarantine(self, owner: str) -> int:
        """Free the quarantined pages of `owner`, whose writer is known to have stopped. Returns how many."""
        pages = self._quarantine.pop(owner, [])
        self._free.extend(pages)
        return len(pages)

    def clear_cache(self) -> int:
        """Remove every prefix from the index. Returns how many cached pages that freed."""
        num_cached = len(self.cached)
        while self.cached:
            self._free.append(self._evict())
        for page in [*self._index.values()]:
            self._forget(page)
        return num_cached

    def _give_back(self, pages: Sequence[int]) -> int:
        num_unowned = 0
        cached = []
        for page in reversed(pages):  # the end of a prefix is evicted first: without its beginning it is useless
            self._num_owners[page] -= 1
            if self._num_owners[page] == 0:
                num_unowned += 1
                if self._hash_of[page] is None:
                    self._free.append(page)
                else:
                    cached.append(page)
        self.cached.add(cached)
        return num_unowned

    def _evict(self) -> int:
        page = self.cached.evict()
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        page_hash, self._hash_of[page] = self._hash_of[page], None
        if page_hash is not None:
            del self._index[page_hash]
            self.cached.forget(page)
            self._note(page_hash, False)

    def _note(self, page_hash: PageHash, is_indexed: bool) -> None:
        if self._changes.pop(page_hash, is_indexed) is is_indexed:  # else the page is as it was at the last call
            self._changes[page_hash] = is_indexed
