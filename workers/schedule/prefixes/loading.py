"""Which waiting prompts have pages loaded from tiers: those for which loading is predicted to end before computing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from crossdock.workers.schedule import kv
from crossdock.workers.schedule.admission import Startable, num_places
from crossdock.workers.schedule.memory.arriving_tail import ArrivingTail
from crossdock.workers.schedule.memory.page_stock import STATES
from crossdock.workers.schedule.memory.prefix_index import MISSING, PageHash, PrefixIndex
from crossdock.workers.schedule.pacing.forecast import Forecast
from crossdock.workers.schedule.pacing.meeting import meet, meeting_page
from crossdock.workers.schedule.prefixes.awaited import Awaited, AwaitedPrefix
from crossdock.workers.schedule.prefixes.tier_pages import PageKey, PageTier, TierPages
from crossdock.workers.schedule.request import Request, Status
from crossdock.workers.schedule.submission import Leg
from crossdock.workers.schedule.table import RequestTable

_NEVER_S = 1e6
_MOST_LOOKS = 8  # waiting prompts that are looked up for one step: its work is bounded


class PageLoad(NamedTuple):
    """A page to fill from a tier, or the pages of a state."""

    number: int  # of the page in its prefix; of a state, the number of the last page before it
    key: PageKey
    tier: PageTier
    pages: Sequence[int]  # in the pool


class PrefixLoad(NamedTuple):
    """The pages of one prefix to load, by number; those of a tail from the last one backward, as it gives them."""

    prefix: AwaitedPrefix
    pages: Sequence[PageLoad]
    seconds: float  # predicted, once it is its turn
    tail: ArrivingTail | None = None  # None: the request waits for all pages


class _Found(NamedTuple):
    """A prompt's pages in the pool and in tiers."""

    num_cached: int  # of the first pages, in the pool
    num_pages: int  # in the pool or in tiers
    meets_at: int  # pages before this one are computed: all, or none, or as many as while the others are loaded
    load_s: float = 0.0  # predicted seconds to load those that the pool lacks, once it is their turn
    compute_s: float = 0.0  # to compute them

    @property
    def is_loaded(self) -> bool:
        """Return whether any page is loaded."""
        return self.meets_at < self.num_pages

    @property
    def loaded_s(self) -> float:
        """Return the predicted seconds to load the pages that are not computed, once it is their turn."""
        return self.load_s * (self.num_pages - self.meets_at) / max(self.num_pages - self.num_cached, 1)


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

        A prompt is looked up once each time that it waits; where it lacks pages or a place, again before the next step.
        Others may pass it as they do in a step.
        """
        for request in prefills:
            if request.tail is not None and 0 < request.awaits_pages_until <= self.table.now:
                self._give_up(request, request.tail)
        if not self._has_pages:
            return
        waiting = [each for each in prefills if each.status is Status.WAITING and not self.table.awaits_pages(each)]
        coming, startable = self.awaited.pages_coming(prefills), Startable(self.table)
        for request in [each for each in waiting if not each.is_looked_up][:_MOST_LOOKS]:
            page = kv.next_page(self.table, request)
            if page in coming or not startable.may_start(request):
                continue
            if lacks := self._look_up(request):
                startable.stays(request, lacks)
            elif self.table.awaits_pages(request):
                coming.add(page)

    def _give_up(self, request: Request, tail: ArrivingTail) -> None:
        """Compute the pages of a tail that has not landed in time."""
        if tail.num_pending:
            tail.page_s, request.awaits_pages_until = _NEVER_S, 0.0
        elif not self.table.keeps_pages(request):
            self.table.preempt(request)  # all other pages may still be written to

    def take_begun(self) -> list[PrefixLoad]:
        """Return the loads that have begun since the last call. Each must end with `finish`."""
        begun, self._begun = self._begun, []
        return begun

    def finish(self, load: PrefixLoad, num_pages: int) -> None:
        """End a load: the first `num_pages` pages of its prefix are in the pool, and with all of them its state."""
        self.queued_s = max(self.queued_s - load.seconds, 0.0)
        self.awaited.land(load.prefix, num_pages)
        self.awaited.end(load.prefix)

    def meet(self, load: PrefixLoad, first: int) -> None:
        """End the load of a tail: its pages from number `first` on are in the pool."""
        tail, prefix, request = load.tail, load.prefix, load.prefix.request
        assert tail is not None
        self.queued_s = max(self.queued_s - load.seconds, 0.0)
        tail.landed_from = first
        self.table.pages.index(prefix.owner, prefix.hashes, first)
        is_awaited = request.tail is tail
        self.awaited.end(prefix)
        if is_awaited and request.status is Status.WAITING:
            request.tail = None  # all pages have landed, or are computed
        elif is_awaited:
            meet(self.table, request)

    def predicted(self, request: Request) -> tuple[int, float]:
        """Return how many pages of a prompt will be there when it is computed, and the seconds until then."""
        if not self._has_pages or not kv.may_share(self.table, request):
            return kv.match_prefix(self.table, request).num_pages, 0.0
        found = self._find(request)
        return (found.num_pages, self.queued_s + found.loaded_s) if found.is_loaded else (found.num_cached, 0.0)

    @property
    def _has_pages(self) -> bool:
        return any(tier.pages for tier in self.tiers.tiers)

    def _look_up(self, request: Request) -> Literal["", "pages", "place"]:
        """Begin to load what tiers have for a prompt, where that is sooner. Returns what the prompt lacks for that."""
        table, request.is_looked_up = self.table, True
        if not kv.may_share(table, request) or self.awaited.is_arriving(request):
            return ""
        found = self._find(request)
        hashes = request.prefix_hashes(request.num_tokens - 1, table.pages.page_size)
        self.tiers.returns.wanted(hashes[found.num_cached :])
        if not found.is_loaded:
            return ""
        has_place, num_missing = num_places(table, request.priority) > 0, found.num_pages - found.num_cached
        prefix = self.awaited.begin(request, found.num_pages, table.now + found.compute_s) if has_place else None
        request.is_looked_up = prefix is not None
        if prefix is not None:
            if found.meets_at > found.num_cached and len(prefix.empty) == num_missing:
                page_s, request.awaits_pages_until = found.load_s / num_missing, 0.0
                request.tail = ArrivingTail(prefix.owner, found.num_pages, page_s, found.num_cached)
            load_s = found.loaded_s if request.tail is not None else found.load_s
            self._begun.append(PrefixLoad(prefix, self._to_load(prefix), load_s, request.tail))
            self.queued_s += load_s
        return "" if prefix is not None else "pages" if has_place else "place"

    def _find(self, request: Request) -> _Found:
        """Find a prompt's pages in the pool and in tiers."""
        size, num_cached = self.table.pages.page_size, kv.match_prefix(self.table, request).num_pages
        hashes = request.prefix_hashes(request.num_tokens - 1, size)
        num_pages = self._num_held(hashes)
        if num_pages <= num_cached:
            return _Found(num_cached, num_cached, num_cached)
        load_s = self._load_seconds(hashes[:num_pages])
        compute_s = self.forecast.compute_seconds(request, num_cached * size, num_pages * size)
        meets_at = num_cached if self.queued_s + load_s < compute_s else num_pages
        if self._may_meet(request):
            page_s = load_s / (num_pages - num_cached)
            meets_at = meeting_page(self.forecast, request, num_cached, num_pages, page_s, self.queued_s)
        return _Found(num_cached, num_pages, meets_at, load_s, compute_s)

    def _may_meet(self, request: Request) -> bool:
        """Return whether a prompt can be computed from its beginning while its pages are loaded from the end.

        Layers with windows or states, and pictures, need more than the pages before a token: such a prompt waits for
        all its pages. So does one whose pages are sent, which cannot be preempted."""
        pages, config = self.table.pages, self.table.config
        is_plain = pages.windows == (None,) and not pages.state_pages and not request.items and request.leg is Leg.LOCAL
        return is_plain and config.enable_chunked_prefill and self.forecast.cost is not None

    def _num_held(self, hashes: Sequence[PageHash]) -> int:
        """Return how many pages a prefix hit would have if all that tiers hold were in the pool."""
        pages, tiers = self.table.pages, self.tiers
        if pages.windows == (None,) and not pages.state_pages:  # the usual case: up to the first page that is nowhere
            places = [tier.pages for tier in tiers.tiers]
            (pool,) = pages.prefixes.by_group
            for number, each in enumerate(hashes):
                if each not in pool and not any(PageKey(0, each) in held for held in places):
                    return number
            return len(hashes)
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
        """Return the tier to load a page from. A page that gave way to one evicted since the look-up is lost there."""
        return self.tiers.holder(key) or self.tiers.tiers[-1]
