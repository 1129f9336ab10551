"""Which KV pages belong to whom: reference-counted page ids, a hash-chained prefix index, quarantine. Integers only.

Every page is in exactly one state: *free*, *owned* (by one request or more), *cached* (owned by the prefix index alone,
evictable, least recently used first) or *quarantined* (owned by nobody, but a remote writer may still reach it). Only
`release(owner)` and `end_quarantine(owner)` give pages back.
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

PageHash: TypeAlias = bytes
"""Names the content of a full page *and all before it*: equal hashes mean an equal prefix (and an equal salt)."""


def hash_pages(
    token_ids: Sequence[int], page_size: int, salt: str = "", known: Sequence[PageHash] = ()
) -> list[PageHash]:
    """Chained hashes of the full pages of `token_ids`; `known` are those of the first pages, computed before.

    blake2b, because tenants share an index: a collision that can be constructed would let one read another's prompt.
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
    """How many pages are in each state. They always add up to `total`."""

    free: int
    owned: int
    cached: int
    quarantined: int
    total: int


class PagePool:
    """Hands out page ids. An owner's pages keep their order: page i holds its tokens [i·size, (i+1)·size)."""

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be at least 1, not {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self._new = range(num_pages)  # free, and never used
        self._free = deque[int]()  # free again
        self._num_owners = [0] * num_pages
        self._owned: dict[str, list[int]] = {}
        self._hash_of: list[PageHash | None] = [None] * num_pages  # of those that are indexed
        self._index: dict[PageHash, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # indexed and unowned, least recently used first
        self._quarantine: dict[str, list[int]] = {}
        self._changes: dict[PageHash, bool] = {}  # since last asked: now findable, or not any more

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now: the free, and the cached that it may evict."""
        return len(self._new) + len(self._free) + len(self._cached)

    def pages_of(self, owner: str) -> Sequence[int]:
        return self._owned.get(owner, ())

    def counts(self) -> PageCounts:
        free, cached = len(self._new) + len(self._free), len(self._cached)
        quarantined = sum(map(len, self._quarantine.values()))
        owned = sum(1 for owners in self._num_owners if owners)
        return PageCounts(free, owned, cached, quarantined, self.num_pages)

    def match_prefix(self, hashes: Sequence[PageHash]) -> list[int]:
        """The pages of the longest indexed prefix of `hashes`, whether owned now or cached. Takes no ownership."""
        pages = []
        for page_hash in hashes:
            page = self._index.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def can_allocate(self, num_pages: int, shared: Sequence[int] = ()) -> bool:
        """Whether `num_pages` new pages remain after `shared` ones are taken (taking a cached page uses it up)."""
        return num_pages + sum(1 for page in shared if page in self._cached) <= self.num_available

    def findable(self) -> list[PageHash]:
        """What a prefix can be matched with, as it was indexed: the beginning of a prefix before its end."""
        return list(self._index)

    # -- changing --------------------------------------------------------------------------------------------------

    def take_changes(self) -> tuple[list[PageHash], list[PageHash]]:
        """What has become findable since the last call, in that order, and what has ceased to be. What came and went
        between two calls is in neither, so that nobody has to ask for the list to stay shorter than the pool."""
        changes, self._changes = self._changes, {}
        return [it for it, is_new in changes.items() if is_new], [it for it, is_new in changes.items() if not is_new]

    def share(self, owner: str, pages: Sequence[int]) -> None:
        """`owner` becomes one more owner of `pages`, which `match_prefix` has just returned."""
        for page in pages:
            assert self._num_owners[page] or page in self._cached, f"page {page} cannot be shared: nobody keeps it"
            self._cached.pop(page, None)
            self._num_owners[page] += 1
        self._owned.setdefault(owner, []).extend(pages)

    def allocate(self, owner: str, num_pages: int) -> list[int]:
        """`num_pages` fresh pages for `owner`, evicting the least recently used cached ones where none is free."""
        assert num_pages <= self.num_available, f"{num_pages} pages wanted, {self.num_available} available"
        pages = [*self._new[:num_pages]]
        self._new = self._new[num_pages:]
        pages += [self._free.popleft() if self._free else self._evict() for _ in range(num_pages - len(pages))]
        for page in pages:
            self._num_owners[page] = 1
        self._owned.setdefault(owner, []).extend(pages)
        return pages

    def index(self, owner: str, hashes: Sequence[PageHash], first: int) -> None:
        """Makes `owner`'s pages from number `first` findable under `hashes[first:]`. Their content must be written.

        Where another page already holds the same content, that one stays the findable one.
        """
        if not self.enable_prefix_caching:
            return
        for page, page_hash in zip(self._owned[owner][first : len(hashes)], hashes[first:], strict=True):
            if page_hash not in self._index and self._hash_of[page] is None:
                self._index[page_hash] = page
                self._hash_of[page] = page_hash
                self._note(page_hash, True)

    def release(self, owner: str) -> int:
        """Ends all that `owner` holds, in whatever state it is; unknown owners hold nothing. Returns how many pages
        nobody owns any more. Indexed ones stay findable until evicted, the ends of prefixes first."""
        return self._give_back(self._owned.pop(owner, []))

    def quarantine(self, owner: str, first: int = 0) -> int:
        """Like `release`, but of its pages from number `first` on, those that only this owner holds stay untouchable
        until `end_quarantine(owner)`."""
        held = self._owned.pop(owner, [])
        alone = [page for page in held[first:] if self._num_owners[page] == 1]
        tainted = set(alone)
        self._give_back([page for page in held if page not in tainted])
        for page in alone:
            self._num_owners[page] = 0
            self._forget(page)  # a remote writer may change it: what was promised of its content no longer holds
        if alone:
            self._quarantine.setdefault(owner, []).extend(alone)
        return len(alone)

    def end_quarantine(self, owner: str) -> int:
        """The writer is known to have stopped: `owner`'s quarantined pages are free again. Returns how many."""
        pages = self._quarantine.pop(owner, [])
        self._free.extend(pages)
        return len(pages)

    def clear_cache(self) -> int:
        """Forgets every cached prefix. Returns how many pages that freed."""
        num_cached = len(self._cached)
        while self._cached:
            self._free.append(self._evict())
        for page in [*self._index.values()]:
            self._forget(page)
        return num_cached

    def _give_back(self, pages: Sequence[int]) -> int:
        num_unowned = 0
        for page in reversed(pages):  # the end of a prefix is worth less than its beginning: evict it first
            self._num_owners[page] -= 1
            if self._num_owners[page] == 0:
                num_unowned += 1
                if self._hash_of[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None
        return num_unowned

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        page_hash, self._hash_of[page] = self._hash_of[page], None
        if page_hash is not None:
            del self._index[page_hash]
            self._note(page_hash, False)

    def _note(self, page_hash: PageHash, is_findable: bool) -> None:
        if self._changes.pop(page_hash, is_findable) is is_findable:  # else it is again as it was when last asked
            self._changes[page_hash] = is_findable
