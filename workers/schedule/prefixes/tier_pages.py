"""The pages in tiers below a pool, and whether one more is worth storing: a policy in seconds.

A page is stored when it is evicted, if the seconds to compute it, times the share of evicted pages that were wanted
again, exceed the seconds to store it and to load it again. All of these are counted or measured.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple, TypeAlias

from crossdock.workers.schedule.memory.page_events import PageEvents
from crossdock.workers.schedule.memory.prefix_index import HashChanges
from crossdock.workers.schedule.request.page_hashes import PageHash

_MOST_REMEMBERED = 1 << 17  # evicted pages that may still be wanted again: 16 MB of hashes
_MOST_COUNTED = 4096.0  # evictions in the share of those that were wanted again: older ones count less
_MOST_REPORTED = 1 << 16  # pages of a tier that a router hears of at once, the newest: 1.6 MB of hashes
_WEIGHT = 0.1  # of one more measurement in a mean
_MOST_TIMES = 10.0  # the mean before, which one measurement counts at most: a volume that hung once is used again


TierName: TypeAlias = Literal["host", "files"]


class PageKey(NamedTuple):
    """Names the content of a page of one group of layers; group `STATES` is a snapshot, of one page or more."""

    group: int
    page_hash: PageHash


class ReturnShare:
    """Counts the share of evicted pages that a request wants again, whether or not these were stored."""

    def __init__(self) -> None:
        self._gone: OrderedDict[PageHash, None] = OrderedDict()  # evicted, oldest first
        # As if half of two pages had returned.
        self._num_evicted = 2.0
        self._num_returned = 1.0

    @property
    def share(self) -> float:
        return self._num_returned / self._num_evicted

    def evicted(self, page_hash: PageHash) -> None:
        self._gone[page_hash] = None
        if len(self._gone) > _MOST_REMEMBERED:
            self._gone.popitem(last=False)
        self._num_evicted += 1
        if self._num_evicted > _MOST_COUNTED:
            self._num_evicted = self._num_evicted / 2
            self._num_returned = self._num_returned / 2

    def wanted(self, hashes: Iterable[PageHash]) -> None:
        """Count the pages that a request lacks in the pool."""
        for page_hash in hashes:
            if page_hash in self._gone:
                del self._gone[page_hash]
                self._num_returned = min(self._num_returned + 1, self._num_evicted)


@dataclass(slots=True)
class PageTier:
    """The pages of one tier, and the measured seconds of a page on its way there and back."""

    name: TierName
    store_s: float
    load_s: float
    pages: dict[PageKey, None] = field(default_factory=dict)
    num_stores: int = 0  # pages, since the start
    num_loads: int = 0
    num_misses: int = 0  # loads of pages that were lost or wrong
    changes: HashChanges = field(default_factory=HashChanges)  # of the first group of layers, as of a pool
    _events: PageEvents | None = None  # of the first group too; None: no process outside the cluster reads them

    def announce_in(self, events: PageEvents) -> None:
        """Have the events of the pages taken down from now on, after those of the newest pages that lie here."""
        self._events = events
        for page_hash in self.findable():
            events.tiered(page_hash, self.name)

    def hold(self, keys: Iterable[PageKey]) -> None:
        """Note pages that lie here now, stored by this replica or by another."""
        for key in keys:
            if key not in self.pages:
                self.pages[key] = None
                if not key.group:
                    self.changes.note([key.page_hash], came=True)
                    if self._events is not None:
                        self._events.tiered(key.page_hash, self.name)

    def drop(self, keys: Iterable[PageKey]) -> None:
        """Note pages that do not lie here any more."""
        for key in keys:
            if key in self.pages:
                del self.pages[key]
                if not key.group:
                    self.changes.note([key.page_hash], came=False)
                    if self._events is not None:
                        self._events.removed(key.page_hash, self.name)

    def findable(self) -> list[PageHash]:
        """Return the hashes of the pages of the first group that came last, the newest at the end."""
        return [key.page_hash for key in self.pages if not key.group][-_MOST_REPORTED:]

    def stored(self, key: PageKey, seconds: float | None) -> None:
        """Note a page that lies here now, and the seconds that storing it took; None: `took` tells them later."""
        self.hold([key])
        self.num_stores += 1
        if seconds is not None:
            self.took(seconds)

    def took(self, seconds: float) -> None:
        """Note the seconds that storing a page took."""
        self.store_s = _learnt(self.store_s, seconds)

    def loaded(self, num_pages: int, seconds: float) -> None:
        """Note that so many pages were loaded, in `seconds` all together."""
        self.num_loads += num_pages
        self.load_s = _learnt(self.load_s, seconds / num_pages)

    def lost(self, key: PageKey) -> None:
        """Note a page that could not be loaded: it was deleted, or is not what was stored."""
        self.num_misses += 1
        self.drop([key])


class TierCounts(NamedTuple):
    """The counts of one tier: its pages and bytes now, and its pages since the start."""

    name: str
    pages: int
    bytes: int
    stored: int
    loaded: int
    missed: int  # were to be loaded, and were lost, or were not what was stored


@dataclass(slots=True)
class TierPages:
    """The tiers below one pool, fastest first."""

    tiers: Sequence[PageTier] = ()
    returns: ReturnShare = field(default_factory=ReturnShare)

    @property
    def page_s(self) -> float:
        """Return the seconds to load a page from the fastest tier; infinity without tiers."""
        return min([tier.load_s for tier in self.tiers], default=inf)

    def worth_storing(self, key: PageKey, compute_s: float) -> list[PageTier]:
        """Return the tiers that lack a page and in which the page is worth its bytes.

        `compute_s`: seconds to compute the page again; 0: not known, and every page is stored."""
        gained = compute_s or inf
        share = self.returns.share
        return [tier for tier in self.tiers if key not in tier.pages and share * (gained - tier.load_s) > tier.store_s]

    def holder(self, key: PageKey) -> PageTier | None:
        """Return the fastest tier that has a page; None: none has it."""
        return next((tier for tier in self.tiers if key in tier.pages), None)


def _learnt(mean: float, measured: float) -> float:
    """Return a mean of seconds with one more measurement."""
    return mean + (min(measured, _MOST_TIMES * mean) - mean) * _WEIGHT
