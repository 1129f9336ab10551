"""The cached pages of a pool: the least recently used one is evicted first. What one more eviction costs is learnt."""

from array import array
from collections.abc import Sequence
from math import inf

from crossdock.workers.schedule.cost.cost import StepCost

_NOT_CACHED = -1.0  # as a page's last use: times begin at 0


class EvictionPrice:
    """Learns what the eviction of one more page costs: the seconds to compute it again, or to load it from a tier,
    times the chance that it is used again.

    A page is *old* once it is unused for half of the time after which pages are evicted. Old pages are used again or
    evicted. The price is the seconds saved by old pages that are used again, divided by the number of old pages.
    """

    def __init__(self, num_pages: int, page_tokens: float) -> None:
        """`page_tokens`: of a page, divided by the groups of layers that need a page for the same tokens."""
        self._page_tokens = page_tokens
        self._most = 2.0 * num_pages  # pages that are remembered
        # Seconds of a token, and how much longer the next one takes.
        self._first_token = 0.0
        self._next_token = 0.0
        self._most_context = inf
        self._load_s = inf  # of a page, from a tier that keeps evicted ones
        self._eviction_age = 0.0  # mean seconds from the last use to the eviction
        self._num_evicted = 0.0  # in that mean
        self._num_old = 0.0  # old pages that were used again or evicted
        self._saved_s = 0.0  # by those that were used again

    @property
    def page_seconds(self) -> float:
        """Return the seconds to compute a page again, at least: one at the beginning of a prompt. 0: not known yet."""
        return self._page_tokens * self._first_token

    def learn(self, cost: StepCost, load_s: float = inf) -> None:
        """Note the seconds that the computation of pages costs, and those to load one from a tier below the pool."""
        self._first_token = cost.per_prefill_token
        self._next_token = cost.per_attended
        self._most_context = cost.most_context
        self._load_s = load_s

    def used(self, number: int, age: float) -> None:
        """Count page `number` of a prefix, which is used again after `age` seconds."""
        if self._eviction_age and 2 * age >= self._eviction_age:
            tokens = self._page_tokens
            read = min(tokens * number, self._most_context)
            self._saved_s += min(tokens * (self._first_token + self._next_token * read), self._load_s)
            self._count()

    def evicted(self, age: float) -> None:
        """Count a page that is evicted after `age` seconds without a use."""
        self._num_evicted = min(self._num_evicted + 1, self._most)
        self._eviction_age += (age - self._eviction_age) / self._num_evicted
        self._count()

    def at(self, oldest: float) -> float:
        """Return the price if the next page to be evicted has been unused for `oldest` seconds.

        Beyond the usual time, the chance of a use falls as 1 / age.
        """
        if not self._num_old:
            return 0.0
        return self._saved_s / self._num_old * min(self._eviction_age / oldest if oldest > 0 else 1.0, 1.0)

    def _count(self) -> None:
        self._num_old += 1
        if self._num_old >= self._most:
            self._num_old = self._num_old / 2
            self._saved_s = self._saved_s / 2


class CachedPages:
    """The pages that are indexed and have no owner. The page whose last use is longest ago is evicted first.

    Most pages of a busy pool are cached. So each page has places in arrays, 16 bytes in all, where an `OrderedDict`
    takes 130: the pages are a ring in order of their last use, whose ends meet at the number behind all pages.
    """

    def __init__(self, price: EvictionPrice, num_pages: int) -> None:
        """`num_pages`: of the pool, numbered from 0 on."""
        self._price = price
        self._now = 0.0
        self._num = 0
        self._end = num_pages
        self._used = array("d", [_NOT_CACHED]) * num_pages  # by page: its last use, in seconds
        self._newer = array("i", [num_pages]) * (num_pages + 1)  # by page; behind all pages: the oldest one
        self._older = array("i", [num_pages]) * (num_pages + 1)  # by page; behind all pages: the newest one

    def __len__(self) -> int:
        return self._num

    def __contains__(self, page: int) -> bool:
        return self._used[page] != _NOT_CACHED

    def newest_first(self) -> list[int]:
        """Return the pages, the last used one first."""
        pages = list[int]()
        page = self._older[self._end]
        while page != self._end:
            pages.append(page)
            page = self._older[page]
        return pages

    def pass_time(self, now: float) -> None:
        """Note the time in seconds: of a step that begins, or has ended."""
        self._now = max(self._now, now)

    def add(self, pages: Sequence[int]) -> None:
        """Keep indexed pages that have lost their last owner, a request. Pages at the end of its prefix come first.

        A cached page may come again: it then counts as used now.
        """
        used, newer, older = self._used, self._newer, self._older
        for page in pages:
            if used[page] != _NOT_CACHED:
                self._remove(page)
            newest = older[self._end]
            used[page] = self._now
            older[page] = newest
            newer[page] = self._end
            newer[newest] = page
            older[self._end] = page
        self._num += len(pages)

    def share(self, pages: Sequence[int]) -> None:
        """Remove the cached ones among `pages`: a request owns this whole prefix now."""
        for number, page in enumerate(pages):
            used = self._used[page]
            if used != _NOT_CACHED:
                self._remove(page)
                self._price.used(number, self._now - used)

    def evict(self) -> int:
        """Let go of one page, and return it. There must be one."""
        page = self._newer[self._end]
        used = self._used[page]
        self._remove(page)
        self._price.evicted(self._now - used)
        return page

    def price(self) -> float:
        """Return the seconds of prefill that the eviction of one more page costs, as expected now."""
        oldest = self._used[self._newer[self._end]] if self._num else self._now
        return self._price.at(self._now - oldest)

    def _remove(self, page: int) -> None:
        """Take a cached page out of the ring."""
        newer, older = self._newer[page], self._older[page]
        self._older[newer] = older
        self._newer[older] = newer
        self._used[page] = _NOT_CACHED
        self._num -= 1
