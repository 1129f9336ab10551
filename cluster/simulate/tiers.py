"""The tiers below a simulated replica's pool: what they hold, and loads that take their predicted seconds.

Does in simulated time what `TierStore` does. Stores take no time: on a GPU they run beside the steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from crossdock.cluster.simulate.clock import Clock
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.memory.page_stock import STATES
from crossdock.workers.schedule.memory.prefix_index import PageHash
from crossdock.workers.schedule.prefixes.loading import PrefixLoad, TierLoading
from crossdock.workers.schedule.prefixes.tier_pages import PageKey, PageTier, TierPages


@dataclass(slots=True, eq=False)
class SimulatedTiers:
    """The tiers of one replica. Loads follow each other, as in the thread of a `TierStore`."""

    profile: SchedulingProfile
    clock: Clock
    tiers: TierPages = field(init=False)
    _room: list[int] = field(default_factory=list)  # pages that each tier can still take
    _free: float = 0.0  # when the loads that have begun will have ended

    def __post_init__(self) -> None:
        tiers, num_bytes = list[PageTier](), max(self.profile.page_bytes, 1)
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

    def load(self, loads: Sequence[PrefixLoad], now: float, landed: Callable[[PrefixLoad, float], None]) -> None:
        """Begin loads; `landed` is called when the pages of one are in the pool."""
        for load in loads:
            for each in load.pages:
                each.tier.used(each.key)
            self._free = max(self._free, now) + load.seconds
            self.clock.at(self._free, partial(landed, load))


def finish(loading: TierLoading, load: PrefixLoad, now: float) -> None:
    """End a load all of whose pages have landed."""
    for each in load.pages:
        each.tier.loaded(len(each.pages), each.tier.load_s * len(each.pages))
    loading.finish(load, len(load.prefix.hashes))
