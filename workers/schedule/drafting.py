"""How many drafts the next step verifies for each stream: as many as its predicted seconds pay for. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple, Protocol

from crossdock.workers.schedule.acceptance import Acceptance
from crossdock.workers.schedule.cost import StepCost, StepWork
from crossdock.workers.schedule.speculative_config import SpeculativeConfig


class Stream(NamedTuple):
    """One stream, as the policy sees it."""

    id: str
    context: int  # tokens before its newest token
    most: int  # drafts that it can use at most: max_tokens, max_model_len, num_speculative_tokens
    forced: int = 0  # the first drafts, which its grammar dictates: they are certain to be accepted


class DraftSource(Protocol):
    """Answers what the policy asks of a drafter before it drafts."""

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        """Return the predicted seconds to draft for `num_streams`, the longest draft having `num_tokens`.

        Forced drafts do not count.
        """

    def forced(self, request_ids: Sequence[str]) -> Mapping[str, int]:
        """Return how many tokens the grammar of each request dictates next; requests without any are left out."""

    def match_length(self, request_id: str) -> int:
        """Return how many of the request's last tokens support its drafts after forced ones; 0: there will be none."""


class FreeDrafts:
    """A source that costs nothing and supports all drafts alike."""

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        """Return 0."""
        return 0.0

    def forced(self, request_ids: Sequence[str]) -> Mapping[str, int]:
        """Return none: there are no grammars."""
        return {}

    def match_length(self, request_id: str) -> int:
        """Return 1."""
        return 1


@dataclass(slots=True)
class _Chain:
    """The drafts of one stream, each worth the probability that it and all before it are accepted."""

    stream: Stream
    match: int  # tokens that support the first draft that is not forced
    row_seconds: float  # of each of its rows, beyond the bend
    worth: float  # of the next draft, in tokens
    forced: int  # drafts
    most: int  # drafts
    length: int = 0

    def added_to(self, work: StepWork) -> StepWork:
        """Return the work of a step with one more of these drafts, as `StepWork.plus_drafts` does for all of them."""
        attended = work.attended + self.stream.context + self.length + 1.5
        return StepWork(work.prefill_tokens, attended, work.decodes, work.context, work.drafts + 1)


class _Choice(NamedTuple):
    """Drafts for one step."""

    rate: float  # expected tokens per second
    lengths: dict[str, int]  # of drafts, by stream
    row_seconds: float  # that one draft adds to the step, as a mean


@dataclass(slots=True)
class DraftPolicy:
    """Decides the number of drafts of each stream, and learns from what was accepted.

    A draft is worth the probability that it is accepted, which includes all drafts before it. It costs the seconds by
    which one more row lengthens the step, and the drafter's own. Drafts are added in the order of their worth for their
    seconds, and the step gets as many as give the most expected tokens per second over all streams.
    """

    config: SpeculativeConfig
    source: DraftSource = field(default_factory=FreeDrafts)  # the engine sets its drafter here
    drafted: int = 0  # tokens, in all
    accepted: int = 0
    forced: int = 0  # of the drafted tokens
    wasted_s: float = 0.0  # predicted seconds of the rows of rejected drafts
    _acceptance: Acceptance = field(default_factory=Acceptance)
    _row_seconds: float = 0.0  # that one draft added to the last step, as a mean
    _forced: dict[str, int] = field(default_factory=dict)  # drafts of the newest step, by request

    @property
    def acceptance(self) -> float:
        """Return the share of recent drafts that were accepted, without forced ones; 0 before the first."""
        return self._acceptance.share

    def lengths(
        self, streams: Sequence[Stream], work: StepWork, cost: StepCost | None, within: float = inf
    ) -> dict[str, int]:
        """Return how many tokens to draft for each stream; streams without drafts are left out.

        `work`: the decodes of the step without drafts. The step may take `within` seconds. Without `cost`, and with
        `adaptive` off, every stream drafts as many tokens as it may.
        """
        self._acceptance.begin_step()
        self._note_forced(streams)
        if cost is None or not self.config.adaptive:
            most = self.config.num_speculative_tokens
            self._row_seconds = cost.per_decode if cost is not None else 0.0
            return {stream.id: min(stream.most, most) for stream in streams if stream.most > 0}
        seconds = cost.seconds(work)
        if seconds <= 0 or seconds >= within:
            return {}
        row_seconds = cost.per_decode + min(cost.per_early_row if work.rows < cost.bend_rows else 0.0, 0.0)
        chains = self._chains(streams, work.decodes / seconds * max(row_seconds, 0.0), cost)
        if not chains:
            return {}
        most = self.config.num_speculative_tokens
        # Where each position of a draft costs the drafter seconds for all streams, a second stream's first draft may be
        # worth more than a third draft of the first one: the best of each longest length is compared.
        caps = range(1, most + 1) if self.source.seconds(1, 1) > 0 else (most,)
        best = max([self._best(chains, work, cost, within, cap) for cap in caps], key=lambda choice: choice.rate)
        self._row_seconds = best.row_seconds
        return best.lengths

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """Learn from the drafts of one request in a step that has ended. Forced ones teach nothing."""
        forced = min(self._forced.get(request_id, 0), num_drafted)
        self.drafted += num_drafted
        self.accepted += num_accepted
        self.forced += forced
        self.wasted_s += (num_drafted - num_accepted) * self._row_seconds
        if forced <= num_accepted and forced < num_drafted:
            self._acceptance.observe(request_id, num_drafted - forced, num_accepted - forced)

    def forget(self, request_id: str) -> None:
        """Drop what is known of one request."""
        self._acceptance.forget(request_id)
        self._forced.pop(request_id, None)

    def _note_forced(self, streams: Sequence[Stream]) -> None:
        """Remember for `observe` how many drafts of each stream are forced."""
        if self._forced:
            for stream in streams:
                self._forced.pop(stream.id, None)
        self._forced |= {stream.id: stream.forced for stream in streams if stream.forced}

    def _chains(self, streams: Sequence[Stream], needed: float, cost: StepCost) -> list[_Chain]:
        """Return the streams with drafts to choose from: forced ones, and those of a drafter if the first of them is
        accepted with probability `needed`, at which a draft pays."""
        if needed >= 1:
            return []
        acceptance, match_length, chains = self._acceptance, self.source.match_length, list[_Chain]()
        shortest, paused = acceptance.shortest_match(needed), acceptance.paused()
        for stream in streams:
            most, match = min(stream.forced, stream.most), 0
            if stream.most > most and stream.id not in paused:
                match = match_length(stream.id)
                if acceptance.is_worth(stream.id, match, needed, shortest):
                    most = stream.most
            if most > 0:
                worth = 1.0 if stream.forced else acceptance.probability(stream.id, match)
                row_seconds = cost.per_decode + cost.per_attended * stream.context
                chains.append(_Chain(stream, match, row_seconds, worth, stream.forced, most))
        return chains

    def _best(self, begun: Sequence[_Chain], work: StepWork, cost: StepCost, within: float, cap: int) -> _Choice:
        """Add drafts in the order of their worth for their seconds; return the best beginning of that order.

        No draft has more than `cap` tokens beside forced ones.
        """
        chains = [replace(chain) for chain in begun]
        num_decodes, seconds, row_seconds = work.decodes, cost.seconds(work), self._row_seconds
        alone, tokens, order = seconds, float(num_decodes), list[str]()
        best_rate, best_size = tokens / seconds, 0
        num_streams = longest = 0
        heap = [(-chain.worth / (chain.row_seconds or 1e-12), number) for number, chain in enumerate(chains)]
        heapify(heap)
        while heap:
            density, number = heappop(heap)
            is_bent = work.rows >= cost.bend_rows and seconds > cost.least_with_chunk
            if is_bent and -density <= best_rate:
                break  # from here on, every draft costs more than it is worth
            chain = chains[number]
            longer = chain.added_to(work)
            num_with = num_streams + (chain.length == chain.forced)
            longest_with = max(longest, chain.length + 1 - chain.forced)
            longer_seconds = cost.seconds(longer) + self.source.seconds(num_with, longest_with)
            if longer_seconds > within:
                continue
            work, seconds, num_streams, longest = longer, longer_seconds, num_with, longest_with
            tokens += chain.worth
            order.append(chain.stream.id)
            if tokens / seconds > best_rate:
                best_rate, best_size = tokens / seconds, len(order)
                row_seconds = (seconds - alone) / best_size
            chain.length += 1
            if chain.length >= chain.forced:
                chain.worth *= self._acceptance.probability(chain.stream.id, chain.match + chain.length - chain.forced)
            if chain.length < min(chain.most, chain.forced + cap):
                heappush(heap, (-chain.worth / (chain.row_seconds or 1e-12), number))
        lengths: dict[str, int] = {}
        for request_id in order[:best_size]:
            lengths[request_id] = lengths.get(request_id, 0) + 1
        return _Choice(best_rate, lengths, row_seconds)
