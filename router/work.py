"""Everything one replica has to do, as a router knows it: what its live profile reports, and what was booked since."""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from crossdock.router.query import Query
from crossdock.workers.report.live_profile import LENGTHS, LiveProfile
from crossdock.workers.schedule.cost.cost import NO_ADAPTERS, AdapterWork

# Where a waiting prompt is known from: the replica's live profile, or this router's own in-flight load.
REPORTED = 0
BOOKED = 1

Group: TypeAlias = tuple[float, float]
"""Waiting prompts of one class and about one length: (count, seconds of all of them)."""


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


_Prompts: TypeAlias = dict[tuple[int, int], Group]
"""Prompts that wait, by (priority, length, a place in `LENGTHS`)."""


@dataclass(slots=True)
class Work:
    """Everything one replica has to do: what its live profile reports, and what a router has booked since."""

    streams: list[float]  # by priority: streams that decode here now
    joining: list[float]  # by priority: streams, and those whose prompts other replicas compute
    arriving: list[float]  # by priority: streams of the future that do not decode yet, less those that will leave
    waiting: tuple[_Prompts, _Prompts]  # REPORTED, BOOKED
    context: float  # tokens of the streams
    future_context: float  # tokens of the streams that arrive
    booked_needs: list[int] = field(default_factory=list)  # pages of each in-flight load that takes a slot
    booked_idle_pages: int = 0  # of all these pages, cached ones that no request holds
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
        prompt_tokens = 0.0
        for group in live.prefills.groups:
            priority = group.priority if group.priority < num_classes else num_classes - 1
            _add(prompts, priority, group.length, group.count, group.seconds)
            arriving[priority] += group.count
            prompt_tokens += group.tokens
        num_leaving = sum(live.streams.leaving)
        if num_leaving:  # the profile does not report how many of the tokens belong to prompts that leave
            num_prompts = max(sum([group.count for group in live.prefills.groups]), 1)
            prompt_tokens *= 1 - min(num_leaving / num_prompts, 1)
            for priority, count in enumerate(_by_priority(live.streams.leaving, num_classes)):
                arriving[priority] -= count
        work = cls(
            *(streams, joining, arriving, (prompts, {}), live.streams.context_tokens, prompt_tokens),
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
            _add(self.waiting[BOOKED], priority, bisect(LENGTHS, in_flight.seconds), 1, in_flight.seconds)
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

    def _add_adapter(self, query: Query, *, is_stream: bool) -> None:
        """Count the adapter of one more stream; its matrices are read once for all streams that have it."""
        read = 0 if query.adapter in self.used_adapters else query.adapter_weights
        self.used_adapters.add(query.adapter)
        if is_stream:
            self.adapters = self.adapters.plus(read, query.adapter_weights)
        self.future_adapters = self.future_adapters.plus(read, query.adapter_weights)

    def groups(self) -> Sequence[Sequence[Sequence[Group]]]:
        """Return the groups of waiting prompts, `[REPORTED or BOOKED][priority]`, the shortest prompts first."""
        found: list[list[list[Group]]] = [[[] for _ in self.streams] for _ in self.waiting]
        for by_class, prompts in zip(found, self.waiting, strict=True):
            for (priority, _), group in sorted(prompts.items()):
                by_class[priority].append(group)
        return found


def _add(prompts: _Prompts, priority: int, length: int, count: float, seconds: float) -> None:
    had, had_seconds = prompts.get((priority, length), (0.0, 0.0))
    prompts[priority, length] = had + count, had_seconds + seconds


def _by_priority(reported: Sequence[float], num_classes: int) -> list[float]:
    """Return counts for the router's classes. During an upgrade a replica may have more classes than this router knows,
    which count as the least urgent one, or fewer."""
    if len(reported) == num_classes:
        return [*reported]
    known = [*reported[:num_classes], *[0.0] * (num_classes - len(reported))]
    known[-1] += sum(reported[num_classes:])
    return known
