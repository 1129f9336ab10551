"""Verification of drafts: how many drafts streams may profit from, and which of them a step computes. Pure.

A draft never makes a stream late that would be in time without. It takes no page and no token of the budget from a
decode or a chunk, for it is added to the step after both.

Recurrent layers keep the state before a draft that was rejected, see states.py. The accepted tokens in front of that
draft take rows of the stream's next steps again, until all drafts of a step are accepted, or a step has no drafts.
`DraftPolicy` counts these rows in the worth that a draft must have. Deadlines do not foresee these rows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from msgspec import structs

from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.drafts.drafting import DraftPolicy, Stream
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.forecast import Forecast
from crossdock.workers.schedule.policies.chunking import FREE_SHARE, longest_step
from crossdock.workers.schedule.recurrent.states import RecurrentStates
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Request, adapter_work
from crossdock.workers.schedule.table import RequestTable

_MOST_ROWS = 256
"""Most drafts of a step, where `max_num_seqs` leaves room for no more. Each has logits, 0.6 MB for 150,000 tokens of
vocabulary, and memory is set aside for those of `max_num_seqs` rows."""

_NEWEST_STEP = 0.02  # weight of one more step in `gap_share`, which so spans about 50: a second of steps of 20 ms


_MOST_AGAIN = 4
"""Most tokens of a stream that are computed again, as a multiple of `num_speculative_tokens`.

Simulated tokens per second of one stream for each without drafts, with 2, 4 and 8: 2.22, 2.43 and 2.45 where a row
takes 0.5 % of a step, and 1.52, 1.46 and 1.46 where it takes 10 % (5 drafts, each accepted with probability 0.7,
2026-11-23). Windows keep the pages of so many tokens.
"""


def longest_verified(config: SpeculativeConfig, has_states: bool) -> int:
    """Return how many tokens a step computes at most for a stream beside its newest one.

    `has_states`: layers are recurrent, and a rejected draft has accepted tokens computed again.
    """
    return config.num_speculative_tokens * (_MOST_AGAIN if has_states else 1)


@dataclass(slots=True)
class DraftTotals:
    """Counts of verified drafts since the start."""

    num_drafts: int = 0  # streams with drafts, summed over steps
    num_tokens: int = 0  # drafted tokens
    num_accepted_at: list[int] = field(default_factory=list)  # accepted ones by their place in a draft, from 0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Count the draft of one stream in one step."""
        self.num_drafts += 1
        self.num_tokens += num_drafted
        self.num_accepted_at += [0] * (num_drafted - len(self.num_accepted_at))
        for place in range(num_accepted):
            self.num_accepted_at[place] += 1


@dataclass(slots=True)
class Verification:
    """Adds drafts to the steps of one replica."""

    table: RequestTable
    forecast: Forecast
    policy: DraftPolicy
    states: RecurrentStates | None = None  # None: no layer is recurrent
    totals: DraftTotals = field(default_factory=DraftTotals)
    gap_share: float = 1.0  # recent seconds per token of the streams, as a share of those without drafts
    _lengthened: float = 1.0  # seconds of the last step, as a share of those without drafts; predicted
    _num_decodes: int = 0  # of the last step if it had drafts
    _num_accepted: int = 0  # of its drafts

    def wanted(self, streams: Sequence[Request]) -> dict[str, int]:
        """Return how many drafts each of `streams` may profit from in a step of their decodes; 0 is left out."""
        if not streams:
            return {}
        self._note_last_step()
        context = sum([stream.num_computed_tokens for stream in streams])
        work = StepWork.of_streams(len(streams), context, adapter_work(streams))
        cost = self.forecast.cost
        policy = self.policy
        has_states = bool(self.table.pages.state_pages)
        forced = policy.source.forced([stream.id for stream in streams])
        if policy.config.method == "grammar":
            looked_at = [stream for stream in streams if stream.id in forced]
        else:
            paused = policy.paused(cost)
            looked_at = [stream for stream in streams if stream.id not in paused or stream.id in forced]
        seen = [
            Stream(
                stream.id,
                stream.num_tokens - 1,
                self._most(stream),
                forced.get(stream.id, 0),
                stream.num_verified_tokens if has_states else None,
                stream.adapter_weights,
            )
            for stream in looked_at
        ]
        if policy.config.method == "grammar":
            seen = [stream._replace(most=min(stream.most, stream.forced)) for stream in seen]
        return policy.lengths(seen, work, cost, self._seconds_beside_again(streams, work) if seen else inf)

    def with_drafts(self, batch: Batch, drafts: Mapping[str, Sequence[int]]) -> Batch:
        """Return the step with the drafts that fit, and note how much longer it takes than one token of each stream.

        Where not all drafts fit, the ends of the longest are left out: they are the least likely to be accepted.
        """
        verifying = self._verifying(batch, drafts) if drafts else batch
        decodes = verifying.scheduled[: batch.num_decodes]
        if not decodes or decodes[-1].num_tokens == 1:
            return verifying
        self._num_decodes = batch.num_decodes
        self._num_accepted = 0
        if (cost := self.forecast.cost) is not None:
            single = [structs.replace(part, num_tokens=1) for part in decodes]
            alone = Batch([*single, *batch.scheduled[batch.num_decodes :]], batch.num_decodes)
            self._lengthened = cost.seconds(verifying.work) / cost.seconds(alone.work)
        return verifying

    def _verifying(self, batch: Batch, drafts: Mapping[str, Sequence[int]]) -> Batch:
        """Return the step with the drafts that fit."""
        plain = batch.scheduled[: batch.num_decodes]
        if len(batch.scheduled) > batch.num_decodes:
            drafts = self.policy.beside_chunk(drafts)
        offered = [(part, drafts.get(part.request.id, ())[: self._most(part.request)]) for part in plain]
        longest = self._longest_that_fits(batch, [(part, len(tokens)) for part, tokens in offered])
        if not longest:
            return batch
        without = list[Scheduled]()
        verified = list[Scheduled]()
        set_aside = self._set_aside()
        for part, tokens in offered:
            room = _grow(self.table, part.request, min(len(tokens), longest), set_aside) if tokens else 0
            if room:
                num_tokens = part.num_tokens + room
                part = structs.replace(part, num_tokens=num_tokens, drafts=tokens[:room], reason="decode with drafts")
                verified.append(part if self.states is None else self.states.with_state(part))
            else:
                without.append(part)
        chunks = batch.scheduled[batch.num_decodes :]
        return Batch([*without, *verified, *chunks], batch.num_decodes, batch.limit, batch.num_skipped)

    def _set_aside(self) -> int:
        """Return how many pages drafts must leave to the steps that begin before this one ends.

        That is a page of each group for each running request. All pages are left while a request waits for some: if
        each step began with the pages of its drafts taken, it might never start.
        """
        pages = self.table.pages
        if self.forecast.depth == 1:
            return 0
        return pages.num_pages if self.table.lacks_pages else pages.num_groups * len(self.table.running)

    def verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn which of a stream's drafts were accepted, and take back the pages that only rejected drafts needed."""
        self.totals.add(num_drafted, num_accepted)
        self.policy.observe(request.id, num_drafted, num_accepted, request.num_verified_tokens)
        request.drafts = request.drafts.plus(num_drafted, num_accepted)
        self._num_accepted += num_accepted
        pages = self.table.pages
        pages.trim(request.owner, self.table.needs.pages(request.num_tokens))

    def _note_last_step(self) -> None:
        """Average `gap_share` over recent steps, also over steps without drafts."""
        tokens = self._num_decodes + self._num_accepted
        share = self._lengthened * self._num_decodes / tokens if self._num_decodes else 1.0
        self.gap_share += _NEWEST_STEP * (share - self.gap_share)
        self._num_decodes = self._num_accepted = 0

    def _most(self, stream: Request) -> int:
        """Return how many drafts a stream can use: the step makes one token more than it accepts drafts."""
        if stream.num_verified_tokens and stream.num_verified_tokens > self._most_again:
            return 0
        num_tokens = len(stream.token_ids)  # not by properties: this runs for many streams in every step
        left = min(stream.most_tokens - num_tokens, self.table.max_model_len - num_tokens)
        return max(min(left - 1, self.policy.config.num_speculative_tokens), 0)

    @property
    def _most_again(self) -> int:
        """Return the most tokens that a stream may compute again in a step that also verifies its drafts."""
        return longest_verified(self.policy.config, has_states=True) - self.policy.config.num_speculative_tokens

    def _seconds_beside_again(self, streams: Sequence[Request], work: StepWork) -> float:
        """Return the predicted seconds that a step of `work` may take, beside the seconds of tokens computed again.

        Those seconds were counted when drafts were rejected, and are no reason to draft more or less now.
        """
        cost = self.forecast.cost
        with_again = work
        for stream in streams:
            if stream.num_verified_tokens:
                with_again = with_again.plus_drafts(
                    stream.num_computed_tokens, stream.num_verified_tokens, stream.adapter_weights
                )
        if cost is None or with_again is work:
            return self._seconds(work)
        return self._seconds(with_again) - (cost.seconds(with_again) - cost.seconds(work))

    def _seconds(self, work: StepWork, has_chunks: bool = False) -> float:
        """Return the predicted seconds that a step of `work` may take with drafts; infinite without a cost.

        A stream that will be late anyway bounds nothing. Beside a chunk every row takes time, and its prompt waits: the
        drafts must be nearly free.
        """
        cost = self.forecast.cost
        table = self.table
        if cost is None:
            return inf
        alone = cost.seconds(work)
        now = table.now
        arriving = [self.forecast.second_token_due(each, now) for each in table.arriving()]
        slack = min([due - now for due in arriving if due - now >= alone], default=inf)
        for stream in table.running:  # each step looks at all of them: at few for longer than at their deadline
            if alone <= stream.due - now < slack and stream.is_decoding:
                slack = stream.due - now
        seconds = longest_step(slack, self.forecast.limits.overrun)
        return min(seconds, (1 + FREE_SHARE) * alone) if has_chunks else seconds

    def _room_to_compute_again(self, batch: Batch, verifying: Collection[str]) -> int:
        """Return how many drafts `verifying` streams may have, so that a step has room for what it computes again.

        If the last draft of each stream is rejected, its next step computes the others again. That step must have room
        for a page of a prompt too. Other streams of this step compute nothing again after it.
        """
        config = self.table.config
        ids = {part.request.id for part in batch.scheduled}
        room = config.max_num_batched_tokens - config.max_num_seqs - config.page_size
        for stream in self.table.running:
            if stream.is_decoding and (stream.id in verifying or stream.id not in ids):
                room -= max(stream.num_verified_tokens, stream.num_in_flight_tokens - 1)
        return room

    def _longest_that_fits(self, batch: Batch, offered: Sequence[tuple[Scheduled, int]]) -> int:
        """Return to how many tokens drafts have to be cut. `offered`: each decode, and how many drafts it has."""
        work = batch.work
        cost = self.forecast.cost
        config = self.table.config
        rows = max(config.max_num_seqs - batch.num_decodes, _MOST_ROWS)
        tokens = min(config.max_num_batched_tokens - batch.num_tokens, rows)
        if self.table.pages.state_pages:
            verifying = {part.request.id for part, num_drafts in offered if num_drafts}
            tokens = min(tokens, self._room_to_compute_again(batch, verifying))
        seconds = self._seconds(work, has_chunks=len(batch.scheduled) > batch.num_decodes)
        for longest in range(max([num_drafts for _, num_drafts in offered], default=0), 0, -1):
            if sum([min(num_drafts, longest) for _, num_drafts in offered]) > tokens:
                continue
            longer = work
            for part, num_drafts in offered:
                if num_drafts:
                    longer = longer.plus_drafts(part.start, min(num_drafts, longest), part.request.adapter_weights)
            if cost is None or cost.seconds(longer) <= seconds:
                return longest
        return 0


def _grow(table: RequestTable, request: Request, num_drafts: int, set_aside: int = 0) -> int:
    """Give a stream pages for tokens after its newest one, and return how many of `num_drafts` have a place.

    Only available pages are given: a draft preempts no request. Where layers are recurrent, pages are left for the
    state after the drafts, beside the one before them. `set_aside`: pages that others are about to take.
    """
    pages = table.pages
    owner = request.owner
    room = pages.block_pool.num_available - pages.states.num_to_keep(owner) - set_aside
    if room < 0:
        return 0
    for wanted in range(-(-(request.num_tokens + num_drafts) // pages.page_size), 0, -1):
        missing = [max(wanted - len(pages.pages_of(owner, group)), 0) for group in range(pages.num_groups)]
        if sum(missing) <= room:
            break
    for group, num_pages in enumerate(missing):
        if num_pages:
            pages.allocate(owner, num_pages, group)
    return min(num_drafts, pages.num_tokens_held(owner) - request.num_tokens)
