"""The owners of KV pages: reference-counted page ids, those in the prefix index, quarantine. Integers only.

Every page is in exactly one state: *free*, *owned* (by one request or more), *cached* (in the prefix index, without an
owner; cached_pages.py has them) or *quarantined* (without an owner, but a remote writer may still
reach it).
Only `release(owner)`, `trim(owner)`, `slide(owner)` and `end_quarantine(owner)` give pages back.

Layers with equal windows share pages: they are a group. An owner has a list of pages for each group; all pages have
the same number of bytes, and any page serves any group.

Where a model has recurrent layers, an owner also has a *state*: some pages that hold what these layers remember of all
tokens so far. A *checkpoint* is the state after a prefix of full pages, in the index under the prefix's hash. No
request writes to it any more, and its pages are evicted together.
"""

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from crossdock.workers.schedule.memory.cached_pages import CachedPages, EvictionPrice
from crossdock.workers.schedule.memory.prefix_index import (
    HOLE,
    PageHash,
    PrefixHit,
    PrefixIndex,
    Window,
    first_visible_page,
)

_STATES = -1  # stands for a group in the pages of states


@dataclass(slots=True)
class _Held:
    """The pages that one owner has for one group."""

    pages: "array[int]"  # as C integers: a step copies them, see `StepInputs.of`
    first: int = 0  # all before this one are holes

    def live(self, first: int = 0) -> "array[int]":
        """Return the pages from number `first` on, without holes."""
        first = max(first, self.first)
        return self.pages[first:] if first else self.pages


@dataclass(slots=True)
class _HeldState:
    """The pages that one owner has for the state of its recurrent layers."""

    own: Sequence[int] = ()  # that no other owner has
    newest: Sequence[int] = ()  # with the state after all scheduled tokens; empty: it is zeros
    shared: list[Sequence[int]] = field(default_factory=list)  # checkpoints that a step has yet to write or read
    used: list[tuple[int, PageHash]] = field(default_factory=list)  # checkpoints, with their pages of prefix; ascending
    last: int = 0  # pages of prefix of the last checkpoint that is read or made
    num_indexed: int = 0  # see `PrefixHit`

    def pages(self) -> list[int]:
        return [*self.own, *(page for checkpoint in self.shared for page in checkpoint)]


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
    ) -> None:
        """Create a pool of free pages of `page_size` tokens each.

        `windows`: of each group of layers. `state_pages`: how many the state of one owner needs.

        Raises:
            ValueError: `num_pages` or `page_size` is below 1.
        """
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be at least 1, not {num_pages} and {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.windows = tuple(windows)
        self.has_windows = any(window is not None for window in self.windows)
        self.state_pages = state_pages
        self._new = range(num_pages)  # free, and never used before
        self._free = deque[int]()  # free, and used before
        self._num_owners = [0] * num_pages
        self._owned: dict[str, tuple[_Held, ...]] = {}  # of each group
        self._states: dict[str, _HeldState] = {}
        self._hash_of: list[PageHash | None] = [None] * num_pages  # by page; None: not indexed
        self._group_of = [0] * num_pages  # by page, as it was last allocated
        self._prefixes = PrefixIndex(self.windows, page_size, has_states=bool(state_pages))
        groups = max(len(self.windows), 1)  # each needs a page for the same tokens
        self.cached = CachedPages(EvictionPrice(num_pages, page_size / groups))  # indexed and unowned
        self._quarantine: dict[str, list[int]] = {}

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Return how many pages `allocate` could hand out now: free ones, and cached ones that can be evicted."""
        return self.num_empty + len(self.cached)

    @property
    def num_empty(self) -> int:
        """Return how many pages `allocate` could hand out before it evicts a cached one."""
        return len(self._new) + len(self._free)

    @property
    def num_groups(self) -> int:
        """Return how many groups of layers have pages of their own."""
        return len(self.windows)

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
        num_pages = sum(self.num_held(owner, group) for group in range(self.num_groups))
        return num_pages + (len(self._states[owner].pages()) if owner in self._states else 0)

    def state_of(self, owner: str) -> Sequence[int]:
        """Return the pages of an owner's state after all scheduled tokens; none where that state is zeros."""
        state = self._states.get(owner)
        return state.newest if state else ()

    def own_state_of(self, owner: str) -> Sequence[int]:
        """Return the pages that an owner may write its state to, in order."""
        return self._states[owner].own

    def num_to_keep_state(self, owner: str) -> int:
        """Return how many new pages a part of `owner` needs to leave the state that it reads as it is."""
        state = self._states.get(owner)
        return self.state_pages if state is not None and state.newest is state.own else 0

    def last_checkpoint_of(self, owner: str) -> int:
        """Return the number of full pages before the last checkpoint that an owner began from or has made; 0: none."""
        return self._states[owner].last

    def num_indexed_of(self, owner: str) -> int:
        """Return the number of pages of the prefix that `owner` found at its start, with or without a state."""
        return self._states[owner].num_indexed

    def has_checkpoint(self, page_hash: PageHash) -> bool:
        """Return whether the state after this prefix is in the index."""
        return page_hash in self._prefixes.checkpoints

    def num_tokens_held(self, owner: str) -> int:
        """Return the end of the tokens for which an owner has pages in every group."""
        held = self._owned.get(owner)
        if not held:
            return 0
        num_pages = min([len(each.pages) for each in held]) if len(held) > 1 else len(held[0].pages)
        return num_pages * self.page_size

    @property
    def num_quarantined(self) -> int:
        """Return how many pages wait until their remote writer is known to have stopped."""
        return sum(map(len, self._quarantine.values()))

    def counts(self) -> PageCounts:
        """Count the pages in each state."""
        free, cached = self.num_empty, len(self.cached)
        owned = sum(1 for owners in self._num_owners if owners)
        return PageCounts(free, owned, cached, self.num_quarantined, self.num_pages)

    def match_prefix(
        self, hashes: Sequence[PageHash], needs_state: bool = True, position: int | None = None
    ) -> PrefixHit:
        """Return the longest indexed prefix of `hashes`, as `PrefixIndex.match` does. No owner changes."""
        return self._prefixes.match(hashes, needs_state, position)

    def can_allocate(self, num_pages: int, shared: Sequence[int] = ()) -> bool:
        """Return whether `num_pages` pages are available beside the pages to share; a shared cached page is used up."""
        return num_pages + sum(1 for page in shared if page in self.cached) <= self.num_available

    def num_freed_by(self, owners: Sequence[str], besides: Sequence[int] = ()) -> int:
        """Return how many pages, `besides` these, would have no owner if all of `owners` released theirs."""
        counts = Counter(page for owner in owners for held in self._owned.get(owner, ()) for page in held.live())
        if self.state_pages:
            counts.update(page for owner in owners if owner in self._states for page in self._states[owner].pages())
        for page in besides:
            counts.pop(page, None)
        return sum(count == self._num_owners[page] for page, count in counts.items())

    def findable(self) -> list[PageHash]:
        """Return the hashes indexed for the first group, in that order: the beginning of a prefix before its end."""
        return list(self._prefixes.by_group[0])

    # -- changing --------------------------------------------------------------------------------------------------

    def take_changes(self) -> tuple[list[PageHash], list[PageHash]]:
        """Return the hashes indexed, and the hashes removed, since the last call, as `PrefixIndex` does."""
        return self._prefixes.take_changes()

    def share(self, owner: str, hit: PrefixHit) -> None:
        """Add `owner`, which has no pages yet, to the owners of a prefix that `match_prefix` has just returned."""
        for page in hit.pages:
            assert self._num_owners[page] or page in self.cached, (
                f"page {page} cannot be shared: it has no owner and is not cached"
            )
            self._num_owners[page] += 1
        self.cached.share(hit.pages)
        self._owned[owner] = tuple(
            _Held(array("i", pages), next((number for number, page in enumerate(pages) if page != HOLE), len(pages)))
            for pages in hit.by_group
        )
        if self.state_pages:
            self._states[owner] = state = _HeldState(newest=hit.checkpoint, num_indexed=hit.num_indexed)
            if hit.checkpoint and (page_hash := self._hash_of[hit.checkpoint[0]]) is not None:
                state.shared.append(hit.checkpoint)
                state.used.append((hit.num_pages, page_hash))
                state.last = hit.num_pages

    def allocate(self, owner: str, num_pages: int, group: int = 0) -> list[int]:
        """Give `owner` so many pages for a group; without free ones, evict cached pages."""
        pages = self._take(num_pages, group)
        if owner not in self._owned:
            self._owned[owner] = tuple(_Held(array("i")) for _ in self.windows)
        self._owned[owner][group].pages.extend(pages)
        return pages

    def _take(self, num_pages: int, group: int) -> list[int]:
        assert num_pages <= self.num_available, f"{num_pages} pages needed, {self.num_available} available"
        pages = [*self._new[:num_pages]]
        self._new = self._new[num_pages:]
        pages += [self._free.popleft() if self._free else self._evict() for _ in range(num_pages - len(pages))]
        for page in pages:
            self._num_owners[page] = 1
            self._group_of[page] = group
        return pages

    # -- changing states -------------------------------------------------------------------------------------------

    def allocate_state(self, owner: str, arrives: bool = False) -> None:
        """Give `owner` its state's pages. `arrives`: a transfer fills them; else the state is as `share` left it."""
        state = self._states.setdefault(owner, _HeldState())
        state.own = array("i", self._take(self.state_pages, _STATES))
        if arrives:
            state.newest = state.own

    def next_state(
        self, owner: str, checkpoint: int = 0, keeps_read: bool = False
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return where the next part of a step reads the state of `owner`, and where it writes the state after it.

        `checkpoint`: the part ends after so many full pages, and writes to new pages, for `index_state`. No part writes
        to the new pages again: the next part reads them and writes to the owner's own pages. 0: no checkpoint.
        `keeps_read`: the part writes to other pages than it reads, for `adopt_state` or `undo_state`.
        """
        state = self._states[owner]
        read = state.newest
        if checkpoint or (keeps_read and read is state.own):
            state.newest = array("i", self._take(self.state_pages, _STATES))
            state.shared.append(state.newest)
            state.last = checkpoint or state.last
        else:
            state.newest = state.own
        return read, state.newest

    def adopt_state(self, owner: str, written: Sequence[int]) -> None:
        """Let the pages that the newest part of `owner` has written be the owner's own; `end_state` frees the others.

        These pages must not be the owner's own ones, nor a checkpoint.
        """
        state = self._states[owner]
        number = next(number for number, shared in enumerate(state.shared) if shared is written)
        state.shared[number], state.own = state.own, written

    def end_state(self, owner: str, read: Sequence[int]) -> None:
        """Note that a part of a step that read this state of `owner` has ended."""
        state = self._states[owner]
        if read is not state.own:
            self._unshare(state, read)

    def index_state(self, owner: str, pages: Sequence[int], hashes: Sequence[PageHash]) -> None:
        """Index a state of `owner` as the checkpoint after the full pages of `hashes`. No part writes to it any more.

        A checkpoint of that prefix that exists already stays.
        """
        if self.enable_prefix_caching and hashes[-1] not in self._prefixes.checkpoints:
            self._prefixes.checkpoints[hashes[-1]] = pages
            for page in pages:
                self._hash_of[page] = hashes[-1]
        self._states[owner].used.append((len(hashes), hashes[-1]))

    def undo_state(self, owner: str, read: Sequence[int], written: Sequence[int]) -> bool:
        """Return to the state that a part of a step read, the newest part; False: it wrote to the same pages."""
        state = self._states[owner]
        if read is written:
            return False
        if written is not state.own:
            self._unshare(state, written)
            state.last = state.used[-1][0] if state.used else 0
        state.newest = read
        return True

    def keep_state(self, owner: str, hashes: Sequence[PageHash]) -> None:
        """Index the newest state of `owner`, which is about to release it, as the checkpoint after these pages."""
        state = self._states.get(owner)
        if state is not None and state.own and state.newest is state.own:
            self.index_state(owner, state.own, hashes)

    def _unshare(self, state: _HeldState, checkpoint: Sequence[int]) -> None:
        """Take a checkpoint from the owner of `state`."""
        for number, shared in enumerate(state.shared):
            if shared is checkpoint:
                del state.shared[number]
                self._give_back(checkpoint)
                break

    def slide(self, owner: str, position: int) -> None:
        """Give back the pages that no token of `owner` from `position` on sees. Indexed ones stay in the index."""
        for held, window in zip(self._owned.get(owner, ()), self.windows, strict=False):
            first = min(first_visible_page(window, position, self.page_size), len(held.pages))
            if first > held.first:
                self._give_back(held.pages[held.first : first])
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

    def index(self, owner: str, hashes: Sequence[PageHash], first: int) -> None:
        """Index the pages of `owner` from number `first` on under `hashes[first:]`. Their content must be written.

        If a page with the same content is indexed already, that page stays in the index.
        """
        if not self.enable_prefix_caching:
            return
        for group, (held, index) in enumerate(zip(self._owned[owner], self._prefixes.by_group, strict=True)):
            for page, page_hash in zip(held.pages[first : len(hashes)], hashes[first:], strict=True):
                if page != HOLE and page_hash not in index and self._hash_of[page] is None:
                    self._prefixes.add(group, page_hash, page)
                    self._hash_of[page] = page_hash

    def release(self, owner: str) -> int:
        """Take all pages from `owner`, and return how many of them have no owner now. Unknown owners have none.

        Indexed pages stay in the index until they are evicted, the ends of prefixes first. A checkpoint goes before the
        pages in front of it: each is useless without the other, and pages behind the last checkpoint are useless.
        """
        groups, state = self._owned.pop(owner, ()), self._states.pop(owner, None)
        num_unowned = 0
        if state is not None:
            num_unowned += self._give_back(state.pages())
            for num_pages, page_hash in reversed(state.used):
                for held in groups:
                    num_unowned += self._give_back(held.live(num_pages))
                    del held.pages[num_pages:]
                checkpoint = self._prefixes.checkpoints.get(page_hash, ())
                if checkpoint and checkpoint[0] in self.cached:
                    self.cached.add(checkpoint)
        return num_unowned + sum(self._give_back(held.live()) for held in groups)

    def trim(self, owner: str, num_pages: int) -> None:
        """Take from `owner` each group's pages after the first `num_pages`: no token is in them."""
        for held in self._owned[owner]:
            surplus = held.pages[num_pages:]
            del held.pages[num_pages:]
            self._give_back(surplus)

    def quarantine(self, owner: str, first: int = 0) -> int:
        """Release the pages of `owner`, but quarantine each group's from number `first` on that have no other owner,
        and its state.

        Quarantined pages are not used before `end_quarantine(owner)`. Returns how many there are.
        """
        held, state = self._owned.pop(owner, ()), self._states.pop(owner, None)
        alone = [page for each in held for page in each.live(first) if self._num_owners[page] == 1]
        if state is not None:
            alone += state.own
            self._give_back([page for checkpoint in state.shared for page in checkpoint])
        tainted = set(alone)
        for each in held:
            self._give_back([page for page in each.live() if page not in tainted])
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
        for page in [page for index in self._prefixes.by_group for page in index.values()]:
            self._forget(page)
        for checkpoint in [*self._prefixes.checkpoints.values()]:
            self._forget(checkpoint[0])
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
        if self._group_of[page] == _STATES:  # the other pages of the checkpoint were last used at the same time
            self._free.extend(self.cached.evict() for _ in range(self.state_pages - 1))
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        """Take a page from the index; of a checkpoint all pages."""
        page_hash, self._hash_of[page] = self._hash_of[page], None
        if page_hash is not None:
            group = self._group_of[page]
            if group == _STATES:
                for other in self._prefixes.checkpoints.pop(page_hash):
                    self._hash_of[other] = None
                return
            self._prefixes.remove(group, page_hash)
