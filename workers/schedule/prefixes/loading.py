"""Which waiting prompts have pages loaded from tiers: those for which loading is predicted to end before computing.

A load that no request waits for any more is taken back: its pages are free at once, but for those that are being
filled. A tier that does not answer so costs no request more than the seconds that the load could have saved.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from crossdock.workers.schedule import kv
from crossdock.workers.schedule.admission import Startable, num_slots
from crossdock.workers.schedule.first_token import loads_sooner
from crossdock.workers.schedule.forecast import Forecast
from crossdock.workers.schedule.memory.block_pool import STATES
from crossdock.workers.schedule.memory.prefix_index import MISSING, PrefixIndex
from crossdock.workers.schedule.prefixes.awaited import Awaited, AwaitedPrefix
from crossdock.workers.schedule.prefixes.split_point import meet, split_point_page
from crossdock.workers.schedule.prefixes.tier_pages import PageKey, PageTier, TierPages
from crossdock.workers.schedule.request.coming_pages import ArrivingTail
from crossdock.workers.schedule.request.page_hashes import PageHash
from crossdock.workers.schedule.request.request import Request, Status
from crossdock.workers.schedule.request.submission import Leg
from crossdock.workers.schedule.table import RequestTable

_NEVER_S = 1e6
_LONGEST_WAIT_S = 60.0  # for a load, whatever is predicted, or where nothing is
_MOST_LOOKS = 8  # waiting prompts that are looked up for one step: its work is bounded


class PageLoad(NamedTuple):
    """A page to fill from a tier, or the pages of a state."""

    number: int  # of the page in its prefix; of a state, the number of the last page before it
    key: PageKey
    tier: PageTier
    pages: Sequence[int]  # in the pool


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """The pages of one prefix to load, in ascending order; those of a tail are loaded from the last one backward.

    Two threads share it. One fills pages, with `take` and `land`. The other may `stop` it at any time. Each call of a
    deque is atomic.
    """

    prefix: AwaitedPrefix
    pages: Sequence[PageLoad]
    seconds: float  # predicted, once it is its turn
    tail: ArrivingTail | None = None  # None: the request waits for all pages
    num_landed: int = 0  # entries of `pages`, in the order in which they are loaded
    _left: deque[int] = field(init=False)  # numbers of the entries that are not taken; unused for a tail

    def __post_init__(self) -> None:
        self._left = deque(range(len(self.pages)))

    def take(self) -> int | None:
        """Return the number of the entry of `pages` to fill next; None: none is left."""
        if self.tail is not None:
            page = self.tail.take_last()
            return None if page is None else page - self.pages[0].number
        try:
            return self._left.popleft()
        except IndexError:
            return None

    def land(self) -> None:
        """Note that the entry that was taken last holds its tokens."""
        self.num_landed += 1

    def stop(self) -> Sequence[PageLoad]:
        """Let no thread take a further entry. Return the entries that are taken and are not known to have landed."""
        landed = self.num_landed  # before the last one is taken back: afterwards the number may only be too small
        if self.tail is not None:
            first = self.tail.claim(self.tail.num_pages) - self.pages[0].number
            return self.pages[first : len(self.pages) - landed]
        num_left = 0
        while self._left:
            try:
                self._left.pop()
            except IndexError:  # the other thread has taken it
                break
            num_left += 1
        return self.pages[landed : len(self.pages) - num_left]

    @property
    def landed_from(self) -> int:
        """Return the number of the first page of a tail that has landed: all behind it have."""
        assert self.tail is not None
        return self.pages[-self.num_landed].number if self.num_landed else self.tail.num_pages

    @property
    def landed_until(self) -> int:
        """Return how many pages of the prefix hold their tokens, if they are loaded from the first one on."""
        is_whole = self.num_landed == len(self.pages)
        return len(self.prefix.hashes) if is_whole else self.pages[self.num_landed].number


class _Found(NamedTuple):
    """A prompt's pages in the pool and in tiers."""

    num_cached: int  # pages at the prompt's beginning that are in the pool
    num_pages: int  # pages in the pool or in tiers
    meets_at: int  # first page to load; earlier pages are computed
    load_s: float = 0.0  # predicted seconds to load the pages that the pool lacks, once it is their turn
    compute_s: float = 0.0  # predicted seconds to compute these pages

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
    _underway: dict[str, PrefixLoad] = field(default_factory=dict)  # not taken back, by owner of the pages
    _queued_s: float = 0.0  # predicted, of all loads that have not ended

    def __post_init__(self) -> None:
        if (events := self.table.pages.prefixes.events) is not None:
            for tier in self.tiers.tiers:
                tier.announce_in(events)

    @property
    def queued_s(self) -> float:
        """Return the predicted seconds until all loads that have begun will have ended."""
        return _NEVER_S if self.table.left_behind else self._queued_s

    def begin(self, prefills: Sequence[Request]) -> None:
        """Begin loads for the first of the waiting prompts, in the order in which these are computed.

        A prompt is looked up once each time that it waits; where it lacks pages or a slot, again before the next step.
        Others may pass it as they do in a step.
        """
        for request in prefills:
            own = request.coming
            if own.tail is not None and 0 < own.until <= self.table.now:
                self._give_up(request, own.tail)
        self.take_back()
        if not self._has_pages:
            return
        waiting = [each for each in prefills if each.status is Status.WAITING and not self.table.awaits_pages(each)]
        coming = self.awaited.pages_coming(prefills)
        startable = Startable(self.table)
        for request in [each for each in waiting if not each.coming.is_looked_up][:_MOST_LOOKS]:
            page = kv.next_page(self.table, request)
            if page in coming or not startable.is_next(request):
                continue
            if lacks := self._look_up(request):
                startable.stays(request, lacks)
            elif self.table.awaits_pages(request):
                coming.add(page)

    def _give_up(self, request: Request, tail: ArrivingTail) -> None:
        """Compute the pages of a tail that has not landed in time."""
        if tail.num_pending:
            tail.page_s = _NEVER_S
            request.coming.until = 0.0
        elif not self.table.keeps_pages(request):
            self.table.preempt(request)  # all other pages may still be written to

    def take_begun(self) -> list[PrefixLoad]:
        """Return the loads that have begun since the last call. Each must end with `end`."""
        begun = self._begun
        self._begun = []
        return begun

    def take_back(self) -> None:
        """Take back the loads that no request waits for any more. Call this when requests have ended, too."""
        for owner, load in [*self._underway.items()] if self._underway else ():
            if not self._is_wanted(load):
                del self._underway[owner]
                self.table.left_behind.add(owner)
                being_filled = [page for each in load.stop() for page in each.pages]
                self._use(load)
                self.awaited.end(load.prefix, may_be_written=True, only=being_filled)

    def _is_wanted(self, load: PrefixLoad) -> bool:
        request = load.prefix.request
        if load.tail is None:
            return request.status is Status.WAITING and self.table.awaits_pages(request)
        is_computed = request.status is not Status.FINISHED or request.num_in_flight_tokens > 0
        return request.coming.tail is load.tail and is_computed

    def end(self, load: PrefixLoad) -> None:
        """End a load: nothing writes to its pages any more."""
        owner = load.prefix.owner
        self._queued_s = max(self._queued_s - load.seconds, 0.0)
        if owner in self.table.left_behind:
            self.table.left_behind.discard(owner)
            self.table.pages.end_quarantine(owner)
            return
        del self._underway[owner]
        self._use(load)
        self.awaited.end(load.prefix)
        request = load.prefix.request
        tail = load.tail
        if tail is not None and request.coming.tail is tail:
            if request.status is Status.WAITING:
                request.coming.tail = None  # all pages have landed, or are computed
            else:
                meet(self.table, request)

    def _use(self, load: PrefixLoad) -> None:
        """Index the pages that have landed, and count their tokens."""
        landed = load.pages[: load.num_landed] if load.tail is None else load.pages[len(load.pages) - load.num_landed :]
        for each in landed:
            if not each.key.group:  # every group has a page for the same tokens
                self.awaited.num_tokens[each.tier.name] += self.table.pages.page_size
        if load.tail is None:
            self.awaited.land(load.prefix, load.landed_until)
            return
        load.tail.landed_from = load.landed_from
        self.table.pages.index(load.prefix.owner, load.prefix.hashes, load.landed_from, load.prefix.request)

    def predicted(self, request: Request) -> tuple[int, float]:
        """Return how many pages of a prompt will be there when it is computed, and the seconds until then."""
        if not self._has_pages or not kv.may_share(self.table, request):
            return kv.match_prefix(self.table, request).num_pages, 0.0
        found = self._find(request)
        return (found.num_pages, self._queued_s + found.loaded_s) if found.is_loaded else (found.num_cached, 0.0)

    @property
    def _has_pages(self) -> bool:
        """Return whether any page may be loaded now: none, while a load that was taken back has not ended."""
        return not self.table.left_behind and any(tier.pages for tier in self.tiers.tiers)

    def _look_up(self, request: Request) -> Literal["", "pages", "slot"]:
        """Begin to load what tiers have for a prompt, where that is sooner. Returns what the prompt lacks for that."""
        table = self.table
        coming = request.coming
        coming.is_looked_up = True
        if not kv.may_share(table, request) or self.awaited.is_arriving(request):
            return ""
        found = self._find(request)
        hashes = request.prefix_hashes(request.num_tokens - 1, table.pages.page_size)
        self.tiers.returns.wanted(hashes[found.num_cached :])
        if not found.is_loaded:
            return ""
        has_slot = num_slots(table, request.priority) > 0
        num_missing = found.num_pages - found.num_cached
        until = table.now + min(found.compute_s, _LONGEST_WAIT_S)
        prefix = self.awaited.begin(request, found.num_pages, until) if has_slot else None
        coming.is_looked_up = prefix is not None
        if prefix is not None:
            if found.meets_at > found.num_cached and len(prefix.empty) == num_missing:
                page_s = found.load_s / num_missing
                coming.until = 0.0
                coming.tail = ArrivingTail(prefix.owner, found.num_pages, page_s, found.num_cached)
            load_s = found.loaded_s if coming.tail is not None else found.load_s
            load = self._underway[prefix.owner] = PrefixLoad(prefix, self._to_load(prefix), load_s, coming.tail)
            self._begun.append(load)
            self._queued_s += load_s
        return "" if prefix is not None else "pages" if has_slot else "slot"

    def _find(self, request: Request) -> _Found:
        """Find a prompt's pages in the pool and in tiers."""
        size = self.table.pages.page_size
        num_cached = kv.match_prefix(self.table, request).num_pages
        hashes = request.prefix_hashes(request.num_tokens - 1, size)
        num_pages = self._num_held(hashes)
        if num_pages <= num_cached:
            return _Found(num_cached, num_cached, num_cached)
        load_s = self._load_seconds(hashes[:num_pages])
        compute_s = self.forecast.compute_seconds(request, num_cached * size, num_pages * size)
        is_sooner = loads_sooner(compute_s, self._queued_s, load_s, meets=False)
        meets_at = num_cached if is_sooner else num_pages
        if self._may_meet(request):
            page_s = load_s / (num_pages - num_cached)
            meets_at = split_point_page(self.forecast, request, num_cached, num_pages, page_s, self._queued_s)
        return _Found(num_cached, num_pages, meets_at, load_s, compute_s)

    def _may_meet(self, request: Request) -> bool:
        """Return whether a prompt can be computed from its beginning while its pages are loaded from the end.

        Layers with windows or states, and pictures, need more than the pages before a token: such a prompt waits for
        all its pages. So does one whose pages are sent, which cannot be preempted."""
        pages = self.table.pages
        config = self.table.config
        is_plain = pages.windows == (None,) and not pages.state_pages and not request.items and request.leg is Leg.LOCAL
        return is_plain and config.enable_chunked_prefill and self.forecast.cost is not None

    def _num_held(self, hashes: Sequence[PageHash]) -> int:
        """Return how many pages a prefix hit would have if all that tiers hold were in the pool."""
        pages = self.table.pages
        tiers = self.tiers
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
        snapshots = pages.prefixes.snapshots
        has_state = [each for each in hashes if each in snapshots or tiers.holder(PageKey(STATES, each))]
        index.snapshots.update(dict.fromkeys(has_state, ()))
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
        keys += [] if missing.snapshot else [PageKey(STATES, hashes[-1])] * pages.state_pages
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
