"""The owners of states: which pages hold what an owner's recurrent layers remember of all its tokens so far.

A *snapshot* is the state after a prefix of full pages, in the index under the prefix's hash. No request writes to it
any more, and its pages are evicted together.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from crossdock.workers.schedule.memory.block_pool import STATES, BlockPool
from crossdock.workers.schedule.memory.prefix_index import PrefixHit
from crossdock.workers.schedule.request.page_hashes import PageHash


@dataclass(slots=True)
class HeldState:
    """The pages that one owner has for the state of its recurrent layers."""

    own: Sequence[int] = ()  # pages that no other owner has
    newest: Sequence[int] = ()  # with the state after all scheduled tokens; empty: it is zeros
    shared: list[Sequence[int]] = field(default_factory=list)  # snapshots that a step has yet to write or read
    used: list[tuple[int, PageHash]] = field(default_factory=list)  # snapshots, with their pages of prefix; ascending
    last: int = 0  # full pages before the last snapshot that the owner began from or has made; 0: none
    num_indexed: int = 0  # see `PrefixHit`

    def pages(self) -> list[int]:
        return [*self.own, *(page for snapshot in self.shared for page in snapshot)]


class OwnedStates:
    """The states of a pool's owners. In a pool whose model has no recurrent layers, no owner has one."""

    def __init__(self, block_pool: BlockPool, state_pages: int, enable_prefix_caching: bool) -> None:
        """`state_pages`: how many pages the state of one owner needs."""
        self._block_pool = block_pool
        self._state_pages = state_pages
        self._enable_prefix_caching = enable_prefix_caching
        self.by_owner: dict[str, HeldState] = {}

    def newest(self, owner: str) -> Sequence[int]:
        """Return the pages of an owner's state after all scheduled tokens; none where that state is zeros."""
        state = self.by_owner.get(owner)
        return state.newest if state else ()

    def num_to_keep(self, owner: str) -> int:
        """Return how many new pages a part of `owner` needs to leave the state that it reads as it is."""
        state = self.by_owner.get(owner)
        return self._state_pages if state is not None and state.newest is state.own else 0

    def share(self, owner: str, hit: PrefixHit) -> None:
        """Let the state of `owner`, which has none yet, be the snapshot of this prefix, or else zeros."""
        self.by_owner[owner] = state = HeldState(newest=hit.snapshot, num_indexed=hit.num_indexed)
        if hit.snapshot and (page_hash := self._block_pool.hash_of[hit.snapshot[0]]) is not None:
            state.shared.append(hit.snapshot)
            state.used.append((hit.num_pages, page_hash))
            state.last = hit.num_pages

    def allocate(self, owner: str, arrives: bool = False) -> None:
        """Give `owner` its state's pages. `arrives`: a transfer fills them; else the state is as `share` left it."""
        state = self.by_owner.setdefault(owner, HeldState())
        state.own = array("i", self._block_pool.take(self._state_pages, STATES))
        if arrives:
            state.newest = state.own

    def next(self, owner: str, snapshot: int = 0, keeps_read: bool = False) -> tuple[Sequence[int], Sequence[int]]:
        """Return where the next part of a step reads the state of `owner`, and where it writes the state after it.

        `snapshot`: the part ends after so many full pages, and writes to new pages, for `index`. No part writes
        to the new pages again: the next part reads them and writes to the owner's own pages. 0: no snapshot.
        `keeps_read`: the part writes to other pages than it reads, for `adopt` or `undo`.
        """
        state = self.by_owner[owner]
        read = state.newest
        if snapshot or (keeps_read and read is state.own):
            state.newest = array("i", self._block_pool.take(self._state_pages, STATES))
            state.shared.append(state.newest)
            state.last = snapshot or state.last
        else:
            state.newest = state.own
        return read, state.newest

    def adopt(self, owner: str, written: Sequence[int]) -> None:
        """Let the pages that the newest part of `owner` has written be the owner's own; `end_read` frees the others.

        These pages must not be the owner's own ones, nor a snapshot.
        """
        state = self.by_owner[owner]
        number = next(number for number, shared in enumerate(state.shared) if shared is written)
        state.shared[number] = state.own
        state.own = written

    def end_read(self, owner: str, read: Sequence[int]) -> None:
        """Note that a part of a step that read this state of `owner` has ended."""
        state = self.by_owner[owner]
        if read is not state.own:
            self._unshare(state, read)

    def index(self, owner: str, pages: Sequence[int], hashes: Sequence[PageHash]) -> None:
        """Index a state of `owner` as the snapshot after the full pages of `hashes`. No part writes to it any more.

        A snapshot of that prefix that exists already stays.
        """
        snapshots = self._block_pool.prefixes.snapshots
        if self._enable_prefix_caching and hashes[-1] not in snapshots:
            snapshots[hashes[-1]] = pages
            for page in pages:
                self._block_pool.hash_of[page] = hashes[-1]
        self.by_owner[owner].used.append((len(hashes), hashes[-1]))

    def undo(self, owner: str, read: Sequence[int], written: Sequence[int]) -> bool:
        """Return to the state that a part of a step read, the newest part; False: it wrote to the same pages."""
        state = self.by_owner[owner]
        if read is written:
            return False
        if written is not state.own:
            self._unshare(state, written)
            state.last = state.used[-1][0] if state.used else 0
        state.newest = read
        return True

    def keep(self, owner: str, hashes: Sequence[PageHash]) -> None:
        """Index the newest state of `owner`, which is about to release it, as the snapshot after these pages."""
        state = self.by_owner.get(owner)
        if state is not None and state.own and state.newest is state.own:
            self.index(owner, state.own, hashes)

    def _unshare(self, state: HeldState, snapshot: Sequence[int]) -> None:
        """Take a snapshot from the owner of `state`."""
        for number, shared in enumerate(state.shared):
            if shared is snapshot:
                del state.shared[number]
                self._block_pool.give_back(snapshot)
                break
