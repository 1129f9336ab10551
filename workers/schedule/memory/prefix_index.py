"""Which pages hold which prefixes: an index of page hashes for each group of layers, and of snapshots of states."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from crossdock.workers.schedule.memory.page_events import PageEvents
from crossdock.workers.schedule.request.page_hashes import PageHash

HOLE = -1
"""Stands in a list of pages for a page that no token to come can see."""

MISSING = -2
"""Stands in a list of pages for a page that is not in the pool yet."""


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """A window that does not slide: a sequence is divided into ranges of `tokens`, and a token sees its own range."""

    tokens: int


Window: TypeAlias = int | AttentionChunk | None
"""What a layer sees up to the newest token: so many tokens, that token included; an attention chunk; None: all."""


def most_visible(window: int | AttentionChunk) -> int:
    """Return how many tokens a layer with this window sees at most."""
    return window.tokens if isinstance(window, AttentionChunk) else window


def first_visible_page(window: Window, position: int, page_size: int) -> int:
    """Return the number of the first page that the token at `position` sees."""
    if window is None:
        return 0
    if isinstance(window, AttentionChunk):
        return position // window.tokens * window.tokens // page_size
    return max(0, position - window + 1) // page_size


class PrefixHit(NamedTuple):
    """The longest prefix that every group can continue from."""

    num_pages: int  # of each group, holes included: the prefix has as many times page_size tokens
    by_group: tuple[Sequence[int], ...]  # HOLE: the group's window has passed that page
    snapshot: Sequence[int] = ()  # the state after the prefix, where the pool has states
    num_indexed: int = 0  # pages of the longest prefix that all groups can continue from, with or without a state

    @property
    def pages(self) -> list[int]:
        """Return the pages of all groups and of the state, without holes."""
        return [page for pages in (*self.by_group, self.snapshot) for page in pages if page >= 0]


class HashChanges:
    """Page hashes that have come and gone since the last look. One that came and went between two looks is in neither
    list, so that the lists stay shorter than what they tell of, even without a look."""

    def __init__(self) -> None:
        self._changes: dict[PageHash, bool] = {}  # True: it came, False: it went

    def note(self, page_hashes: Iterable[PageHash], *, came: bool) -> None:
        for page_hash in page_hashes:
            if self._changes.pop(page_hash, came) is came:  # else the page is as it was at the last look
                self._changes[page_hash] = came

    def take(self) -> tuple[list[PageHash], list[PageHash]]:
        """Return the hashes that came, in order, and those that went."""
        changes = self._changes
        self._changes = {}
        return [each for each, came in changes.items() if came], [each for each, came in changes.items() if not came]


class PrefixIndex:
    """The indexed pages of a pool by the prefix that they end, for each group of layers, and its snapshots."""

    def __init__(
        self, windows: Sequence[Window], page_size: int, has_states: bool, events: PageEvents | None = None
    ) -> None:
        """`windows`: of each group of layers. `has_states`: recurrent layers need a snapshot at the end of a hit.
        `events`: takes down what happens to pages; None: no process outside the cluster reads that."""
        self._windows = tuple(windows)
        self._page_size = page_size
        self._has_states = has_states
        self._has_windows = any(window is not None for window in windows)
        self.by_group: tuple[dict[PageHash, int], ...] = tuple({} for _ in windows)
        self.snapshots: dict[PageHash, Sequence[int]] = {}  # the pages of each
        self.changes = HashChanges()  # of the first group, which has no window if any has none
        self.events = events

    def add(self, group: int, pages: Mapping[PageHash, int]) -> None:
        """Index pages of a group that has no pages of these hashes."""
        self.by_group[group].update(pages)
        if not group:
            self.changes.note(pages, came=True)

    def remove(self, group: int, page_hash: PageHash) -> None:
        """Take the page of a group from the index."""
        del self.by_group[group][page_hash]
        if not group:
            self.changes.note([page_hash], came=False)
            if self.events is not None:
                self.events.removed(page_hash)

    def findable(self) -> list[PageHash]:
        """Return the hashes indexed for the first group, in that order: the beginning of a prefix before its end."""
        return list(self.by_group[0])

    def match(self, hashes: Sequence[PageHash], needs_state: bool = True, position: int | None = None) -> PrefixHit:
        """Return the longest indexed prefix of `hashes` that every group can continue from.

        A group without a window needs all its pages. A group with one needs those that the next token sees. Recurrent
        layers need a snapshot at the end. Where another replica computes what follows, `needs_state` is False, and
        the first token that is computed here is the one at `position`; None: the one after the prefix.
        """
        if len(self._windows) == 1 and not (self._has_windows or self._has_states):  # short: asked in each step
            pages = self._run(hashes, 0)
            return PrefixHit(len(pages), (pages,), (), len(pages))
        return self._match_groups(hashes, needs_state, position)

    def _match_groups(self, hashes: Sequence[PageHash], needs_state: bool, position: int | None) -> PrefixHit:
        """Return `match` for several groups of layers, windows or recurrent layers."""
        found = list[list[int]]()
        num_pages = len(hashes)
        for group, window in enumerate(self._windows):
            if window is None:
                found.append(self._run(hashes[:num_pages], group))
            else:
                found.append([self.by_group[group].get(page_hash, HOLE) for page_hash in hashes[:num_pages]])
            num_pages = len(found[-1])
        num_pages = num_indexed = self._without_gap(found, num_pages, position)
        while needs_state and (shorter := self._last_snapshot(hashes, num_pages)) < num_pages:
            num_pages = self._without_gap(found, shorter, position)
        firsts = [self._first(group, num_pages, position) for group in range(len(found))]
        by_group = ([HOLE] * first + pages[first:num_pages] for first, pages in zip(firsts, found, strict=True))
        return PrefixHit(num_pages, tuple(by_group), self._snapshot(hashes, num_pages, needs_state), num_indexed)

    def parts(self, hashes: Sequence[PageHash]) -> PrefixHit:
        """Return the indexed pages of a prefix, and `MISSING` for each further page that a hit of all would need."""
        by_group = list[list[int]]()
        for group, index in enumerate(self.by_group):
            first = self._first(group, len(hashes))
            by_group.append([HOLE] * first + [index.get(page_hash, MISSING) for page_hash in hashes[first:]])
        return PrefixHit(len(hashes), tuple(by_group), self.snapshots.get(hashes[-1], ()))

    def _without_gap(self, found: Sequence[Sequence[int]], num_pages: int, position: int | None) -> int:
        """Return the longest prefix of up to `num_pages` pages for which the groups with windows lack no page."""
        while num_pages and (gap := self._last_gap(found, num_pages, position)) is not None:
            num_pages = gap  # a longer prefix would need the missing page as well
        return num_pages

    def _last_snapshot(self, hashes: Sequence[PageHash], num_pages: int) -> int:
        """Return the pages of the longest prefix of up to `num_pages` that has a snapshot; all if none is needed."""
        while self._has_states and num_pages and hashes[num_pages - 1] not in self.snapshots:
            num_pages -= 1
        return num_pages

    def _snapshot(self, hashes: Sequence[PageHash], num_pages: int, needs_state: bool = True) -> Sequence[int]:
        """Return the state after so many pages of a prefix; none where no state is needed."""
        return self.snapshots[hashes[num_pages - 1]] if self._has_states and needs_state and num_pages else ()

    def _run(self, hashes: Sequence[PageHash], group: int) -> list[int]:
        """Return the pages of a group for `hashes`, up to the first that it lacks."""
        pages = list[int]()
        index = self.by_group[group]
        for page_hash in hashes:
            page = index.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def _last_gap(self, found: Sequence[Sequence[int]], num_pages: int, position: int | None) -> int | None:
        """Return the last page, of `num_pages`, that the token at `position` sees and a group with a window lacks.
        `position` None: the token after these pages."""
        gaps = (
            page
            for group, pages in enumerate(found)
            if self._windows[group] is not None
            for page in range(self._first(group, num_pages, position), num_pages)
            if pages[page] == HOLE
        )
        return max(gaps, default=None)

    def _first(self, group: int, num_pages: int, position: int | None = None) -> int:
        """Return the first of `num_pages` full pages that the token at `position` sees; None: the token after them."""
        position = num_pages * self._page_size if position is None else position
        return min(first_visible_page(self._windows[group], position, self._page_size), num_pages)
