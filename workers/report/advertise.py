"""What a replica says of itself while it works: what it has to do now, and which prefixes it has. Its own publisher is
the only source of either; the static part of its profile says what it can do."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf

from crossdock.workers.report.profile import Role
from crossdock.workers.schedule.pages import PageHash
from crossdock.workers.schedule.request import Leg, Request, TokenDelta
from crossdock.workers.schedule.scheduler import Scheduler

LENGTHS = tuple(4.0**power for power in range(-3, 4))
"""Seconds that tell short prompts from long ones: how much longer one makes another wait depends on which is longer."""

MEMORY_S = 5.0  # of what its time went into


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of one class and about one length that are not computed yet, all parts of them that are left."""

    priority: int
    length: int  # place among `LENGTHS`
    count: int
    tokens: int
    seconds: float  # that they take alone, by the replica's own reckoning


@dataclass(frozen=True, slots=True)
class LiveProfile:
    """What a replica has to do. Plain data: it crosses processes many times a second."""

    incarnation: str  # of the process: a new one begins its sequence anew
    sequence: int
    cost: tuple[float, ...]  # `StepCost.coefficients`, as refined by now; empty: unknown
    prompts: tuple[Prompts, ...] = ()
    streams: tuple[int, ...] = ()  # decodes, by priority
    context_tokens: int = 0  # of all streams together
    remaining_tokens: int = 0  # that the streams may still make, all together
    arriving: tuple[int, ...] = ()  # by priority: their prompts are computed elsewhere, their tokens will be here
    leaving: tuple[int, ...] = ()  # by priority: their prompts are computed here, their tokens will be elsewhere
    places: tuple[int, ...] = ()  # by priority: how many more could begin; below 0, so many that wait could not
    free_pages: tuple[
        int, ...
    ] = ()  # by priority: less what those that wait will take, and what the class below gives up
    prompt_shares: tuple[float, ...] = ()  # by priority: of its time, what went into prompts of late
    stream_share: float = 0.0  # of its time, what streams kept from prompts of late
    step_seconds: float = 0.0  # of the last step; 0: nothing is running
    bytes_per_second: float = 0.0  # of pages on their way to others, of late; 0: none were
    done_seconds: float = 0.0  # of prompts it has computed since it started, as `Prompts.seconds` counts them
    role: Role | None = None  # what it is kept for now; None: what its profile says


@dataclass(frozen=True, slots=True)
class PageChanges:
    """Which page hashes have become findable at a replica, and which are no longer."""

    incarnation: str
    number: int  # one more than that of the changes before; a reader that misses one knows nothing any more
    added: Sequence[PageHash]  # beginnings of prefixes before their ends
    evicted: Sequence[PageHash] = ()
    is_all: bool = False  # `added` is all there is: a reader begins here, whatever it knew


@dataclass(slots=True)
class Message:
    """What travels from a replica to one of its readers at once."""

    deltas: list[TokenDelta] = field(default_factory=list)
    live: LiveProfile | None = None  # where it was time to say something new; the last one again where all is quiet
    pages: Sequence[PageChanges] = ()


def observe(
    scheduler: Scheduler,
    incarnation: str,
    sequence: int,
    step_seconds: float = 0.0,
    prompt_shares: tuple[float, ...] = (),
    stream_share: float = 0.0,
    bytes_per_second: float = 0.0,
    role: Role | None = None,
) -> LiveProfile:
    """The live part of the profile of a replica with this scheduler."""
    classes = scheduler.config.slo_classes
    groups: dict[tuple[int, int], list[float]] = {}
    leaving = [0] * len(classes)
    for request in scheduler.prefills():
        seconds = scheduler.prefill_seconds(request)
        group = groups.setdefault((request.priority, bisect(LENGTHS, seconds)), [0, 0, 0.0])
        group[0] += 1
        group[1] += request.num_uncached_tokens
        group[2] += seconds
        if request.leg is Leg.SEND:
            leaving[request.priority] += 1
    streams, context, remaining = [0] * len(classes), 0, 0
    for request in scheduler.running:
        if request.is_decoding:
            streams[request.priority] += 1
            context += request.num_tokens
            remaining += _num_remaining(request)
    arriving = [0] * len(classes)
    for request in (*scheduler.held, *scheduler.waiting):
        if request.leg is Leg.RECEIVE:
            arriving[request.priority] += 1
    places, pages = _room(scheduler)
    return LiveProfile(
        incarnation,
        sequence,
        scheduler.cost.coefficients if scheduler.cost is not None else (),
        tuple(Prompts(*key, int(count), int(tokens), seconds) for key, (count, tokens, seconds) in groups.items()),
        tuple(streams),
        context,
        remaining,
        tuple(arriving),
        tuple(leaving),
        places,
        pages,
        prompt_shares,
        stream_share,
        step_seconds if scheduler.has_work else 0.0,
        bytes_per_second,
        scheduler.prefilled.seconds,
        role,
    )


def _room(scheduler: Scheduler) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """By priority: how many more could begin, and the pages that are free for them. Who waits is ahead of those of its
    class and of the less urgent; and a class takes the pages of the less urgent."""
    num_classes = len(scheduler.config.slo_classes)
    places = [scheduler.num_places(priority) for priority in range(num_classes)]
    pages = [scheduler.pages.num_available] * num_classes
    for request in scheduler.waiting:
        num_pages = -(-(request.num_tokens - request.expected_cached_tokens) // scheduler.pages.page_size)
        for priority in range(request.priority, num_classes):
            places[priority] -= 1
            pages[priority] -= num_pages
    for request in scheduler.running:
        if request.priority and request.leg is not Leg.SEND:
            num_pages = len(scheduler.pages.pages_of(request.owner))
            for priority in range(request.priority):
                pages[priority] += num_pages
    return tuple(places), tuple(pages)


def _num_remaining(request: Request) -> int:
    return max(request.sampling.max_tokens - request.num_output_tokens, 1)


@dataclass(slots=True)
class Publisher:
    """Numbers what a replica says of itself, and says it seldom: at once when it begins to work and when it is done; at
    most every `interval_s` while requests come, end or have their prompts computed; and every `steady_s` while streams
    only go on, of which there is little to tell."""

    scheduler: Scheduler
    incarnation: str
    interval_s: float = 0.05
    steady_s: float = 1.0
    role: Role | None = None
    sequence: int = 0  # of the last live profile: a request that is added now is in the next one
    _number: int = 0  # of the last page changes
    _was_busy: bool = False
    _spoke: float = 0.0  # when it last did
    _said: tuple[int, ...] = ()  # `_requests` then
    _work: list[int] = field(default_factory=list)  # by priority, when it last spoke
    _shares: dict[int, float] = field(default_factory=dict)  # by priority
    _step_seconds: float = 0.0
    _kept: float = 0.0  # share of its time that streams kept from prompts when it last spoke
    _mean_kept: float = 0.0
    _bytes_per_second: float = 0.0

    def is_due(self, now: float) -> bool:
        """Whether to say something new at `now`, in seconds."""
        return now >= self.due

    @property
    def due(self) -> float:
        """When to say something new, if until then streams only go on."""
        is_busy = self._is_busy
        if not is_busy or not self._was_busy:
            return inf if is_busy == self._was_busy else -inf
        return self._spoke + (self.interval_s if self._requests != self._said else self.steady_s)

    def live(self, now: float, step_seconds: float = 0.0) -> LiveProfile:
        """What is to be said at `now`, after a step that took `step_seconds`; 0: none was since the last time."""
        self.sequence += 1
        self._was_busy, self._said = self._is_busy, self._requests
        self._step_seconds = step_seconds or self._step_seconds
        return observe(
            self.scheduler,
            self.incarnation,
            self.sequence,
            self._step_seconds,
            *self._shares_of_time(now),
            self._bytes_per_second,
            self.role,
        )

    def keep_for(self, role: Role) -> None:
        """It is kept for something else from now on, and says so at once."""
        self.role, self._was_busy = role, not self._is_busy

    def _shares_of_time(self, now: float) -> tuple[tuple[float, ...], float]:
        """What went into prompts, by priority, and what streams kept from them, of the last seconds, the latest counting
        most."""
        seconds, self._spoke = now - self._spoke, now
        keep = exp(-seconds / MEMORY_S)
        self._mean_kept = keep * self._mean_kept + (1 - keep) * self._kept
        self._kept = 1 - self.scheduler.prefill_share(0)
        cost = self.scheduler.cost.per_prefill_token if self.scheduler.cost is not None else 0.0
        priorities = range(len(self.scheduler.config.slo_classes))
        work = [self.scheduler.prefilled.tokens_by_priority[priority] for priority in priorities]
        before, self._work = self._work or work, work
        for priority in priorities if seconds > 0 else ():
            now_share = min((work[priority] - before[priority]) * cost / seconds, 1.0)
            self._shares[priority] = keep * self._shares.get(priority, 0.0) + (1 - keep) * now_share
        return tuple(self._shares.get(priority, 0.0) for priority in priorities), self._mean_kept

    def transferred(self, num_bytes: int, seconds: float) -> None:
        """Pages have gone to another replica."""
        rate = num_bytes / max(seconds, 1e-6)
        self._bytes_per_second += (rate - self._bytes_per_second) * (0.2 if self._bytes_per_second else 1.0)

    def page_changes(self) -> Sequence[PageChanges]:
        """What became of pages since the last call."""
        added, evicted = self.scheduler.pages.take_changes()
        if not added and not evicted:
            return ()
        self._number += 1
        return (PageChanges(self.incarnation, self._number, added, evicted),)

    def all_pages(self) -> PageChanges:
        """For a reader that begins now, after the others were given `page_changes`: it goes on with their next."""
        return PageChanges(self.incarnation, self._number, self.scheduler.pages.findable(), is_all=True)

    @property
    def _is_busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self.scheduler.held)

    @property
    def _requests(self) -> tuple[int, ...]:
        """Another whenever a request has come, ended, or had some of its prompt computed."""
        it = self.scheduler
        return len(it.waiting), len(it.running), len(it.held), it.prefilled.tokens
