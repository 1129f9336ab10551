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


class _Found(NamedTuple):
    """A prompt's pages in the pool and in tiers."""

    num_cached: int  # of the first pages, in the pool
    num_pages: int  # in the pool or in tiers
    load_s: float = 0.0  # predicted seconds to load those that the pool lacks, once it is their turn
    compute_s: float = 0.0  # to compute them
    is_sooner: bool = False  # to load them, behind the loads that have begun


@dataclass(slots=True)
class TierLoading:
    """Begins and ends the loads for the requests of one scheduler."""

    table: RequestTable
    forecast: Forecast
    awaited: Awaited
    tiers: TierPages
    _begun: list[PrefixLoad] = field(default_factory=list)  # since `take_begun`
    queued_s: float = 0.0  # predicted, of all loads that have not ended

    def begin(self, prefills: Sequence[Request]) -> None:
        """Begin loads for the first of the waiting prompts, in the order in which these are computed.

        A prompt is looked up once each time that it waits. Where it lacks pages or a place, so do those behind it: all
        are looked up again before the next step.
        """
        if not self._has_pages:
            return
        waiting = [each for each in prefills if each.status is Status.WAITING and not self.table.awaits_pages(each)]
        coming = self.awaited.pages_coming(prefills)
        for request in [each for each in waiting if not each.is_looked_up][:_MOST_LOOKS]:
            page = kv.next_page(self.table, request)
            if page in coming:
                continue
            if not self._look_up(request):
                return
            if self.table.awaits_pages(request):
                coming.add(page)

    def take_begun(self) -> list[PrefixLoad]:
        """Return the loads that have begun since the last call. Each must end with `finish`."""
        begun, self._begun = self._begun, []
        return begun

    def finish(self, load: PrefixLoad, num_pages: int) -> None:
        """End a load: the first `num_pages` pages of its prefix are in the pool, and with all of them its state."""
        self.queued_s = max(self.queued_s - load.seconds, 0.0)
        self.awaited.land(load.prefix, num_pages)
        self.awaited.end(load.prefix)

    def predicted(self, request: Request) -> tuple[int, float]:
        """Return how many pages of a prompt will be there when it is computed, and the seconds until then."""
        if not self._has_pages or not kv.may_share(self.table, request):
            return kv.match_prefix(self.table, request).num_pages, 0.0
        found = self._find(request)
        return (found.num_pages, self.queued_s + found.load_s) if found.is_sooner else (found.num_cached, 0.0)

    @property
    def _has_pages(self) -> bool:
        return any(tier.pages for tier in self.tiers.tiers)

    def _look_up(self, request: Request) -> bool:
        """Begin to load what tiers have for a prompt, where that is sooner. Returns False if the prompt lacks room."""
        table, request.is_looked_up = self.table, True
        if not kv.may_share(table, request):
            return True
        found = self._find(request)
        hashes = request.prefix_hashes(request.num_tokens - 1, table.pages.page_size)
        self.tiers.returns.wanted(hashes[found.num_cached :])
        if not found.is_sooner:
            return True
        has_place = num_places(table, request.priority) > 0
        until = table.now + found.compute_s
        prefix = self.awaited.begin(request, found.num_pages, until) if has_place else None
        request.is_looked_up = prefix is not None
        if prefix is not None:
            self._begun.append(PrefixLoad(prefix, self._to_load(prefix), found.load_s))
            self.queued_s += found.load_s
        return request.is_looked_up

    def _find(self, request: Request) -> _Found:
        """Find a prompt's pages in the pool and in tiers."""
        size, num_cached = self.table.pages.page_size, kv.match_prefix(self.table, request).num_pages
        hashes = request.prefix_hashes(request.num_tokens - 1, size)
        num_pages = self._num_held(hashes)
        if num_pages <= num_cached:
            return _Found(num_cached, num_cached)
        load_s = self._load_seconds(hashes[:num_pages])
        compute_s = self.forecast.compute_seconds(request, num_cached * size, num_pages * size)
        return _Found(num_cached, num_pages, load_s, compute_s, self.queued_s + load_s < compute_s)

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
