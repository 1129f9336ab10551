"""The live profile that a replica publishes while it works, and the prefixes in its cache.

A replica's own publisher, publisher.py, is the only source of both. profile.py has the static part.
"""

from bisect import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from crossdock.workers.report.answer import Answer
from crossdock.workers.report.profile import Role
from crossdock.workers.schedule import kv
from crossdock.workers.schedule.admission import num_places
from crossdock.workers.schedule.cost.cost import NO_ADAPTERS, AdapterWork
from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.memory.prefix_index import PageHash
from crossdock.workers.schedule.request import Request, Status, TokenDelta, adapter_work
from crossdock.workers.schedule.scheduler import Scheduler
from crossdock.workers.schedule.submission import Leg
from crossdock.workers.schedule.table import RequestTable
from crossdock.workers.schedule.weight_version import WeightVersion

LENGTHS = tuple(4.0**power for power in range(-3, 4))
"""Seconds that divide prompts by length, 16 ms to 64 s: a prompt delays another by at most the shorter of the two.

With factors of 4 between them, eight groups per class span all prompts, and a live profile stays below 1,000 bytes.
"""


MEMORY_S = 5.0
"""Seconds over which shares of a replica's time are averaged: a weight falls to 1/e in this time.

It spans several prompts of seconds each, and follows a load that changes within a minute. Routers depend on it little:
with 0.5, 5 and 50 s, the p90 error of predicted TTFT is 72, 70 and 66 %
(`crossdock simulate --pools mixed=4xh100-8b --request-rate 100 --mix bursty`, 2026-11-22).
"""

MOST_ENDS = 8  # in a live profile, requests that will end first
MOST_LOOKS = 8  # waiting requests whose cached pages are looked at for a live profile
MOST_TENANTS = 16  # in a live profile, those whose prompts take most seconds; about 40 bytes each
HEARTBEAT_S = 1.0  # silence after which a replica repeats its last report


Waiting: TypeAlias = tuple[tuple[int, float, int], ...]
"""Requests that wait, at first: (pages, seconds of the prompt, tokens of output)."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of one class and similar length with tokens left to compute."""

    priority: int
    length: int  # index of the group between `LENGTHS`
    count: int
    tokens: int  # left to compute, of all together
    seconds: float  # that these tokens take alone, as predicted by the replica


class TenantWork(NamedTuple):
    """The prompts of one tenant in one class that wait at a replica, and how far ahead of others the tenant is."""

    payer: str
    priority: int
    weight: float
    seconds: float  # that its waiting prompts take, as predicted
    lead_s: float  # seconds that it has had beyond the waiting tenant that has had least, divided by its weight


class AdapterUse(NamedTuple):
    """Tells how much the adapters of requests add to a replica's steps."""

    num_used: int = 0  # adapters of streams
    now: AdapterWork = NO_ADAPTERS  # of the streams, all in one step
    future: AdapterWork = NO_ADAPTERS  # of the streams and of the requests that will decode here


@dataclass(frozen=True, slots=True)
class LiveProfile:
    """The work of a replica. Plain data: it crosses processes many times a second."""

    incarnation: str  # of the process: a new process starts its sequence again
    sequence: int
    cost: tuple[float, ...]  # `StepCost.coefficients`, as learnt so far; empty: unknown
    prompts: tuple[Prompts, ...] = ()
    streams: tuple[int, ...] = ()  # number of decoding requests, by priority
    context_tokens: int = 0  # of all streams together
    arriving: tuple[int, ...] = ()  # requests prefilled elsewhere that will decode here, by priority
    leaving: tuple[int, ...] = ()  # requests prefilled here that will decode elsewhere or not at all, by priority
    places: tuple[int, ...] = ()  # requests that could still start, by priority; negative: so many must wait
    free_pages: tuple[int, ...] = ()  # by priority: without those for waiting requests, with those of less urgent ones
    prompt_shares: tuple[float, ...] = ()  # recent share of time that went into prompts, by priority
    stream_share: float = 0.0  # recent share of time that streams did not leave to prompts
    step_seconds: float = 0.0  # from the step before to the last step's end; 0: no request is running
    bytes_per_second: float = 0.0  # recent rate of page transfers to other replicas; 0: none
    done_seconds: float = 0.0  # of prompts computed since the start, in the unit of `Prompts.seconds`
    role: Role | None = None  # that the replica is assigned to now; None: the role in its static profile
    interval_share: float = 1.0  # interval of steps / seconds of one, as learnt so far, with `cost`
    gap_share: float = 1.0  # recent seconds per token of streams with drafts, as a share of those without
    empty_pages: int = 0  # that can be taken without the eviction of a cached one
    eviction_seconds: float = 0.0  # of prefill that one more evicted page is expected to cost
    adapters: tuple[str, ...] = ()  # fingerprints of those in its slots, those of streams first
    adapter_load_s: float = 0.0  # recent mean seconds to load another one
    encoder_cost: tuple[float, ...] = ()  # base, per row, per square of rows, as learnt so far; empty: the profile's
    load_seconds: tuple[float, ...] = ()  # of a page, from each tier below the pool, fastest first
    load_queue: float = 0.0  # seconds until all loads from tiers that have begun will have ended
    tenants: tuple[TenantWork, ...] = ()  # those with most work; empty: tenants are not told apart
    weights: WeightVersion = WeightVersion()  # noqa: RUF009  # immutable
    is_paused: bool = False  # it computes nothing until its operator lets it go on
    pages_now: tuple[int, ...] = ()  # `free_pages` before waiting requests that lack pages: shorter prompts pass these
    in_flight_seconds: float = 0.0  # of the chunks in steps that have begun; `prompts` has the other tokens
    started_seconds: float = 0.0  # of the prompts that have pages, without those chunks
    ends: tuple[tuple[int, int], ...] = ()  # (tokens, pages) of those that will end first: expected until then, freed
    lacking: Waiting = ()  # (pages, seconds, tokens of output) of waiting ones without room
    adapter_use: AdapterUse = AdapterUse()  # noqa: RUF009  # immutable
    starting: Waiting = ()  # the same of waiting ones with room, which `pages_now` lacks
    lead_s: float = 0.0  # seconds that all streams are ahead of their mean, which they lend to prompts


@dataclass(frozen=True, slots=True)
class PageChanges:
    """Page hashes that a replica has indexed, and page hashes that it has removed from its index."""

    incarnation: str
    number: int  # one more than that of the changes before; a reader that misses one must start again
    added: Sequence[PageHash]  # beginnings of prefixes before their ends
    evicted: Sequence[PageHash] = ()
    is_all: bool = False  # `added` and `stored` are all there are: a reader starts with this
    stored: Sequence[Sequence[PageHash]] = ()  # in each tier below the pool, fastest first
    lost: Sequence[Sequence[PageHash]] = ()  # from each tier

    def of_tier(self, number: int) -> "PageChanges":
        """Return the changes of one tier, as if it were a pool."""
        lost = self.lost[number] if number < len(self.lost) else ()
        return PageChanges(self.incarnation, self.number, self.stored[number], lost, self.is_all)


@dataclass(slots=True)
class Message:
    """Everything that a replica sends to one of its readers at once."""

    deltas: list[TokenDelta] = field(default_factory=list)
    live: LiveProfile | None = None  # if a new one is due; while the replica is quiet, the last one again
    pages: Sequence[PageChanges] = ()
    answers: Sequence[Answer] = ()  # to submissions of this reader


def observe(scheduler: Scheduler, incarnation: str, sequence: int) -> LiveProfile:
    """Return the live profile of a replica with this scheduler, without the figures that are measured over time."""
    prompts, leaving, tenants = _prompts(scheduler)
    streams, context = _streams(scheduler)
    arriving = [0] * len(scheduler.config.slo_classes)
    for request in (*scheduler.table.held, *scheduler.table.waiting):
        if request.leg is Leg.RECEIVE:
            arriving[request.priority] += 1
    places, pages, pages_now, lacking, starting, wanted = _free(scheduler)
    encoding, (adapters, adapter_use) = scheduler.encoding, _adapters(scheduler)
    return LiveProfile(
        incarnation,
        sequence,
        cost=scheduler.forecast.cost.advertised if scheduler.forecast.cost is not None else (),
        prompts=prompts,
        streams=streams,
        context_tokens=context,
        arriving=tuple(arriving),
        leaving=leaving,
        places=places,
        free_pages=pages,
        pages_now=pages_now,
        done_seconds=scheduler.table.prefilled.seconds,
        interval_share=scheduler.forecast.interval_share,
        gap_share=scheduler.verification.gap_share if scheduler.verification is not None else 1.0,
        empty_pages=scheduler.pages.stock.num_empty,
        eviction_seconds=scheduler.pages.stock.cached.price(),
        adapters=adapters,
        adapter_use=adapter_use,
        adapter_load_s=scheduler.adapters.load_s if scheduler.adapters.num_slots else 0.0,
        encoder_cost=encoding.cost.coefficients if encoding.cost is not None else (),
        load_seconds=tuple([tier.load_s for tier in scheduler.loading.tiers.tiers]),
        load_queue=scheduler.loading.queued_s,
        tenants=tenants,
        weights=scheduler.weights,
        is_paused=scheduler.is_paused,
        in_flight_seconds=_in_flight_seconds(scheduler),
        started_seconds=_started_seconds(scheduler),
        ends=_ends(scheduler, wanted),
        lacking=lacking,
        starting=starting,
        lead_s=scheduler.forecast.lead(),
    )


def _adapters(scheduler: Scheduler) -> tuple[tuple[str, ...], AdapterUse]:
    """Return the fingerprints of the adapters in slots, those of streams first, and what their steps take more."""
    table = scheduler.table
    if not table.loaded_adapters:
        return (), AdapterUse()
    streams = [request for request in table.running if request.is_decoding]
    others = [each for each in (*table.running, *table.held, *table.waiting) if each.leg is not Leg.SEND]
    arriving = [each for each in others if not each.is_decoding]
    used = {stream.adapter.fingerprint for stream in streams if stream.adapter}
    in_order = sorted(table.loaded_adapters, key=lambda adapter: adapter not in used)
    return tuple(in_order), AdapterUse(len(used), adapter_work(streams), adapter_work([*streams, *arriving]))


def _prompts(scheduler: Scheduler) -> tuple[tuple[Prompts, ...], tuple[int, ...], tuple[TenantWork, ...]]:
    """Return the prompts with tokens left to compute, how many of them leave, by priority, and whose they are."""
    tenants, works = scheduler.table.tenants, dict[tuple[int, str], TenantWork]()
    groups: dict[tuple[int, int], list[float]] = {}
    leaving = [0] * len(scheduler.config.slo_classes)
    for request in scheduler.table.prefills():
        seconds = scheduler.forecast.prefill_seconds(request)
        group = groups.setdefault((request.priority, bisect(LENGTHS, seconds)), [0, 0, 0.0])
        group[0] += 1
        group[1] += request.num_uncached_tokens
        group[2] += seconds
        if tenants.in_use:
            key = request.priority, request.payer
            work = works.get(key) or TenantWork(key[1], key[0], request.weight, 0.0, tenants.lead_s(request))
            works[key] = work._replace(seconds=work.seconds + seconds)
        if request.leg is Leg.SEND or request.sampling.pooling is not None:
            leaving[request.priority] += 1
    prompts = (Prompts(*key, int(count), int(tokens), seconds) for key, (count, tokens, seconds) in groups.items())
    most = sorted(works.values(), key=lambda work: -work.seconds)[:MOST_TENANTS]
    return tuple(prompts), tuple(leaving), tuple(most)


def _in_flight_seconds(scheduler: Scheduler) -> float:
    """Return the predicted seconds of the chunks in steps that have begun; 0 without a cost."""
    chunks = [each for each in scheduler.table.running if each.num_in_flight_tokens and not each.is_decoding]
    forecast = scheduler.forecast
    seconds = [forecast.chunk_seconds(each, each.num_computed_tokens, each.num_in_flight_tokens) for each in chunks]
    return forecast.interval_share * sum(seconds)


def _started_seconds(scheduler: Scheduler) -> float:
    """Return the predicted seconds of the prompts that have pages, without the chunks in steps that have begun."""
    started = [each for each in scheduler.table.running if not each.is_decoding and each.num_uncached_tokens > 0]
    return sum([scheduler.forecast.prefill_seconds(each) for each in started])


def _ends(scheduler: Scheduler, wanted: Collection[int]) -> tuple[tuple[int, int], ...]:
    """Return, of the requests that are expected to end first, the tokens until then and the pages that it frees.

    Requests whose pages are sent end elsewhere. `wanted`: cached pages that requests which wait will keep."""
    table = scheduler.table
    ends = [(_tokens_left(table, each), each) for each in table.running if each.leg is not Leg.SEND]
    first = sorted(ends, key=lambda end: end[0])[:MOST_ENDS]
    arriving = [owner for owner, request in table.awaited.items() if request.status is Status.RUNNING]
    owners = [*arriving, *(each.owner for _, each in first)]  # what arrives is there before a request ends
    freed = scheduler.pages.num_freed_in_turn(owners, wanted)[len(arriving) :]
    return tuple([(left, now + table.num_growth_pages(each)) for (left, each), now in zip(first, freed, strict=True)])


def _tokens_left(table: RequestTable, request: Request) -> int:
    """Return the tokens until a request is expected to end. Before an output has ended, each takes all it may."""
    left: int = request.sampling.max_tokens - request.num_output_tokens
    return table.num_expected(request) if table.mean_output else max(left, 1)


def _streams(scheduler: Scheduler) -> tuple[tuple[int, ...], int]:
    """Return the number of streams by priority, and their tokens of context."""
    streams, context = [0] * len(scheduler.config.slo_classes), 0
    for request in scheduler.table.running:
        if request.is_decoding:
            streams[request.priority] += 1
            context += request.num_tokens
    return tuple(streams), context


def _free(
    scheduler: Scheduler,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Waiting, Waiting, set[int]]:
    """Return, by priority, how many more requests could start, the pages that are free for them, and those that are
    free now, while waiting requests that need more pages wait on; and of the first of these, and of the first others
    that wait, pages, seconds, and tokens of output; and the cached pages that they will share.

    Waiting requests go before new ones of their own class and of less urgent ones. A class can take the pages of less
    urgent requests. Room for the outputs of requests that run is not free.
    """
    num_classes = len(scheduler.config.slo_classes)
    places = [num_places(scheduler.table, priority) for priority in range(num_classes)]
    pages = [scheduler.pages.stock.num_available] * num_classes
    pool = scheduler.pages
    needs = PageNeeds(pool.page_size, pool.windows, scheduler.config.max_num_batched_tokens, pool.state_pages)
    for request in (*scheduler.table.running, *scheduler.table.held):
        if request.leg is not Leg.SEND:
            num_pages, growth = scheduler.pages.num_held_by(request.owner), scheduler.table.num_growth_pages(request)
            for priority in range(num_classes):
                pages[priority] += num_pages if priority < request.priority else -growth
    pages_now = [*pages]
    looks, lacking, starting = MOST_LOOKS, list[tuple[int, float, int]](), list[tuple[int, float, int]]()
    wanted = set[int]()
    arriving = {request.id: pool.num_held_by(owner) for owner, request in scheduler.table.awaited.items()}
    for request in scheduler.table.waiting:
        num_pages = needs.at_once(request.num_tokens, request.expected_cached_tokens // needs.page_size)
        if request.expected_cached_tokens and looks and request.id not in arriving:
            looks -= 1  # pages that are still to come take room, and cached pages that no request holds are free ones
            hit = kv.match_prefix(scheduler.table, request)
            wanted.update(hit.pages)
            num_pages = needs.at_once(request.num_tokens, hit.num_pages)
            num_pages += sum([page in pool.stock.cached for page in hit.pages])
        num_pages += scheduler.table.num_growth_pages(request)
        lacks = num_pages > pages_now[request.priority]
        if len(some := lacking if lacks else starting) < MOST_ENDS:
            seconds = 0.0 if request.leg is Leg.RECEIVE else scheduler.forecast.prefill_seconds(request)
            held = num_pages + arriving.get(request.id, 0)
            output = 0 if request.leg is Leg.SEND else _tokens_left(scheduler.table, request)
            some.append((held, seconds, output))
        for priority in range(request.priority, num_classes):
            places[priority] -= 1
            pages[priority] -= num_pages
            pages_now[priority] -= num_pages if num_pages <= pages_now[priority] else 0
    return tuple(places), tuple(pages), tuple(pages_now), tuple(lacking), tuple(starting), wanted
