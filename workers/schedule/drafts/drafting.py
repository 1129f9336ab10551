"""How many drafts the next step verifies for each stream: as many as its predicted seconds pay for. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple, Protocol

from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.drafts.acceptance import Acceptance
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig


class Stream(NamedTuple):
    """One stream, as the policy sees it."""

    id: str
    context: int  # tokens before its newest token
    most: int  # drafts that it can use at most: max_tokens, max_model_len, num_speculative_tokens
    forced: int = 0  # the first drafts, which its grammar dictates: they are certain to be accepted
    again: int | None = None  # tokens that this step computes again; None: rejected drafts have nothing computed again
    adapter: int = 0  # numbers in the matrices of its adapter


class DraftRoom(NamedTuple):
    """The drafts for which steps are recorded as CUDA graphs.

    Beyond these a GPU launches a step kernel by kernel, which takes longer than drafts save, and longer than predicted.
    """

    rows: int  # of all streams of a step without chunks: one each, and one for each draft
    streams_beside_chunk: int  # that have drafts
    rows_beside_chunk: int  # of these streams together


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
        return 0.0

    def forced(self, request_ids: Sequence[str]) -> Mapping[str, int]:
        return {}

    def match_length(self, request_id: str) -> int:
        return 1


class _Chain(NamedTuple):
    """The drafts of one stream, each worth the probability that it and all before it are accepted."""

    id: str  # of the stream
    context: int  # tokens before the stream's newest one
    forced: int  # drafts
    most: int  # drafts
    match: int  # tokens that support the first draft that is not forced
    first: float  # probability that this one is accepted
    factor: float  # by which the stream's own drafts differ from those of others
    row_seconds: float  # of each of its rows, beyond the breakpoint
    again: int | None  # see `Stream`
    adapter: int  # see `Stream`

    def rows_again(self, length: int, before: float, worth: float) -> float:
        """Return how many rows the draft after `length` others adds to the stream's next step, as a mean.

        If this is the first one to be rejected, that step computes the token before the drafts, the `length` ones, and
        all that this step computes again. `before`: probability that the others are accepted; `worth`: with this.
        """
        return 0.0 if self.again is None else (before - worth) * (self.again + 1 + length)


class _Choice(NamedTuple):
    """Drafts for one step."""

    rate: float  # expected tokens per second
    lengths: dict[str, int]  # of drafts, by stream
    row_seconds: float  # mean seconds that one draft adds to the step


@dataclass(slots=True)
class DraftPolicy:
    """Decides the number of drafts of each stream, and learns from what was accepted.

    A draft is worth the probability that it is accepted, which includes all drafts before it. It costs the seconds by
    which one more row lengthens the step, and the drafter's own. Where layers are recurrent, it costs the rows too that
    the next step computes again if it is rejected. Drafts are added in the order of their worth for their seconds, and
    the step gets as many as give the most expected tokens per second over all streams.
    """

    config: SpeculativeConfig
    source: DraftSource = field(default_factory=FreeDrafts)
    drafted: int = 0  # tokens, in all
    accepted: int = 0
    forced: int = 0  # of the drafted tokens
    wasted_s: float = 0.0  # predicted seconds of the rows of rejected drafts, and of tokens computed again
    _acceptance: Acceptance = field(default_factory=Acceptance)
    _is_free: bool = True  # the source takes no time
    _row_seconds: float = 0.0  # mean seconds that one draft added to the last step
    _forced: dict[str, int] = field(default_factory=dict)  # drafts of the newest step, by request
    _room: DraftRoom | None = None  # see `stop_at`

    def stop_at(self, room: DraftRoom | None) -> None:
        """Draft no more than a recorded step has room for; None: any number."""
        self._room = room

    def paused(self, cost: StepCost | None) -> Collection[str]:
        """Return the requests that `lengths` will not look at in the next step, but for forced drafts."""
        return self._acceptance.paused_next() if cost is not None and self.config.adaptive else ()

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
            longest = {stream.id: min(stream.most, most) for stream in streams if stream.most > 0}
            return self._within_room(longest, work)
        seconds = cost.seconds(work)
        if seconds <= 0 or seconds >= within:
            return {}
        row_seconds = cost.per_decode + min(cost.per_early_row if work.rows < cost.breakpoint_rows else 0.0, 0.0)
        # Below the least time of a step with a chunk, which one with drafts has too, a second draft costs nothing.
        needed = 0.0 if seconds < cost.least_with_chunk else work.decodes / seconds * max(row_seconds, 0.0)
        if any(stream.again is not None for stream in streams):
            needed *= 2 / (1 + needed)  # if the first draft is rejected, the token before it takes a row again
        chains = self._chains(streams, needed, cost)
        if not chains:
            return {}
        most = self.config.num_speculative_tokens
        # Where each position of a draft costs the drafter seconds for all streams, a second stream's first draft may be
        # worth more than a third draft of the first one: the best of each longest length is compared.
        self._is_free = self.source.seconds(1, 1) <= 0
        caps = (most,) if self._is_free else range(1, most + 1)
        best = max([self._best(chains, work, cost, within, cap) for cap in caps], key=lambda choice: choice.rate)
        self._row_seconds = best.row_seconds
        return self._within_room(best.lengths, work)

    def _within_room(self, lengths: dict[str, int], work: StepWork) -> dict[str, int]:
        """Return the drafts that a recorded step without chunks has room for. `work`: of the streams without drafts."""
        if self._room is None:
            return lengths
        return _longest(lengths, len(lengths), max(self._room.rows - int(work.decodes), 0), 0)

    def beside_chunk(self, drafts: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
        """Return the drafts of each stream that a recorded step with a chunk has room for, too."""
        if self._room is None:
            return drafts
        lengths = {request_id: len(tokens) for request_id, tokens in drafts.items()}
        _, streams, rows = self._room
        return {name: drafts[name][:length] for name, length in _longest(lengths, streams, rows, 1).items()}

    def observe(self, request_id: str, num_drafted: int, num_accepted: int, num_again: int = 0) -> None:
        """Learn from the drafts of one request in a step that has ended. Forced drafts do not count.

        `num_again`: tokens that its next step computes again.
        """
        forced = min(self._forced.get(request_id, 0), num_drafted)
        self.drafted += num_drafted
        self.accepted += num_accepted
        self.forced += forced
        self.wasted_s += (num_drafted - num_accepted + num_again) * self._row_seconds
        if forced <= num_accepted and forced < num_drafted:
            self._acceptance.observe(request_id, num_drafted - forced, num_accepted - forced)

    def forget(self, request_id: str) -> None:
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
        acceptance = self._acceptance
        match_length = self.source.match_length
        chains = list[_Chain]()
        shortest = acceptance.shortest_match(needed)
        for stream in streams:
            most = min(stream.forced, stream.most)
            match = 0
            first = 0.0
            if stream.most > most and not acceptance.is_paused(stream.id):
                match = match_length(stream.id)
                first = acceptance.probability_if_worth(stream.id, match, needed, shortest)
                most = stream.most if first else most
            if most > 0:
                row_seconds = cost.per_decode + cost.attended_seconds(stream.context, 1.0)
                row_seconds += cost.per_adapted * stream.adapter
                factor = acceptance.factor(stream.id)
                accepted = first, factor, row_seconds, stream.again, stream.adapter
                chains.append(_Chain(stream.id, stream.context, stream.forced, most, match, *accepted))
        return chains

    def _best(self, chains: Sequence[_Chain], work: StepWork, cost: StepCost, within: float, cap: int) -> _Choice:
        """Add drafts in the order of their worth for their seconds; return the best beginning of that order.

        No draft has more than `cap` tokens beside forced ones.
        """
        alone = seconds = cost.seconds(work)
        device = cost.device_seconds(work)
        rows = work.rows
        least = cost.least_with_chunk
        tokens = float(work.decodes)
        order = list[int]()
        row_seconds = self._row_seconds
        best_rate = tokens / seconds
        best_size = 0
        num_streams = longest = 0
        later = 0.0  # seconds of the next steps in which tokens are computed again
        lengths = [0] * len(chains)
        worths = [1.0 if chain.forced else chain.first for chain in chains]
        reached = [1.0] * len(chains)  # probability that all drafts so far are accepted

        def density(number: int) -> float:
            """Return the worth of the next draft of a chain for each second that this draft takes."""
            chain = chains[number]
            worth = worths[number]
            num_rows = 1 + chain.rows_again(lengths[number], reached[number], worth)
            return worth / (num_rows * chain.row_seconds or 1e-12)

        heap = [(-density(number), number) for number in range(len(chains))]
        heapify(heap)
        while heap:
            _, number = heappop(heap)
            chain = chains[number]
            length = lengths[number]
            is_dear = worths[number] <= best_rate * chain.row_seconds
            if is_dear and rows >= cost.breakpoint_rows and device >= least:
                continue  # this draft and all after it cost more than they are worth
            row = cost.draft_seconds(rows, chain.context + length, chain.adapter)
            device_with = device + row
            longer = max(device_with, least)
            num_with = num_streams + (length == chain.forced)
            longest_with = max(longest, length + 1 - chain.forced)
            if not self._is_free:
                longer += self.source.seconds(num_with, longest_with)
            if longer > within:
                continue
            device = device_with
            seconds = longer
            rows = rows + 1
            num_streams = num_with
            longest = longest_with
            tokens += worths[number]
            later += row * chain.rows_again(length, reached[number], worths[number])
            order.append(number)
            if tokens / (seconds + later) > best_rate:
                best_rate = tokens / (seconds + later)
                best_size = len(order)
                row_seconds = (seconds - alone) / best_size
            lengths[number] = length + 1
            reached[number] = worths[number]
            length += 1
            if length == chain.forced:
                worths[number] = chain.first
            elif length > chain.forced:
                worths[number] *= self._acceptance.after(chain.match + length - chain.forced, chain.factor)
            if length < min(chain.most, chain.forced + cap):
                heappush(heap, (-density(number), number))
        counts = Counter(order[:best_size])
        return _Choice(best_rate, {chains[number].id: count for number, count in counts.items()}, row_seconds)


def _longest(lengths: Mapping[str, int], streams: int, rows: int, rows_before: int) -> dict[str, int]:
    """Return the drafts of up to `streams` streams that fit into `rows`: the longest, the likeliest to be accepted.

    `rows_before`: that each stream takes beside its drafts.
    """
    kept: dict[str, int] = {}
    for request_id in sorted(lengths, key=lengths.__getitem__, reverse=True)[:streams]:
        kept[request_id] = length = min(lengths[request_id], rows - rows_before)
        rows -= rows_before + length
    return {request_id: length for request_id, length in kept.items() if length > 0}
