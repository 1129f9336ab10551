"""The cached pages of a pool: the least recently used one is evicted first. What one more eviction costs is learnt."""

from collections import OrderedDict
from collections.abc import Sequence
from math import inf

from crossdock.workers.schedule.cost.cost import StepCost


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
    """The pages that are indexed and have no owner. The page whose last use is longest ago is evicted first."""

    def __init__(self, price: EvictionPrice) -> None:
        self._price = price
        self._now = 0.0
        self._pages: OrderedDict[int, float] = OrderedDict()  # by page: its last use; least recently used first

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: object) -> bool:
        return page in self._pages

    def newest_first(self) -> list[int]:
        """Return the pages, the last used one first."""
        return list(reversed(self._pages))

    def pass_time(self, now: float) -> None:
        """Note the time in seconds: of a step that begins, or has ended."""
        self._now = max(self._now, now)

    def add(self, pages: Sequence[int]) -> None:
        """Keep indexed pages that have lost their last owner, a request. Pages at the end of its prefix come first.

        A cached page may come again: it then counts as used now.
        """
        for page in pages:
            self._pages[page] = self._now
            self._pages.move_to_end(page)

    def share(self, pages: Sequence[int]) -> None:
        """Remove the cached ones among `pages`: a request owns this whole prefix now."""
        for number, page in enumerate(pages):
            used = self._pages.pop(page, None)
            if used is not None:
                self._price.used(number, self._now - used)

    def evict(self) -> int:
        """Let go of one page, and return it. There must be one."""
        page, used = self._pages.popitem(last=False)
        self._price.evicted(self._now - used)
        return page

    def price(self) -> float:
        """Return the seconds of prefill that the eviction of one more page costs, as expected now."""
        oldest = next(iter(self._pages.values()), self._now)
        return self._price.at(self._now - oldest)
