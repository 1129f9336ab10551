"""The live part of what a replica advertises: its work, its room, and what it has learnt of its own seconds.

advertise.py makes it from a scheduler. profile.py has the static part.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from crossdock.workers.report.link import LinkCost
from crossdock.workers.report.profile import Role
from crossdock.workers.schedule.cost.cost import NO_ADAPTERS, AdapterWork
from crossdock.workers.schedule.request.page_hashes import PageHash
from crossdock.workers.schedule.request.weight_version import WeightVersion

LENGTHS = tuple(4.0**power for power in range(-3, 4))
"""Seconds that divide prompts by length, 16 ms to 64 s: shorter prompts go before a new one, and longer ones after it.

With factors of 4 between them, eight groups per class span all prompts, and a live profile stays below 1,000 bytes.
"""


MEMORY_S = 5.0
"""Seconds over which shares of a replica's time are averaged: a weight falls to 1/e in this time.

It spans several prompts of seconds each, and follows a load that changes within a minute. Routers depend on it little:
with 0.5, 5 and 50 s, the p90 error of predicted TTFT is 72, 70 and 66 %
(`crossdock simulate --pools mixed=4xh100-8b --request-rate 100 --mix bursty`, 2026-11-22).
"""

MOST_ENDS = 8  # in a live profile, requests that will end first
MOST_TENANTS = 16  # in a live profile, those whose prompts take most seconds; about 40 bytes each
HEARTBEAT_S = 1.0  # silence after which a replica repeats its last report


class WaitingRequest(NamedTuple):
    """A request that has no pages yet."""

    pages: int  # pages that the request needs
    seconds: float  # of its prompt
    output: int  # tokens that it is expected to make
    waited_s: int = 0  # whole seconds since it came; 0 while another replica has not begun to compute its prompt


class Prompts(Struct, frozen=True):
    """Prompts of one class and similar length with tokens left to compute."""

    priority: int
    length: int  # index of the group between `LENGTHS`
    count: int
    tokens: int  # left to compute, of all together
    seconds: float  # seconds that these tokens take alone, as predicted by the replica


class TenantWork(NamedTuple):
    """The prompts of one tenant in one class that wait at a replica, and how far ahead of others the tenant is."""

    tenant: str
    priority: int
    weight: float
    seconds: float  # predicted seconds of its waiting prompts
    lead_s: float  # seconds that it has had beyond the waiting tenant that has had least, divided by its weight


class AdapterUse(NamedTuple):
    """Tells how much the adapters of requests add to a replica's steps."""

    num_used: int = 0  # adapters of streams
    now: AdapterWork = NO_ADAPTERS  # of the streams, all in one step
    future: AdapterWork = NO_ADAPTERS  # of the streams and of the requests that will decode here


class Learnt(NamedTuple):
    """Tells what a replica has learnt of its own seconds; while empty, its static profile counts."""

    cost: tuple[float, ...] = ()  # `StepCost.coefficients`; empty: unknown
    interval_share: float = 1.0  # interval of steps / seconds of one, with `cost`
    overrun: float = 1.0  # factor by which some steps take longer than predicted, with `cost`
    gap_share: float = 1.0  # recent seconds per token of streams with drafts, as a share of those without
    encoder_cost: tuple[float, ...] = ()  # base, per row, per square of rows; empty: the static profile's


class Prefills(NamedTuple):
    """The prompts that a replica computes."""

    groups: tuple[Prompts, ...] = ()
    in_flight_seconds: float = 0.0  # of the chunks in steps that have begun; `groups` has the other tokens
    started_seconds: float = 0.0  # of the prompts that have pages, without these chunks
    done_seconds: float = 0.0  # of prompts computed since the start, in the unit of `Prompts.seconds`
    tenants: tuple[TenantWork, ...] = ()  # the tenants with most work; empty: tenants are not told apart


class Decodes(NamedTuple):
    """The requests that decode on a replica, and those that will."""

    counts: tuple[int, ...] = ()  # of decoding requests, by priority
    context_tokens: int = 0  # of all streams together
    arriving: tuple[int, ...] = ()  # requests prefilled elsewhere that will decode here, by priority
    leaving: tuple[int, ...] = ()  # requests prefilled here that will decode elsewhere or not at all, by priority
    lead_s: float = 0.0  # seconds that all streams are ahead of their mean, which they lend to prompts


class Room(NamedTuple):
    """The slots and pages that a replica has free, by priority where there are several."""

    slots: tuple[int, ...] = ()  # requests that could still start; negative: so many must wait
    free_pages: tuple[int, ...] = ()  # without those for waiting requests, with those of less urgent requests
    pages_now: tuple[int, ...] = ()  # `free_pages` before waiting requests that lack pages: shorter prompts pass these
    empty_pages: int = 0  # pages that can be taken without evicting a cached page
    eviction_seconds: float = 0.0  # of prefill that one more evicted page is expected to cost
    ends: tuple[tuple[int, int], ...] = ()  # (tokens, pages) of those that will end first: expected until then, freed
    lacking: tuple[WaitingRequest, ...] = ()  # the first requests that wait without room
    starting: tuple[WaitingRequest, ...] = ()  # the first requests that wait with room, which `pages_now` lacks


class RecentShares(NamedTuple):
    """Shares of a replica's time, averaged over `MEMORY_S`."""

    prompts: tuple[float, ...] = ()  # shares that went into prompts, by priority
    streams: float = 0.0  # share that streams did not leave to prompts


class TierLoads(NamedTuple):
    """Prices the loads of pages from the tiers below its pool."""

    page_seconds: tuple[float, ...] = ()  # of a page, from each tier, fastest first
    queue_seconds: float = 0.0  # until all loads that have begun will have ended


class LoadedAdapters(NamedTuple):
    """The adapters that a replica has in its slots."""

    fingerprints: tuple[str, ...] = ()  # fingerprints of streams' adapters come first
    load_s: float = 0.0  # recent mean seconds to load another one
    use: AdapterUse = AdapterUse()


class LiveProfile(Struct, frozen=True):
    """The work of a replica. Plain data: it crosses processes many times a second."""

    incarnation: str  # of the process: a new process starts its sequence again
    sequence: int
    learnt: Learnt = Learnt()
    prefills: Prefills = Prefills()
    streams: Decodes = Decodes()
    room: Room = Room()
    shares: RecentShares = RecentShares()
    tiers: TierLoads = TierLoads()
    adapters: LoadedAdapters = LoadedAdapters()
    step_seconds: float = 0.0  # from the step before to the last step's end; 0: no request is running
    link: LinkCost = LinkCost()  # of recent page transfers to other replicas
    role: Role | None = None  # the replica's role now; None: the role in its static profile
    weights: WeightVersion = WeightVersion()
    is_paused: bool = False  # it computes nothing until its operator lets it go on


class PageChanges(Struct, frozen=True):
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
