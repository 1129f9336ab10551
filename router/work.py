"""Everything one replica has to do, as a router knows it: what its live profile reports, and what was booked since."""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from crossdock.workers.report.advertise import LENGTHS, LiveProfile
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import NO_ADAPTERS, AdapterWork, StepCost, StepWork
from crossdock.workers.schedule.pacing.chunk_policies import NOTHING_LENT, Beside, Lent, lent_beside, meaning_of
from crossdock.workers.schedule.slo import SloClass

EXPECTED_OUTPUT_TOKENS = 128
"""Tokens that an output is assumed to have, unless the request allows fewer: `max_tokens` is a bound that few outputs
reach. Weighs a replica's speed of decoding against its TTFT, and sets when booked streams free their room. Commands in
placement.py: with 16, good requests fall from 97.1 to 96.7 % in loaded and from 95.4 to 95.1 % in knee."""

REPORTED, BOOKED = 0, 1  # where a waiting prompt is known from: the replica's live profile, or this router's booking

Group: TypeAlias = tuple[int, int, int, float, float]
"""Waiting prompts of one class and about one length: (REPORTED or BOOKED, priority, position, count, seconds)."""


@dataclass(slots=True)
class Booking:
    """One request that a router placed on a replica; seconds are that replica's."""

    priority: int
    tokens: int  # of the prompt
    seconds: float  # to compute the uncached prompt here; 0: another replica computes the prompt
    pages: int  # KV pages the request takes here
    decodes: bool  # whether this replica makes the output
    adapter: str = ""  # fingerprint of the adapter that the request needs; empty: none
    payer: str = ""  # the tenant whose share it uses; empty: tenants are not told apart
    weight: float = 1.0  # of that tenant
    has_first: bool = False  # whether the prompt is computed and the first token is out
    at: float = 0.0  # when it was placed, in seconds
    output: int = EXPECTED_OUTPUT_TOKENS  # tokens that it is expected to make
    idle_pages: int = 0  # of `pages`, cached ones that no request holds: no others are evicted for these
    adapter_weights: int = 0  # numbers in the matrices of the adapter

    def take_first_token(self) -> None:
        """Note that the prompt is computed."""
        self.has_first = True


_Prompts: TypeAlias = dict[tuple[int, int], tuple[float, float]]
"""Prompts that wait, by (priority, length, a place in `LENGTHS`): (count, seconds of all of them)."""


@dataclass(slots=True)
class Work:
    """Everything one replica has to do: what its live profile reports, and what a router has booked since."""

    streams: list[float]  # by priority: streams that decode here now
    joining: list[float]  # by priority: streams, and those whose prompts other replicas compute
    arriving: list[float]  # by priority: streams of the future that do not decode yet, less those that will leave
    reported: _Prompts
    booked: _Prompts
    context: float  # tokens of the streams
    future_context: float  # tokens of the streams that arrive
    booked_needs: list[int] = field(default_factory=list)  # pages of each booking
    booked_idle_pages: int = 0  # of all these pages, cached ones that no request holds
    booked_places: int = 0
    adapters: AdapterWork = NO_ADAPTERS  # of the streams
    future_adapters: AdapterWork = NO_ADAPTERS  # of the streams and those that arrive
    used_adapters: set[str] = field(default_factory=set)  # fingerprints

    @classmethod
    def of(cls, live: LiveProfile, num_classes: int, booked: Iterable[Booking] = ()) -> "Work":
        """Make the work of one replica from its live profile. `booked`: what this does not include."""
        streams, arriving = _by_priority(live.streams, num_classes), _by_priority(live.arriving, num_classes)
        joining = [now + more for now, more in zip(streams, arriving, strict=True)]
        prompts: _Prompts = {}
        num_prompts, prompt_tokens = 0, 0.0
        for group in live.prompts:
            priority = group.priority if group.priority < num_classes else num_classes - 1
            had, had_seconds = prompts.get((priority, group.length), (0.0, 0.0))
            prompts[priority, group.length] = had + group.count, had_seconds + group.seconds
            arriving[priority] += group.count
            num_prompts += group.count
            prompt_tokens += group.tokens
        num_leaving = sum(live.leaving)
        if num_leaving:  # the profile does not report how many of the tokens belong to prompts that leave
            prompt_tokens *= 1 - min(num_leaving / max(num_prompts, 1), 1)
            for priority, count in enumerate(_by_priority(live.leaving, num_classes)):
                arriving[priority] -= count
        work = cls(
            *(streams, joining, arriving, prompts, {}, live.context_tokens, prompt_tokens),
            adapters=live.adapter_use.now,
            future_adapters=live.adapter_use.future,
            used_adapters=set(live.adapters[: live.adapter_use.num_used]),
        )
        for booking in booked:
            work.book(booking)
        return work

    def book(self, booking: Booking) -> None:
        """Add a request that the live profile does not include."""
        priority = min(booking.priority, len(self.streams) - 1)
        if booking.seconds and not booking.has_first:
            key = priority, bisect(LENGTHS, booking.seconds)
            had, had_seconds = self.booked.get(key, (0.0, 0.0))
            self.booked[key] = had + 1, had_seconds + booking.seconds
        if booking.decodes and booking.has_first:
            self.streams[priority] += 1
            self.joining[priority] += 1
            self.context += booking.tokens
        elif booking.decodes:
            self.arriving[priority] += 1
            self.joining[priority] += not booking.seconds
            self.future_context += booking.tokens
        if booking.decodes and booking.adapter_weights:
            self._add_adapter(booking)
        if booking.decodes or not booking.has_first:
            self.booked_needs.append(booking.pages)
            self.booked_idle_pages += booking.idle_pages
            self.booked_places += 1

    def _add_adapter(self, booking: Booking) -> None:
        """Count the adapter of one more stream; its matrices are read once for all streams that have it."""
        read = 0 if booking.adapter in self.used_adapters else booking.adapter_weights
        self.used_adapters.add(booking.adapter)
        if booking.has_first:
            self.adapters = self.adapters.plus(read, booking.adapter_weights)
        self.future_adapters = self.future_adapters.plus(read, booking.adapter_weights)

    def backlog(self, num_classes: int) -> tuple[list[Group], list[int], tuple[list[float], list[float]]]:
        """Return the groups of waiting prompts, the shortest of each class first; and by priority how many positions
        they fill, and the seconds of prompts of more urgent classes: reported, and booked."""
        groups: list[Group] = []
        num_groups, urgent = [0] * num_classes, ([0.0] * num_classes, [0.0] * num_classes)
        for source, prompts in ((REPORTED, self.reported), (BOOKED, self.booked)):
            last, position = -1, 0
            for (priority, _), (count, seconds) in sorted(prompts.items()):
                position = position + 1 if priority == last else 0
                last = priority
                groups.append((source, priority, position, count, seconds))
                num_groups[priority] = max(num_groups[priority], position + 1)
                for less_urgent in range(priority + 1, num_classes):
                    urgent[source][less_urgent] += seconds
        return groups, num_groups, urgent

    def room(
        self, profile: SchedulingProfile, live: LiveProfile, num_classes: int
    ) -> tuple[list[float], list[float], list[float], float, float]:
        """Return, by priority: free pages, free places, and tokens of the longest prompt that need not wait for either;
        and the pages that are free before the bookings, and after those that have room. A booking takes room from every
        class."""
        pages: Sequence[float] = live.free_pages
        pages_now: Sequence[float] = live.pages_now or pages
        places: Sequence[float] = live.places
        if len(pages) != num_classes or len(places) != num_classes:
            pages = _padded(pages, profile.num_pages, num_classes)
            pages_now = _padded(pages_now, profile.num_pages, num_classes)
            places = _padded(places, profile.max_num_seqs, num_classes)
        before, booked = pages_now[-1], sum(self.booked_needs)
        for need in self.booked_needs:
            pages_now = [free - need if need <= free else free for free in pages_now]  # others pass those that wait
        free_places = [free - self.booked_places for free in places]
        needs = profile.needs
        longest: list[float] = [
            needs.longest_prompt(free) if place >= 1 else -1.0
            for free, place in zip(pages_now, free_places, strict=True)
        ]
        return [free - booked for free in pages], free_places, longest, before, pages_now[-1]

    def prefill_shares(
        self,
        profile: SchedulingProfile,
        cost: StepCost,
        interval_share: float,
        classes: Sequence[SloClass],
        lead: float,
    ) -> tuple[list[float], Lent]:
        """Return the share of time that a prompt of each class gets while the streams run, as `Forecast.prefill_share`
        does, and what streams lend that are `lead` seconds ahead. Streams whose prompts other replicas compute count as
        if they ran."""
        num_joining = sum(self.joining)
        if not num_joining:
            return [1.0] * len(classes), NOTHING_LENT
        depth = profile.pipeline_parallel_size
        streams = StepWork.of_streams(num_joining, self.context, self.adapters, depth)
        tpot = min([slo.tpot_s for slo, count in zip(classes, self.joining, strict=True) if count])
        overrun = profile.overrun * max(depth * interval_share, 1.0)
        beside = streams, cost.seconds(streams), tpot, overrun, profile.max_num_batched_tokens, profile.page_size
        meaning, urgent = meaning_of(profile.chunk_policy), Beside(*beside, is_urgent=True)
        shares = [meaning.share(cost, urgent, profile.min_chunk_tokens)]
        lent = lent_beside(cost, urgent, shares[0], lead) if meaning.fits_streams else NOTHING_LENT
        shares *= first_nonzero(self.joining) + 1
        if len(shares) < len(classes):  # less urgent than every stream: no chunk is certain
            shares += [meaning.share(cost, Beside(*beside, is_urgent=False), 0)] * (len(classes) - len(shares))
        return shares, lent


def first_nonzero(counts: Sequence[float]) -> int:
    """Return the priority of the most urgent class that has any; the number of classes if none has."""
    for priority, count in enumerate(counts):
        if count:
            return priority
    return len(counts)


def _by_priority(reported: Sequence[float], num_classes: int) -> list[float]:
    """Return counts for the router's classes. During an upgrade a replica may have more classes than this router knows,
    which count as the least urgent one, or fewer."""
    if len(reported) == num_classes:
        return [*reported]
    known = [*reported[:num_classes], *[0.0] * (num_classes - len(reported))]
    known[-1] += sum(reported[num_classes:])
    return known


def _padded(reported: Sequence[float], default: float, num_classes: int) -> list[float]:
    """Return figures for the router's classes, with a default for classes that the replica does not have."""
    return [*reported[:num_classes], *[default] * (num_classes - len(reported))]
