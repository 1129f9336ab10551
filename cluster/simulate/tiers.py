"""The tiers below a simulated replica's pool: what they hold, and loads that take their predicted seconds.

Does in simulated time what `TierStore` does. Stores take no time: on a GPU they run beside the steps.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crossdock.cluster.simulate.clock import Clock
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.memory.block_pool import STATES
from crossdock.workers.schedule.prefixes.loading import PrefixLoad, TierLoading
from crossdock.workers.schedule.prefixes.tier_pages import PageKey, PageTier, TierPages
from crossdock.workers.schedule.request.page_hashes import PageHash


@dataclass(slots=True, eq=False)
class SimulatedTiers:
    """The tiers of one replica. Loads follow each other, as in the thread of a `TierStore`."""

    profile: SchedulingProfile
    clock: Clock
    tiers: TierPages = field(init=False)
    on_done: list[Callable[[], None]] = field(default_factory=list)  # called when `take_in` may have something to do
    _room: list[int] = field(default_factory=list)  # pages that each tier can still take
    _loads: deque[PrefixLoad] = field(default_factory=deque)  # loads that have not ended, in order
    _being_filled: int = 0  # entries of the first load
    _page_ends: float = 0.0  # when the page that is being loaded will be in the pool
    _planned: float = -1.0  # time of the next look
    _loading: TierLoading | None = None

    def __post_init__(self) -> None:
        tiers = list[PageTier]()
        num_bytes = max(self.profile.page_bytes, 1)
        for size in self.profile.tiers:
            if size.num_bytes:
                seconds = num_bytes / size.bytes_per_second
                tiers.append(PageTier(size.name, store_s=seconds, load_s=seconds))
                self._room.append(size.num_bytes // num_bytes)
        self.tiers = TierPages(tiers)

    def evicted(self, group: int, page_hash: PageHash, pages: Sequence[int], compute_s: float) -> None:
        """Store the content of evicted pages where that is worth it; the least recently used ones give way."""
        key = PageKey(group, page_hash)
        self.tiers.returns.evicted(page_hash)
        worth = self.tiers.worth_storing(key, compute_s)
        for number, tier in enumerate(self.tiers.tiers):
            if tier in worth:
                tier.stored(key, tier.store_s)
                self._room[number] -= len(pages)
                self._make_room(number, tier)

    def _make_room(self, number: int, tier: PageTier) -> None:
        while self._room[number] < 0 and tier.pages:
            oldest = next(iter(tier.pages))
            tier.drop([oldest])
            self._room[number] += self.profile.state_pages if oldest.group == STATES else 1

    def load(self, loads: Sequence[PrefixLoad]) -> None:
        """Begin loads behind those that have begun."""
        if not loads:
            return
        if not self._loads:
            self._page_ends = self.clock.now
        for load in loads:
            for each in load.pages:
                each.tier.used(each.key)
        self._loads += loads
        if self._loading is not None:
            self.take_in(self._loading)

    def take_in(self, loading: TierLoading) -> None:
        """Begin and end what is due by now. A step computes pages of a tail that have not begun to load."""
        self._loading = loading
        while self._loads and self._page_ends <= self.clock.now:
            load = self._loads[0]
            for _ in range(self._being_filled):
                load.land()
            self._being_filled = self._take(load)
            if not self._being_filled:
                self._loads.popleft()
                self._end(loading, load)
            else:
                self._page_ends += load.seconds if load.tail is None else load.tail.page_s
        self._plan()

    def _take(self, load: PrefixLoad) -> int:
        """Take the next page of a tail, or all pages of another load. Return how many these are."""
        most = len(load.pages) if load.tail is None else 1
        return sum(1 for _ in range(most) if load.take() is not None)

    def _end(self, loading: TierLoading, load: PrefixLoad) -> None:
        for each in load.pages:
            each.tier.loaded(len(each.pages), each.tier.load_s * len(each.pages))
        loading.end(load)

    def _plan(self) -> None:
        """Look again when the first load will have ended, if no step takes pages of it until then."""
        if self._loads:
            load = self._loads[0]
            left = 0.0
            if load.tail is not None:
                left = load.tail.num_pending * load.tail.page_s
            elif not self._being_filled:
                left = load.seconds
            if (at := self._page_ends + left) != self._planned:
                self._planned = at
                self.clock.at(at, self._wake)

    def _wake(self, now: float) -> None:
        for listener in self.on_done:
            listener()
