"""The cached pages of a pool, and which of them is evicted first: the least recently used one, or the one of least
value.

The *value* of a page is the seconds of prefill that a hit on it saves, times the chance of a hit per second that the
page is kept. All pages have the same bytes. A page is useless without the pages before it, so only the ends of
prefixes are compared. returns.py learns the chance, for sessions of a first turn, a second one and so on.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple, Protocol, TypeAlias

from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.memory.prefix_index import Window
from crossdock.workers.schedule.memory.returns import UNSEEN, Hints, Returns, chance_at, chances

PrefixEviction: TypeAlias = Literal["lru", "value"]

_MOST_TURNS = 4  # sessions of so many turns and more are one class
_REFRESH = 16  # observations, after which the chances are computed again
_LEAST_HEAP = 64  # entries that no heap is worth searching for old ones
_NUM_DEPTHS = 24  # powers of two of pages before a page
_NUM_KINDS = (_MOST_TURNS + 1) * _NUM_DEPTHS  # of sessions with one label


class ReturnHint(NamedTuple):
    """A client's announcement that its session returns: evidence, believed as far as such hints have come true."""

    tenant: str
    seconds: float  # within which it returns


NO_HINT = ReturnHint("", 0.0)


class Retention(Protocol):
    """The cached pages: those that are indexed and have no owner."""

    def __len__(self) -> int: ...

    def __contains__(self, page: object) -> bool: ...

    def pass_time(self, now: float) -> None:
        """Note the time in seconds: of a step that begins, or has ended."""

    def learn(self, cost: StepCost) -> None:
        """Note what the computation of pages costs."""

    def index(self, page: int, parent: int | None) -> None:
        """Note that an owned page is indexed now. `parent`: the page before it in its prefix."""

    def forget(self, page: int) -> None:
        """Note that a page, which is not cached any more, is not indexed any more."""

    def add(self, pages: Sequence[int], hint: ReturnHint = NO_HINT) -> None:
        """Keep indexed pages that have lost their last owner, a request. The end of its prefix is first.

        A cached page may come again: it then counts as used now.
        """

    def share(self, pages: Sequence[int]) -> None:
        """Let go of those of `pages` that are cached: a request owns this whole prefix now."""

    def evict(self) -> int:
        """Let go of one page, and return it. There must be one."""

    def price(self) -> float:
        """Return the seconds of prefill that the eviction of one more page costs, as expected now."""


class EvictionPrice:
    """Learns what the eviction of one more page costs: the seconds of prefill that it saves, times the chance that it
    is used again.

    A page is *old* once it is unused for half of the time after which pages are evicted. Old pages are used again or
    evicted. The price is the seconds saved by the former, per page of both.
    """

    def __init__(self, num_pages: int = 1, page_tokens: float = 1.0) -> None:
        """`page_tokens`: of a page, divided by the groups of layers that need a page for the same tokens."""
        self._page_tokens = page_tokens
        self._most = 2.0 * num_pages  # pages that are remembered
        self._first_token, self._next_token = 0.0, 0.0  # seconds of a token, and how much longer the next one takes
        self._eviction_age = 0.0  # mean seconds from the last use to the eviction
        self._num_evicted = 0.0  # in that mean
        self._num_old = 0.0  # that were used again or evicted
        self._saved_s = 0.0  # by those that were used again

    def learn(self, cost: StepCost) -> None:
        self._first_token, self._next_token = cost.per_prefill_token, cost.per_attended

    def used(self, number: int, age: float) -> None:
        """Count page `number` of a prefix, which is used again after `age` seconds."""
        if self._eviction_age and 2 * age >= self._eviction_age:
            tokens = self._page_tokens
            self._saved_s += tokens * (self._first_token + self._next_token * tokens * number)
            self._count()

    def evicted(self, age: float) -> None:
        """Count a page that is evicted after `age` seconds without a use."""
        self._num_evicted = min(self._num_evicted + 1, self._most)
        self._eviction_age += (age - self._eviction_age) / self._num_evicted
        self._count()

    def at(self, oldest: float) -> float:
        """Return the price if the next page to be evicted has been unused for `oldest` seconds.

        Beyond the usual time the chance of a use falls with one over the age.
        """
        if not self._num_old:
            return 0.0
        return self._saved_s / self._num_old * min(self._eviction_age / oldest if oldest > 0 else 1.0, 1.0)

    def _count(self) -> None:
        self._num_old += 1
        if self._num_old >= self._most:
            self._num_old, self._saved_s = self._num_old / 2, self._saved_s / 2


class LeastRecentlyUsed:
    """Evicts the page whose last use is longest ago."""

    def __init__(self, price: EvictionPrice | None = None) -> None:
        self._price = price if price is not None else EvictionPrice()
        self._now = 0.0
        self._pages: OrderedDict[int, float] = OrderedDict()  # by page: its last use; least recently used first

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page: object) -> bool:
        return page in self._pages

    def pass_time(self, now: float) -> None:
        self._now = max(self._now, now)

    def learn(self, cost: StepCost) -> None:
        self._price.learn(cost)

    def index(self, page: int, parent: int | None) -> None:
        """Do nothing: a page counts from its release."""

    def forget(self, page: int) -> None:
        """Do nothing: the page has been let go before."""

    def add(self, pages: Sequence[int], hint: ReturnHint = NO_HINT) -> None:
        for page in pages:
            self._pages[page] = self._now
            self._pages.move_to_end(page)

    def share(self, pages: Sequence[int]) -> None:
        for number, page in enumerate(pages):
            used = self._pages.pop(page, None)
            if used is not None:
                self._price.used(number, self._now - used)

    def evict(self) -> int:
        page, used = self._pages.popitem(last=False)
        self._price.evicted(self._now - used)
        return page

    def price(self) -> float:
        oldest = next(iter(self._pages.values()), self._now)
        return self._price.at(self._now - oldest)


class LeastValuable:
    """Evicts the page of least value among the ends of prefixes. Each call takes logarithmic time in the pages."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._price = EvictionPrice(num_pages, page_size)
        self._page_size = page_size
        self._now = 0.0
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._used = array("d", [0.0]) * num_pages  # time of the last release
        self._depth = array("i", [0]) * num_pages  # pages before it
        self._parent = array("i", [-1]) * num_pages
        self._life = array("q", [0]) * num_pages  # how often it was indexed or forgotten: a child's parent may be gone
        self._parent_life = array("q", [0]) * num_pages
        self._num_children = array("i", [0]) * num_pages  # indexed pages after it
        self._turn = bytearray(num_pages)  # of the session that computed it, by how often prefixes before it were used
        self._is_shared_end = bytearray(num_pages)  # a request has begun with the prefix that ends here
        self._is_first_new = bytearray(num_pages)  # a request computed it after such a prefix
        self._is_watched = bytearray(num_pages)  # it is the first new page of the turn that was released last
        self._kind = array("i", [0]) * num_pages  # of the session that released it last: its label, turn and depth
        self._hints = Hints(num_pages)
        self._returns: dict[int, Returns] = {}  # by kind
        self._label_returns: dict[int, Returns] = {}  # by label, of those with a hint
        self._all_returns = Returns()
        self._chances: dict[int, list[float]] = {}  # by kind
        self._label_chances: dict[int, list[float]] = {}  # by label, of kinds without observations
        self._unknown = chances(UNSEEN)  # of kinds without observations
        self._num_new = 0  # observations since the chances were computed
        self._page_seconds = [1.0] * _NUM_DEPTHS  # of computing a page, by depth
        self._ends: dict[tuple[int, int], list[tuple[float, int]]] = {}  # heaps of (last use, page), by kind and depth
        self._current: tuple[tuple[int, int], float] | None = None  # heap and last use of the prefix evicted last

    def __len__(self) -> int:
        return len(self._cached)

    def __contains__(self, page: object) -> bool:
        return page in self._cached

    def pass_time(self, now: float) -> None:
        self._now = max(self._now, now)

    def learn(self, cost: StepCost) -> None:
        self._price.learn(cost)
        size = self._page_size
        middles = [size * 1.5 * 2 ** (number - 1) for number in range(_NUM_DEPTHS)]
        self._page_seconds = [size * (cost.per_prefill_token + cost.per_attended * middle) for middle in middles]

    def index(self, page: int, parent: int | None) -> None:
        self._life[page] += 1
        self._num_children[page] = self._is_watched[page] = self._is_shared_end[page] = 0
        self._parent[page] = -1 if parent is None else parent
        if parent is None:
            self._depth[page] = self._turn[page] = 0
            self._is_first_new[page] = 1
            return
        self._parent_life[page] = self._life[parent]
        self._num_children[parent] += 1
        self._depth[page] = self._depth[parent] + 1
        self._is_first_new[page] = self._is_shared_end[parent]
        self._turn[page] = min(self._turn[parent] + self._is_shared_end[parent], _MOST_TURNS)

    def forget(self, page: int) -> None:
        self._life[page] += 1
        parent = self._parent[page]
        if parent >= 0 and self._life[parent] == self._parent_life[page]:
            self._num_children[parent] -= 1
            if not self._num_children[parent] and parent in self._cached:
                self._push(parent)

    def add(self, pages: Sequence[int], hint: ReturnHint = NO_HINT) -> None:
        if not pages:
            return
        label = self._hints.label(hint.tenant, hint.seconds, len(pages)) if hint.seconds else 0
        kind = label * _NUM_KINDS + self._turn[pages[0]] * _NUM_DEPTHS + self._depth_of(pages[0]) // 2
        for page in pages:
            self._cached[page] = None
            self._used[page], self._kind[page] = self._now, kind
            if not self._num_children[page]:
                self._push(page)
        first = next((page for page in pages if self._is_first_new[page]), None)
        if first is not None:
            self._is_watched[first] = 1

    def share(self, pages: Sequence[int]) -> None:
        for number, page in enumerate(pages):
            if page in self._cached:
                self._let_go(page)
                self._price.used(number, self._now - self._used[page])
            if self._is_watched[page]:
                self._observe(page, has_returned=True)
        if pages:
            self._is_shared_end[pages[-1]] = 1

    def evict(self) -> int:
        page = self._pop_end()
        if page is None:  # every cached page has an owned page after it, which another copy of it precedes
            page = next(iter(self._cached))
        self._let_go(page)
        self._price.evicted(self._now - self._used[page])
        if self._is_watched[page]:
            self._observe(page, has_returned=False)
        return page

    def price(self) -> float:
        return self._price.at(0.0)

    def _chances_of_label(self, label: int) -> list[float]:
        """Return the chances of a label's kinds that have no observations."""
        if label and label not in self._label_chances:
            self._label_chances[label] = chances(self._hints.prior(label, self._all_returns.hazards(UNSEEN)))
        return self._label_chances[label] if label else self._unknown

    def _let_go(self, page: int) -> None:
        del self._cached[page]
        self._hints.let_go(self._kind[page] // _NUM_KINDS)

    def _push(self, page: int) -> None:
        key = self._kind[page], self._depth_of(page)
        heap = self._ends.setdefault(key, [])
        heappush(heap, (self._used[page], page))
        if len(heap) > 2 * len(self._cached) + _LEAST_HEAP:  # mostly entries of pages that were used again
            heap[:] = {entry for entry in heap if self._is_end(*entry)}
            heapify(heap)

    def _is_end(self, used: float, page: int) -> bool:
        """Return whether a heap's entry still is the end of a prefix."""
        return page in self._cached and not self._num_children[page] and self._used[page] == used

    def _depth_of(self, page: int) -> int:
        return min(self._depth[page].bit_length(), _NUM_DEPTHS - 1)

    def _pop_end(self) -> int | None:
        """Remove and return the end of least value; None if there is no end."""
        if self._current is not None:  # the rest of the prefix evicted last has nearly the same value
            key, used = self._current
            head = self._head(key)
            if head is None or head[0] != used:
                self._current = None
        if self._current is None:
            self._current = self._cheapest()
        if self._current is None:
            return None
        return heappop(self._ends[self._current[0]])[1]

    def _cheapest(self) -> tuple[tuple[int, int], float] | None:
        if self._num_new >= _REFRESH:
            self._num_new = 0
            self._learn_chances()
        best, least = None, 0.0
        for key in [*self._ends]:
            head = self._head(key)
            if head is None:
                del self._ends[key]
            else:
                kind, depth = key
                by_age = self._chances.get(kind) or self._chances_of_label(kind // _NUM_KINDS)
                value = self._page_seconds[depth] * chance_at(by_age, self._now - head[0])
                if best is None or value < least:
                    best, least = (key, head[0]), value
        return best

    def _head(self, key: tuple[int, int]) -> tuple[float, int] | None:
        """Return the end of that kind and depth whose last use is longest ago, after the removal of what is no end."""
        heap = self._ends[key]
        while heap:
            if self._is_end(*heap[0]):
                return heap[0]
            heappop(heap)
        return None

    def _observe(self, page: int, has_returned: bool) -> None:
        self._is_watched[page] = 0
        kind = self._kind[page]
        observed = [self._returns.setdefault(kind, Returns())]
        if label := kind // _NUM_KINDS:
            observed.append(self._label_returns.setdefault(label, Returns()))
        else:
            observed.append(self._all_returns)
        for returns in observed:
            returns.observe(self._now - self._used[page], has_returned)
        self._num_new += 1

    def _learn_chances(self) -> None:
        priors = {0: self._all_returns.hazards(UNSEEN)}
        self._unknown = chances(priors[0])
        for label, returns in self._label_returns.items():
            priors[label] = returns.hazards(self._hints.prior(label, priors[0]))
            self._label_chances[label] = chances(priors[label])
        self._chances = {
            kind: chances(returns.hazards(priors[kind // _NUM_KINDS])) for kind, returns in self._returns.items()
        }


def why_no_values(windows: Sequence[Window], state_pages: int = 0) -> str:
    """Return why cached pages cannot be evicted by value, with these windows and states; empty: they can.

    Where a group of layers has a window, a hit needs that group's last pages alone, so that a page without the pages
    before it is worth as much as others. Where layers are recurrent, pages behind the last checkpoint are worth
    nothing, and those in front of one are worth something together alone.
    """
    if state_pages:
        return "layers are recurrent: pages are worth something only together with a checkpoint of the state"
    return "layers have windows: a page is of use without the pages before it" if any(windows) else ""


def retention(
    policy: PrefixEviction, num_pages: int, page_size: int, windows: Sequence[Window], state_pages: int = 0
) -> Retention:
    """Return an empty set of cached pages that evicts by `policy`; where that cannot be by value, as `lru` does."""
    if policy == "value" and not why_no_values(windows, state_pages):
        return LeastValuable(num_pages, page_size)
    return LeastRecentlyUsed(EvictionPrice(num_pages, page_size / max(len(windows), 1)))
