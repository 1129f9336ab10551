"""The owners of KV pages: the pages of each request by group of layers, and quarantine. Integers only.

Every page is in exactly one state: *free*, *owned* (by one request or more), *cached* (in the prefix index, without an
owner; block_pool.py counts these three) or *quarantined* (without an owner, but a remote writer may still reach it).
Only `release(owner)`, `trim(owner)`, `slide(owner)` and `end_quarantine(owner)` give pages back.

Layers with equal windows share pages: they are a group. An owner has a list of pages for each group; all pages have
the same number of bytes, and any page serves any group.

Where a model has recurrent layers, an owner also has a *state*: see owned_states.py.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from crossdock.workers.schedule.memory.block_pool import BlockPool, OnEvict
from crossdock.workers.schedule.memory.owned_states import OwnedStates
from crossdock.workers.schedule.memory.page_events import PageEvents
from crossdock.workers.schedule.memory.prefix_index import (
    HOLE,
    MISSING,
    PrefixHit,
    PrefixIndex,
    Window,
    first_visible_page,
)
from crossdock.workers.schedule.request.page_hashes import PageHash
from crossdock.workers.schedule.request.request import Request


@dataclass(slots=True)
class _Held:
    """The pages that one owner has for one group."""

    pages: "array[int]"  # as C integers: a step copies them, see `StepInputs.of`
    first: int = 0  # all before this one are holes

    def live(self, first: int = 0) -> "array[int]":
        """Return the pages from number `first` on, without holes."""
        first = max(first, self.first)
        return self.pages[first:] if first else self.pages


@dataclass(frozen=True, slots=True)
class PageCounts:
    """How many pages are in each state. The states always add up to `total`."""

    free: int
    owned: int
    cached: int
    quarantined: int
    total: int


class PagePool:
    """Hands out page ids. An owner's pages keep their order: page i of a group holds tokens [i·size, (i+1)·size)."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = True,
        windows: Sequence[Window] = (None,),
        state_pages: int = 0,
        on_evict: OnEvict | None = None,
        events: PageEvents | None = None,
    ) -> None:
        """Create a pool of free pages of `page_size` tokens each.

        `windows`: of each group of layers. `state_pages`: how many the state of one owner needs. `on_evict`: offers the
        content of evicted pages to tiers. `events`: see `PrefixIndex`.

        Raises:
            ValueError: `num_pages` or `page_size` is below 1.
        """
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be at least 1, not {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.windows = tuple(windows)
        self.num_groups = len(self.windows)  # of layers that have pages of their own
        self.has_windows = any(window is not None for window in self.windows)
        self.state_pages = state_pages
        groups = max(len(self.windows), 1)  # each needs a page for the same tokens
        self.prefixes = PrefixIndex(self.windows, page_size, bool(state_pages), events)
        self.block_pool = BlockPool(num_pages, page_size / groups, self.prefixes, state_pages, on_evict)
        self.states = OwnedStates(self.block_pool, state_pages, enable_prefix_caching)
        self._owned: dict[str, tuple[_Held, ...]] = {}  # of each group
        self._quarantine: dict[str, list[int]] = {}

    # -- reading ---------------------------------------------------------------------------------------------------

    def pages_of(self, owner: str, group: int = 0) -> Sequence[int]:
        """Return an owner's pages of one group in the order of their tokens; none for an unknown owner."""
        held = self._owned.get(owner)
        return held[group].pages if held else ()

    def further_pages_of(self, owner: str) -> Sequence[Sequence[int]]:
        """Return an owner's pages of each group after the first, as `pages_of`."""
        return [held.pages for held in self._owned.get(owner, ())[1:]] if len(self.windows) > 1 else ()

    def live_pages_of(self, owner: str) -> list[tuple[int, Sequence[int]]]:
        """Return for each group the number of an owner's first page that is no hole, and the pages from it on."""
        return [(held.first, held.live()) for held in self._owned.get(owner, ())]

    def num_held(self, owner: str, group: int) -> int:
        """Return how many pages an owner has for one group, without holes."""
        held = self._owned.get(owner)
        return len(held[group].pages) - held[group].first if held else 0

    def num_held_by(self, owner: str) -> int:
        """Return how many pages an owner has for all groups and its state."""
        num_pages = sum([len(held.pages) - held.first for held in self._owned.get(owner, ())])
        return num_pages + (len(self.states.by_owner[owner].pages()) if owner in self.states.by_owner else 0)

    def num_tokens_held(self, owner: str) -> int:
        """Return the end of the tokens for which an owner has pages in every group."""
        held = self._owned.get(owner)
        if not held:
            return 0
        num_pages = min([len(each.pages) for each in held]) if len(held) > 1 else len(held[0].pages)
        return num_pages * self.page_size

    def groups_short_of(self, owner: str, num_tokens: int) -> list[int]:
        """Return the groups in which an owner has no page for the last of `num_tokens` tokens."""
        held = [len(self.pages_of(owner, group)) * self.page_size for group in range(self.num_groups)]
        return [group for group, most in enumerate(held) if num_tokens > most]

    @property
    def num_quarantined(self) -> int:
        """Return how many pages wait until their remote writer is known to have stopped."""
        return sum(map(len, self._quarantine.values()))

    def num_quarantined_of(self, owners: Collection[str]) -> int:
        """Return how many of the quarantined pages were those of `owners`."""
        return sum([len(self._quarantine.get(owner, ())) for owner in owners])

    def counts(self) -> PageCounts:
        """Count the pages in each state."""
        free = self.block_pool.num_empty
        cached = len(self.block_pool.cached)
        owned = sum(1 for owners in self.block_pool.num_owners if owners)
        return PageCounts(free, owned, cached, self.num_quarantined, self.num_pages)

    def num_freed_by(self, owners: Sequence[str], besides: Sequence[int] = ()) -> int:
        """Return how many pages, `besides` these, would have no owner if all of `owners` released theirs."""
        counts = Counter(page for owner in owners for page in self._all_of(owner))
        for page in besides:
            counts.pop(page, None)
        return sum(count == self.block_pool.num_owners[page] for page, count in counts.items())

    def num_freed_in_turn(self, owners: Sequence[str], besides: set[int] | frozenset[int] = frozenset()) -> list[int]:
        """Return how many pages, not counting those in `besides`, each of `owners` frees if they release theirs in this
        order."""
        if not self.block_pool.num_shared and not besides:  # the usual case: each frees all that it has
            return [self.num_held_by(owner) for owner in owners]
        released = Counter[int]()  # of the pages with several owners, which are few
        freed = list[int]()
        for owner in owners:
            pages = np.asarray(self._all_of(owner))  # a live profile asks for all pages of long prompts
            pages = pages[pages >= 0]
            num_owners = np.asarray(self.block_pool.num_owners)[pages]
            shared = pages[num_owners > 1].tolist()
            released.update(shared)
            still_owned = {page for page in shared if released[page] < self.block_pool.num_owners[page]}
            kept = len(besides.difference(still_owned).intersection(pages.tolist())) if besides else 0
            freed.append(len(pages) - len(still_owned) - kept)
        return freed

    def _all_of(self, owner: str) -> "array[int]":
        """Return the pages that an owner has in all groups, and those of its states."""
        pages = array("i")
        for held in self._owned.get(owner, ()):
            pages.extend(held.live())
        if self.state_pages and owner in self.states.by_owner:
            pages.extend(self.states.by_owner[owner].pages())
        return pages

    # -- changing --------------------------------------------------------------------------------------------------

    def share(self, owner: str, hit: PrefixHit) -> None:
        """Add `owner`, which has no pages yet, to the owners of a prefix that `prefixes.match` has just returned."""
        self.block_pool.share(hit.pages)
        self._owned[owner] = tuple(_Held(array("i", pages), pages.count(HOLE)) for pages in hit.by_group)
        if self.state_pages:
            self.states.share(owner, hit)

    def allocate(self, owner: str, num_pages: int, group: int = 0) -> list[int]:
        """Give `owner` so many pages for a group; without free ones, evict cached pages."""
        pages = self.block_pool.take(num_pages, group)
        if owner not in self._owned:
            self._owned[owner] = tuple(_Held(array("i")) for _ in self.windows)
        self._owned[owner][group].pages.extend(pages)
        return pages

    def fill_gaps(self, owner: str, group: int, num_pages: int) -> list[tuple[int, int]]:
        """Give `owner` a page for a group in the place of each `MISSING` one. Returns these pages by number."""
        held = self._owned[owner][group].pages
        new = self.block_pool.take(num_pages, group)
        filled = list(zip([number for number, page in enumerate(held) if page == MISSING], new, strict=True))
        for number, page in filled:
            held[number] = page
        return filled

    def slide(self, owner: str, position: int) -> None:
        """Give back the pages that no token of `owner` from `position` on sees. Indexed ones stay in the index."""
        for held, window in zip(self._owned.get(owner, ()), self.windows, strict=False):
            first = min(first_visible_page(window, position, self.page_size), len(held.pages))
            if first > held.first:
                self.block_pool.give_back(held.pages[held.first : first])
                held.pages[held.first : first] = array("i", [HOLE]) * (first - held.first)
                held.first = first

    def leave_out(self, owner: str, position: int) -> None:
        """Give back the pages that no token from `position` on sees, and leave holes for those that are not here yet.

        So pages that `allocate` gives from now on begin with the first one that such a token sees."""
        self.slide(owner, position)
        for held, window in zip(self._owned[owner], self.windows, strict=True):
            first = first_visible_page(window, position, self.page_size)
            if first > len(held.pages):
                held.pages.extend([HOLE] * (first - len(held.pages)))
                held.first = first

    def index(self, owner: str, hashes: Sequence[PageHash], first: int, request: Request | None = None) -> None:
        """Index the pages of `owner` from number `first` on under `hashes[first:]`. Their content must be written.

        If a page with the same content is indexed already, that page stays in the index. `request`: whose tokens these
        pages hold, where the index has `events`.
        """
        if not self.enable_prefix_caching:
            return
        hash_of = self.block_pool.hash_of
        for group, (held, index) in enumerate(zip(self._owned[owner], self.prefixes.by_group, strict=True)):
            added = dict[PageHash, int]()
            for page_hash, page in zip(hashes[first:], held.pages[first : len(hashes)], strict=False):
                if page != HOLE and page_hash not in index and hash_of[page] is None:
                    added[page_hash] = page
                    hash_of[page] = page_hash
            self.prefixes.add(group, added)
            if not group and self.prefixes.events is not None and request is not None:
                numbers = [number for number, page_hash in enumerate(hashes[first:], first) if page_hash in added]
                self.prefixes.events.stored(request, numbers)

    def release(self, owner: str) -> int:
        """Take all pages from `owner`, and return how many of them have no owner now. Unknown owners have none.

        Indexed pages stay in the index until they are evicted, the ends of prefixes first.
        """
        groups = self._owned.pop(owner, ())
        num_unowned = self._release_state(owner, groups) if self.state_pages else 0
        return num_unowned + sum(self.block_pool.give_back(held.live()) for held in groups)

    def _release_state(self, owner: str, groups: Sequence[_Held]) -> int:
        """Take from an owner its state and the pages behind each snapshot that it used. Returns how many of these pages
        have no owner now.

        So a snapshot is evicted before the pages in front of it: each is useless without the other, and pages behind
        the last snapshot are useless.
        """
        state = self.states.by_owner.pop(owner, None)
        if state is None:
            return 0
        num_unowned = self.block_pool.give_back(state.pages())
        for num_pages, page_hash in reversed(state.used):
            for held in groups:
                num_unowned += self.block_pool.give_back(held.live(num_pages))
                del held.pages[num_pages:]
            snapshot = self.prefixes.snapshots.get(page_hash, ())
            if snapshot and snapshot[0] in self.block_pool.cached:
                self.block_pool.cached.add(snapshot)
        return num_unowned

    def trim(self, owner: str, num_pages: int) -> None:
        """Take from `owner` each group's pages after the first `num_pages`: no token is in them."""
        for held in self._owned[owner]:
            surplus = held.pages[num_pages:]
            del held.pages[num_pages:]
            self.block_pool.give_back(surplus)

    def quarantine(self, owner: str, first: int = 0, only: Collection[int] | None = None) -> int:
        """Release the pages of `owner`, but quarantine each group's from number `first` on that have no other owner,
        and its state. `only`: the pages among these that may be written to; None: all of them.

        Quarantined pages are not used before `end_quarantine(owner)`. Returns how many there are.
        """
        held = self._owned.pop(owner, ())
        state = self.states.by_owner.pop(owner, None)
        alone = [page for each in held for page in each.live(first) if self.block_pool.num_owners[page] == 1]
        alone = alone if only is None else [page for page in alone if page in only]
        if state is not None:
            written = [page for page in state.own if only is None or page in only]
            alone += written
            self.block_pool.give_back([page for page in state.own if page not in written])
            self.block_pool.give_back([page for snapshot in state.shared for page in snapshot])
        tainted = set(alone)
        for each in held:
            self.block_pool.give_back([page for page in each.live() if page not in tainted])
        for page in alone:
            self.block_pool.withdraw(page)  # a remote writer may change the content, so the hash no longer holds
        if alone:
            self._quarantine.setdefault(owner, []).extend(alone)
        return len(alone)

    def end_quarantine(self, owner: str) -> int:
        """Free the quarantined pages of `owner`, whose writer is known to have stopped. Returns how many."""
        pages = self._quarantine.pop(owner, [])
        self.block_pool.free(pages)
        return len(pages)
