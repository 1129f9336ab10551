"""Which waiting prompts have pages loaded from tiers: those for which loading is predicted to end before computing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from crossdock.workers.schedule import kv
from crossdock.workers.schedule.admission import num_places
from crossdock.workers.schedule.memory.page_stock import STATES
from crossdock.workers.schedule.memory.prefix_index import MISSING, PageHash, PrefixIndex
from crossdock.workers.schedule.pacing.forecast import Forecast
from crossdock.workers.schedule.prefixes.awaited import Awaited, AwaitedPrefix
from crossdock.workers.schedule.prefixes.tier_pages import PageKey, PageTier, TierPages
from crossdock.workers.schedule.request import Request, Status
from crossdock.workers.schedule.table import RequestTable

_MOST_LOOKS = 8  # waiting prompts that are looked up for one step: its work is bounded


class PageLoad(NamedTuple):
    """A page to fill from a tier, or the pages of a state."""

    number: int  # of the page in its prefix; of a state, the number of the last page before it
    key: PageKey
    tier: PageTier
    pages: Sequence[int]  # in the pool


class PrefixLoad(NamedTuple):
    """The pages of one prefix to load, by number."""

    prefix: AwaitedPrefix
    pages: Sequence[PageLoad]
    seconds: float  # predicted, once it is its turn


@dataclass(slots=True)
class TierLoading:
    """Begins and ends the loads for the requests of one scheduler."""

    table: RequestTable
    forecast: Forecast
    awaited: Awaited
    tiers: TierPages
    _begun: list[PrefixLoad] = field(default_factory=list)  # since `take_begun`
    _queued_s: float = 0.0  # predicted, of all loads that have not ended

    def begin(self, prefills: Sequence[Request]) -> None:
        """Begin loads for the first of the waiting prompts, in the order in which these are computed.

        A prompt is looked up once each time that it waits. Where it lacks pages or a place, so do those behind it: all
        are looked up again before the next step.
        """
        if not any(tier.pages for tier in self.tiers.tiers):
            return
        waiting = [each for each in prefills if each.status is Status.WAITING and not self.table.awaits_pages(each)]
        for request in [each for each in waiting if not each.is_looked_up][:_MOST_LOOKS]:
            if not self._look_up(request):
                return

    def take_begun(self) -> list[PrefixLoad]:
        """Return the loads that have begun since the last call. Each must end with `finish`."""
        begun, self._begun = self._begun, []
        return begun

    def finish(self, load: PrefixLoad, num_pages: int) -> None:
        """End a load: the first `num_pages` pages of its prefix are in the pool, and with all of them its state."""
        self._queued_s = max(self._queued_s - load.seconds, 0.0)
        self.awaited.land(load.prefix, num_pages)
        self.awaited.end(load.prefix)

    def _look_up(self, request: Request) -> bool:
        """Begin to load what tiers have for a prompt, where that is sooner. Returns False if the prompt lacks room."""
        table, size = self.table, self.table.pages.page_size
        request.is_looked_up = True
        if not kv.may_share(table, request):
            return True
        num_cached = kv.match_prefix(table, request).num_pages
        hashes = request.prefix_hashes(request.num_tokens - 1, size)
        self.tiers.returns.wanted(hashes[num_cached:])
        num_pages = self._num_held(hashes)
        if num_pages <= num_cached:
            return True
        load_s = self._load_seconds(hashes[:num_pages])
        compute_s = self.forecast.compute_seconds(request, num_cached * size, num_pages * size)
        if compute_s <= self._queued_s + load_s:
            return True
        has_place = num_places(table, request.priority) > 0
        prefix = self.awaited.begin(request, num_pages, table.now + compute_s) if has_place else None
        request.is_looked_up = prefix is not None
        if prefix is not None:
            self._begun.append(PrefixLoad(prefix, self._to_load(prefix), load_s))
            self._queued_s += load_s
        return request.is_looked_up

    def _num_held(self, hashes: Sequence[PageHash]) -> int:
        """Return how many pages a prefix hit would have if all that tiers hold were in the pool."""
        pages, tiers = self.table.pages, self.tiers
        index = PrefixIndex(pages.windows, pages.page_size, has_states=bool(pages.state_pages))
        for group, (held, pool) in enumerate(zip(index.by_group, pages.prefixes.by_group, strict=True)):
            held.update((each, 0) for each in hashes if each in pool or tiers.holder(PageKey(group, each)))
        checkpoints = pages.prefixes.checkpoints
        has_state = [each for each in hashes if each in checkpoints or tiers.holder(PageKey(STATES, each))]
        index.checkpoints.update(dict.fromkeys(has_state, ()))
        return index.match(hashes).num_pages

    def _load_seconds(self, hashes: Sequence[PageHash]) -> float:
        """Return the predicted seconds to load what the pool lacks of a prefix and of the state after it."""
        pages = self.table.pages
        missing = pages.prefixes.parts(hashes)
        keys = [
            PageKey(group, page_hash)
            for group, held in enumerate(missing.by_group)
            for page_hash, page in zip(hashes, held, strict=True)
            if page == MISSING
        ]
        keys += [] if missing.checkpoint else [PageKey(STATES, hashes[-1])] * pages.state_pages
        return sum(self._holder(key).load_s for key in keys)

    def _to_load(self, prefix: AwaitedPrefix) -> list[PageLoad]:
        loads = list[PageLoad]()
        for number, group, page in prefix.empty:
            key = PageKey(group, prefix.hashes[number])
            loads.append(PageLoad(number, key, self._holder(key), (page,)))
        if prefix.state:
            key = PageKey(STATES, prefix.hashes[-1])
            loads.append(PageLoad(len(prefix.hashes) - 1, key, self._holder(key), prefix.state))
        return loads

    def _holder(self, key: PageKey) -> PageTier:
        tier = self.tiers.holder(key)
        assert tier is not None, "no tier has the page"
        return tier
