"""Everything one replica has to do, as a router knows it: what its live profile reports, and what was booked since."""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from crossdock.router.query import Query
from crossdock.workers.report.live_profile import LENGTHS, LiveProfile
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import NO_ADAPTERS, AdapterWork
from crossdock.workers.schedule.first_token import Decoding

# Where a waiting prompt is known from: the replica's live profile, or this router's own in-flight load.
REPORTED = 0
BOOKED = 1

Group: TypeAlias = tuple[int, int, int, float, float]
"""Waiting prompts of one class and about one length: (REPORTED or BOOKED, priority, position, count, seconds)."""


@dataclass(slots=True)
class InFlightLoad:
    """One request that a router placed on a replica; seconds are that replica's."""

    query: Query
    priority: int
    seconds: float  # to compute the uncached prompt here; 0: another replica computes the prompt
    pages: int  # KV pages the request takes here
    decodes: bool  # whether this replica makes the output
    at: float = 0.0  # when it was placed, in seconds
    idle_pages: int = 0  # of `pages`, cached ones that no request holds: no others are evicted for these
    has_first: bool = False  # whether the prompt is computed and the first token is out

    def take_first_token(self) -> None:
        """Note that the prompt is computed."""
        self.has_first = True


class FreeRoom(NamedTuple):
    """The room of one replica that its in-flight loads leave, by priority where there are several."""

    pages: Sequence[float]
    slots: Sequence[float]
    longest_prompt: Sequence[float]  # tokens, of a prompt that need wait for neither
    pages_before: float  # free for the least urgent class, without any in-flight load
    pages_now: float  # the same with the in-flight loads that have room


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
    booked_needs: list[int] = field(default_factory=list)  # pages of each in-flight load
    booked_idle_pages: int = 0  # of all these pages, cached ones that no request holds
    booked_seq_slots: int = 0
    adapters: AdapterWork = NO_ADAPTERS  # of the streams
    future_adapters: AdapterWork = NO_ADAPTERS  # of the streams and those that arrive
    used_adapters: set[str] = field(default_factory=set)  # fingerprints

    @classmethod
    def of(cls, live: LiveProfile, num_classes: int, booked: Iterable[InFlightLoad] = ()) -> "Work":
        """Make the work of one replica from its live profile. `booked`: what this does not include."""
        streams = _by_priority(live.streams.counts, num_classes)
        arriving = _by_priority(live.streams.arriving, num_classes)
        joining = [now + more for now, more in zip(streams, arriving, strict=True)]
        prompts: _Prompts = {}
        num_prompts = 0
        prompt_tokens = 0.0
        for group in live.prefills.groups:
            priority = group.priority if group.priority < num_classes else num_classes - 1
            had, had_seconds = prompts.get((priority, group.length), (0.0, 0.0))
            prompts[priority, group.length] = had + group.count, had_seconds + group.seconds
            arriving[priority] += group.count
            num_prompts += group.count
            prompt_tokens += group.tokens
        num_leaving = sum(live.streams.leaving)
        if num_leaving:  # the profile does not report how many of the tokens belong to prompts that leave
            prompt_tokens *= 1 - min(num_leaving / max(num_prompts, 1), 1)
            for priority, count in enumerate(_by_priority(live.streams.leaving, num_classes)):
                arriving[priority] -= count
        work = cls(
            *(streams, joining, arriving, prompts, {}, live.streams.context_tokens, prompt_tokens),
            adapters=live.adapters.use.now,
            future_adapters=live.adapters.use.future,
            used_adapters=set(live.adapters.fingerprints[: live.adapters.use.num_used]),
        )
        for in_flight in booked:
            work.book(in_flight)
        return work

    def book(self, in_flight: InFlightLoad) -> None:
        """Add a request that the live profile does not include."""
        priority = min(in_flight.priority, len(self.streams) - 1)
        if in_flight.seconds and not in_flight.has_first:
            key = priority, bisect(LENGTHS, in_flight.seconds)
            had, had_seconds = self.booked.get(key, (0.0, 0.0))
            self.booked[key] = had + 1, had_seconds + in_flight.seconds
        if in_flight.decodes and in_flight.has_first:
            self.streams[priority] += 1
            self.joining[priority] += 1
            self.context += in_flight.query.num_tokens
        elif in_flight.decodes:
            self.arriving[priority] += 1
            self.joining[priority] += not in_flight.seconds
            self.future_context += in_flight.query.num_tokens
        if in_flight.decodes and in_flight.query.adapter_weights:
            self._add_adapter(in_flight.query, is_stream=in_flight.has_first)
        if in_flight.decodes or not in_flight.has_first:
            self.booked_needs.append(in_flight.pages)
            self.booked_idle_pages += in_flight.idle_pages
            self.booked_seq_slots += 1

    def _add_adapter(self, query: Query, *, is_stream: bool) -> None:
        """Count the adapter of one more stream; its matrices are read once for all streams that have it."""
        read = 0 if query.adapter in self.used_adapters else query.adapter_weights
        self.used_adapters.add(query.adapter)
        if is_stream:
            self.adapters = self.adapters.plus(read, query.adapter_weights)
        self.future_adapters = self.future_adapters.plus(read, query.adapter_weights)

    def backlog(self, num_classes: int) -> tuple[list[Group], list[int], tuple[list[float], list[float]]]:
        """Return the groups of waiting prompts, the shortest of each class first; and by priority how many positions
        they fill, and the seconds of prompts of more urgent classes: reported, and booked."""
        groups: list[Group] = []
        num_groups = [0] * num_classes
        urgent = ([0.0] * num_classes, [0.0] * num_classes)
        for source, prompts in ((REPORTED, self.reported), (BOOKED, self.booked)):
            last = -1
            position = 0
            for (priority, _), (count, seconds) in sorted(prompts.items()):
                position = position + 1 if priority == last else 0
                last = priority
                groups.append((source, priority, position, count, seconds))
                num_groups[priority] = max(num_groups[priority], position + 1)
                for less_urgent in range(priority + 1, num_classes):
                    urgent[source][less_urgent] += seconds
        return groups, num_groups, urgent

    def room(self, profile: SchedulingProfile, live: LiveProfile, num_classes: int) -> "FreeRoom":
        """Return the room that the in-flight loads leave. An in-flight load takes room from every class."""
        pages: Sequence[float] = live.room.free_pages
        pages_now: Sequence[float] = live.room.pages_now or pages
        slots: Sequence[float] = live.room.slots
        if len(pages) != num_classes or len(slots) != num_classes:
            pages = _padded(pages, profile.num_pages, num_classes)
            pages_now = _padded(pages_now, profile.num_pages, num_classes)
            slots = _padded(slots, profile.max_num_seqs, num_classes)
        before = pages_now[-1]
        booked = sum(self.booked_needs)
        for need in self.booked_needs:
            pages_now = [free - need if need <= free else free for free in pages_now]  # others pass those that wait
        free_seq_slots = [free - self.booked_seq_slots for free in slots]
        needs = profile.needs
        longest: list[float] = [
            needs.longest_prompt(free) if slot >= 1 else -1.0
            for free, slot in zip(pages_now, free_seq_slots, strict=True)
        ]
        return FreeRoom([free - booked for free in pages], free_seq_slots, longest, before, pages_now[-1])

    def decoding(self, depth: int) -> Decoding:
        """Return the streams beside which prompts are computed. `depth`: steps in flight.

        Streams whose prompts other replicas compute count as if they ran.
        """
        return Decoding(self.joining, self.context, self.adapters, depth)


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
