"""Make the live profile that a replica publishes while it works, and say which prefixes its cache has.

A replica's own publisher, publisher.py, is the only source of both. live_profile.py says what they hold.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crossdock.workers.report.answer import Answer
from crossdock.workers.report.link import LinkCost
from crossdock.workers.report.live_profile import (
    LENGTHS,
    MOST_ENDS,
    MOST_TENANTS,
    AdapterUse,
    Decodes,
    Learnt,
    LiveProfile,
    LoadedAdapters,
    PageChanges,
    Prefills,
    Prompts,
    RecentShares,
    Room,
    TenantWork,
    TierLoads,
    WaitingRequest,
)
from crossdock.workers.report.profile import Role
from crossdock.workers.schedule import kv
from crossdock.workers.schedule.admission import num_slots
from crossdock.workers.schedule.request.request import Request, Status, TokenDelta, adapter_work
from crossdock.workers.schedule.request.submission import Leg
from crossdock.workers.schedule.scheduler import Scheduler
from crossdock.workers.schedule.table import RequestTable

MOST_LOOKS = 8  # waiting requests whose cached pages are looked at for a live profile


@dataclass(slots=True)
class Message:
    """Everything that a replica sends to one of its readers at once."""

    deltas: list[TokenDelta] = field(default_factory=list)
    live: LiveProfile | None = None  # if a new one is due; while the replica is quiet, the last one again
    pages: Sequence[PageChanges] = ()
    answers: Sequence[Answer] = ()  # to submissions of this reader
    peer: bytes = b""  # where other replicas reach its pages from now on; empty: where they did


def observe(
    scheduler: Scheduler,
    incarnation: str,
    sequence: int,
    shares: RecentShares = RecentShares(),  # noqa: B008  # immutable
    step_seconds: float = 0.0,
    link: LinkCost = LinkCost(),  # noqa: B008  # immutable
    role: Role | None = None,
) -> LiveProfile:
    """Return the live profile of a replica with this scheduler. The publisher gives the figures that are measured over
    time."""
    scheduler.table.outputs.grow()
    prefills, leaving = _prefills(scheduler)
    forecast = scheduler.forecast
    encoding = scheduler.encoding
    learnt = Learnt(
        cost=forecast.cost.advertised if forecast.cost is not None else (),
        interval_share=forecast.interval_share,
        overrun=forecast.overrun,
        gap_share=scheduler.verification.gap_share if scheduler.verification is not None else 1.0,
        encoder_cost=encoding.cost.coefficients if encoding.cost is not None else (),
    )
    tiers = TierLoads(tuple([tier.load_s for tier in scheduler.loading.tiers.tiers]), scheduler.loading.queued_s)
    return LiveProfile(
        incarnation,
        sequence,
        learnt,
        prefills,
        _streams(scheduler, leaving),
        _room(scheduler),
        shares,
        tiers,
        _adapters(scheduler),
        step_seconds,
        link,
        role,
        scheduler.weights,
        is_paused=scheduler.is_paused,
    )


def _adapters(scheduler: Scheduler) -> LoadedAdapters:
    """Return the adapters in slots, those of streams first, and how much they add to steps."""
    table = scheduler.table
    load_s = scheduler.adapters.load_s if scheduler.adapters.num_slots else 0.0
    if not table.loaded_adapters:
        return LoadedAdapters(load_s=load_s)
    streams = [request for request in table.running if request.is_decoding]
    others = [each for each in (*table.running, *table.held, *table.waiting) if each.leg is not Leg.SEND]
    arriving = [each for each in others if not each.is_decoding]
    used = {stream.adapter.fingerprint for stream in streams if stream.adapter}
    in_order = sorted(table.loaded_adapters, key=lambda adapter: adapter not in used)
    use = AdapterUse(len(used), adapter_work(streams), adapter_work([*streams, *arriving]))
    return LoadedAdapters(tuple(in_order), load_s, use)


def _prefills(scheduler: Scheduler) -> tuple[Prefills, tuple[int, ...]]:
    """Return the prompts with tokens left to compute, and how many of them leave, by priority."""
    tenants = scheduler.table.tenants
    works = dict[tuple[int, str], TenantWork]()
    groups: dict[tuple[int, int], list[float]] = {}
    leaving = [0] * len(scheduler.config.slo_classes)
    for request in scheduler.table.prefills():
        seconds = scheduler.forecast.prefill_seconds(request)
        group = groups.setdefault((request.priority, bisect(LENGTHS, seconds)), [0, 0, 0.0])
        group[0] += 1
        group[1] += request.num_uncached_tokens
        group[2] += seconds
        if tenants.in_use:
            key = request.priority, request.tenant
            work = works.get(key) or TenantWork(key[1], key[0], request.submission.weight, 0.0, tenants.lead_s(request))
            works[key] = work._replace(seconds=work.seconds + seconds)
        if request.leg is Leg.SEND or request.sampling.pooling is not None:
            leaving[request.priority] += 1
    prompts = [Prompts(*key, int(count), int(tokens), seconds) for key, (count, tokens, seconds) in groups.items()]
    most = sorted(works.values(), key=lambda work: -work.seconds)[:MOST_TENANTS]
    found = Prefills(
        tuple(prompts),
        scheduler.forecast.in_flight_seconds(),
        _started_seconds(scheduler),
        scheduler.table.prefilled.seconds,
        tuple(most),
    )
    return found, tuple(leaving)


def _started_seconds(scheduler: Scheduler) -> float:
    """Return the predicted seconds of the prompts that have pages, without the chunks in steps that have begun."""
    started = [each for each in scheduler.table.running if not each.is_decoding and each.num_uncached_tokens > 0]
    return sum([scheduler.forecast.prefill_seconds(each) for each in started])


def _ends(scheduler: Scheduler, wanted: set[int], growths: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """Return, of the requests that are expected to end first, the tokens until then and the pages that it frees.

    An output longer than the mean says little about its own end. But so many requests end no faster than one in each
    part of a mean output, however their lengths vary. Requests whose pages are sent end elsewhere. `wanted`: cached
    pages that requests which wait will keep. `growths`: growth pages of the requests that run, by owner."""
    table = scheduler.table
    mean = table.outputs.mean
    ends = [(_tokens_to_mean(table, each, mean), each) for each in table.running if each.leg is not Leg.SEND]
    part = mean / max(len(ends), 1)
    first = [
        (min(max(left, int(number * part)), max(table.most_left(each), left)), each)
        for number, (left, each) in enumerate(sorted(ends, key=lambda end: end[0])[:MOST_ENDS], start=1)
    ]
    first.sort(key=lambda end: end[0])
    arriving = [owner for owner, request in table.awaited.items() if request.status is Status.RUNNING]
    owners = [*arriving, *(each.owner for _, each in first)]  # what arrives is there before a request ends
    freed = scheduler.pages.num_freed_in_turn(owners, wanted)[len(arriving) :]
    return tuple([(left, now + growths[each.owner]) for (left, each), now in zip(first, freed, strict=True)])


def _tokens_to_mean(table: RequestTable, request: Request, mean: float) -> int:
    """Return the tokens until a request has a mean output, a page at least. Before an output has ended, each takes all
    it may."""
    most = table.most_left(request)
    return min(most, max(int(mean) - request.num_output_tokens, table.pages.page_size)) if mean else max(most, 1)


def _streams(scheduler: Scheduler, leaving: tuple[int, ...]) -> Decodes:
    """Return the streams, and the requests that will decode here."""
    table = scheduler.table
    num_classes = len(scheduler.config.slo_classes)
    counts = [0] * num_classes
    arriving = [0] * num_classes
    context = 0
    for request in table.running:
        if request.is_decoding:
            counts[request.priority] += 1
            context += request.num_tokens
    for request in (*table.held, *table.waiting):
        if request.leg is Leg.RECEIVE:
            arriving[request.priority] += 1
    return Decodes(tuple(counts), context, tuple(arriving), leaving, scheduler.forecast.lead())


def _room(scheduler: Scheduler) -> Room:
    """Return the room for further requests.

    Waiting requests go before new ones of their own class and of less urgent ones, those whose prompts other replicas
    compute before all others: no request passes these. A class can take the pages of less urgent requests. Room for the
    outputs of requests that run is not free.
    """
    table = scheduler.table
    mean = table.outputs.mean
    num_classes = len(scheduler.config.slo_classes)
    slots = [num_slots(table, priority) for priority in range(num_classes)]
    pages = [scheduler.pages.block_pool.num_available] * num_classes
    pool = scheduler.pages
    needs = table.needs
    growths = dict[str, int]()  # growth pages by owner
    for request in (*table.running, *table.held):
        if request.leg is not Leg.SEND:
            num_pages = scheduler.pages.num_held_by(request.owner)
            growth = growths[request.owner] = table.num_growth_pages(request)
            for priority in range(num_classes):
                pages[priority] += num_pages if priority < request.priority else -growth
    pages_now = [*pages]
    looks = MOST_LOOKS
    lacking = list[WaitingRequest]()
    starting = list[WaitingRequest]()
    wanted = set[int]()  # cached pages that requests which wait will share
    arriving = {request.id: pool.num_held_by(owner) for owner, request in table.awaited.items()}
    for request in sorted(table.waiting, key=lambda each: each.leg is not Leg.RECEIVE):
        num_pages = needs.at_once(request.num_tokens, request.expected_cached_tokens // needs.page_size)
        if request.expected_cached_tokens and looks and request.id not in arriving:
            looks -= 1  # pages that are still to come take room, and cached pages that no request holds are free ones
            hit = kv.match_prefix(scheduler.table, request)
            wanted.update(hit.pages)
            num_pages = needs.at_once(request.num_tokens, hit.num_pages)
            num_pages += sum([page in pool.block_pool.cached for page in hit.pages])
        num_pages += table.num_growth_pages(request)
        lacks = num_pages > pages_now[request.priority]
        if len(some := lacking if lacks else starting) < MOST_ENDS:
            seconds = 0.0 if request.leg is Leg.RECEIVE else scheduler.forecast.prefill_seconds(request)
            held = num_pages + arriving.get(request.id, 0)
            output = 0 if request.leg is Leg.SEND else _tokens_to_mean(table, request, mean)
            is_due = request.is_offered or request.leg is not Leg.RECEIVE
            waited_s = max(int(table.now - request.arrival_time), 0) if lacks and is_due else 0
            some.append(WaitingRequest(held, seconds, output, waited_s))
        for priority in range(request.priority, num_classes):
            slots[priority] -= 1
            pages[priority] -= num_pages
            pages_now[priority] -= num_pages if num_pages <= pages_now[priority] else 0
    block_pool = scheduler.pages.block_pool
    return Room(
        tuple(slots),
        tuple(pages),
        tuple(pages_now),
        block_pool.num_empty,
        block_pool.cached.price(),
        _ends(scheduler, wanted, growths),
        tuple(lacking),
        tuple(starting),
    )
