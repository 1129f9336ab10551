"""Predict the seconds of a step: `StepCost` is the formula. cost_fit.py learns its coefficients from measured steps.

`python benchmarks/models/step_cost.py` measures how well, for steps that the fit has not seen and for a served mix.

An argument `adapter` counts the numbers in the matrices of the request's LoRA adapter; 0: it has none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from math import floor, sqrt
from operator import attrgetter
from typing import Any, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from crossdock.workers.schedule.cost.formula import CostFormula


class AdapterWork(NamedTuple):
    """Counts the numbers that LoRA adapters add to a step of one token of each stream, as in `StepWork`."""

    adapters: float
    adapted: float

    def plus(self, adapters: float, adapted: float) -> "AdapterWork":
        return AdapterWork(self.adapters + adapters, self.adapted + adapted)

    def over(self, parts: float) -> "AdapterWork":
        """Return the numbers of each step where the streams are spread over so many."""
        return AdapterWork(self.adapters / parts, self.adapted / parts) if self.adapted else NO_ADAPTERS


class StepWork(NamedTuple):
    """The quantities of a step that its duration depends on. May be a mean over several steps."""

    prefill_tokens: float = 0
    attended: float = 0.0  # sum over chunks of tokens * (context before the chunk + tokens / 2)
    decodes: float = 0
    context: float = 0  # sum of tokens before each decode: attention reads them once for each
    drafts: float = 0  # drafted tokens, computed behind the newest tokens of decodes; `attended` counts theirs too
    chunk_context: float = 0  # sum of tokens before each chunk, which attention reads for any number of tokens
    adapters: float = 0  # numbers in the matrices of the LoRA adapters of decodes, which are read once for each adapter
    adapted: float = 0  # sum over rows of the numbers in the matrices of the row's adapter: products

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]], decode_contexts: Sequence[int] = ()) -> "StepWork":
        """Return the work of a step with these `chunks`, (start, num_tokens) each.

        `decode_contexts`: the number of tokens before each decoded token.
        """
        tokens = 0
        attended = 0.0
        context = 0
        for start, num_tokens in chunks:
            tokens += num_tokens
            attended += num_tokens * (start + num_tokens / 2)
            context += start
        return cls(tokens, attended, len(decode_contexts), sum(decode_contexts), chunk_context=context)

    @classmethod
    def of_streams(cls, count: float, context: float, adapters: AdapterWork, parts: float = 1) -> "StepWork":
        """Return the work of a step that decodes one in `parts` of so many streams, with `context` tokens in total."""
        own, adapted = adapters
        return cls(decodes=count / parts, context=context / parts, adapters=own / parts, adapted=adapted / parts)

    @property
    def rows(self) -> float:
        """Return the rows of the step's matrix products: one for each prompt token, each decode and each draft."""
        return self.prefill_tokens + self.decodes + self.drafts

    @property
    def is_decodes_alone(self) -> bool:
        """Return whether a CUDA graph may compute the step. A chunk of one token is computed like a decode."""
        return self.prefill_tokens <= 1 and not self.drafts

    def plus_chunk(self, start: int, num_tokens: float, adapter: float = 0) -> "StepWork":
        """Return the work with one more chunk, of `num_tokens` after `start` tokens of context."""
        return StepWork(
            self.prefill_tokens + num_tokens,
            self.attended + num_tokens * (start + num_tokens / 2),
            self.decodes,
            self.context,
            self.drafts,
            self.chunk_context + start,
            self.adapters,
            self.adapted + num_tokens * adapter,
        )

    def plus_drafts(self, context: int, num_drafts: float, adapter: float = 0) -> "StepWork":
        """Return the work with `num_drafts` more tokens behind a decode after `context` tokens, which is counted
        already."""
        return StepWork(
            self.prefill_tokens,
            self.attended + num_drafts * (context + 1 + num_drafts / 2),
            self.decodes,
            self.context,
            self.drafts + num_drafts,
            self.chunk_context,
            self.adapters,
            self.adapted + num_drafts * adapter,
        )


NO_WORK = StepWork()
NO_LIMIT = 1e12  # tokens: more than any context or chunk has
NO_ADAPTERS = AdapterWork(0, 0)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class StepCost(CostFormula[float]):
    """The prices of a replica's steps, in seconds. Measured, never configured.

    seconds(step) = base + per_prefill_token·tokens + per_attended·Σ chunk·(context + chunk/2)
    + per_decode·(decodes + drafts) + per_context·Σ context of decodes + per_chunk_context·Σ context of chunks
    + per_early_row·min(rows, breakpoint_rows) + per_adapter·Σ numbers of each adapter of decodes
    + per_adapted·Σ numbers of the adapter of each row + per_far·tokens beyond `most_context`, and at least
    `least_with_chunk` if the step has a chunk or drafts. Rows are prompt tokens, decodes and drafts.

    Without the context of chunks, a one-page chunk 12k tokens deep is predicted a fifth too short (SmolLM2-135M, Zen 4,
    2026-11-21). Of 24 kinds of steps with adapters of ranks 8 to 64, the mean error is 26 % without a term for
    adapters, 12 % with rows alone and 6 % with both (SmolLM2-135M, Zen 3, 2026-11-26). Their prices are learnt from
    steps that serve requests, and a replica without adapters solves for no more coefficients.

    Where an indexer chooses the tokens that a row reads, sums are bounded by `most_context`, not each row: unlike
    contexts in one step count as their mean, and a prompt that begins before `most_context` as the middle of its
    tokens, by which its attention is predicted too long by a third at most.
    """

    base: float = Field(ge=0)
    per_prefill_token: float = Field(ge=0)
    per_attended: float = Field(0.0, ge=0)
    per_decode: float = Field(0.0, ge=0)  # of a draft too: both need logits
    per_context: float = Field(0.0, ge=0)
    breakpoint_rows: float = Field(default=0.0, ge=0)  # up to so many rows, a step waits for the weights, not products
    per_early_row: float = 0.0  # what a row up to there costs more than one beyond; less where this is negative
    least_with_chunk: float = Field(default=0.0, ge=0)  # to launch each kernel, where decodes alone run as a CUDA graph
    per_chunk_context: float = Field(default=0.0, ge=0)  # chunks read pages with other kernels; absent: `per_context`
    per_adapter: float = Field(default=0.0, ge=0)  # decodes read the matrices of each of their adapters once
    per_adapted: float = Field(default=0.0, ge=0)  # a product for each number in the matrices of a row's adapter
    most_context: float = Field(default=NO_LIMIT, gt=0)  # tokens that a row attends to, where an indexer chooses them
    per_far: float = Field(default=0.0, ge=0)  # to score a token beyond these, for one row

    larger = staticmethod(max)
    smaller = staticmethod(min)
    floor = staticmethod(floor)
    chosen = staticmethod(lambda condition, first, second: first if condition else second)

    @model_validator(mode="before")
    @classmethod
    def _chunks_read_context_like_decodes(cls, given: Any) -> Any:
        named = given.kwargs or {} if isinstance(given, ArgsKwargs) else given
        return {"per_chunk_context": named.get("per_context", 0.0), **named}

    @model_validator(mode="after")
    def _more_rows_cost_no_less(self) -> Self:
        least = -min(self.per_prefill_token, self.per_decode)
        if self.per_early_row < least - _ROUNDING:
            raise ValueError(
                f"per_early_row ({self.per_early_row}) must be at least {least}, the negative of per_prefill_token and "
                f"of per_decode: no row makes a step shorter"
            )
        return self

    @classmethod
    def of(cls, coefficients: Sequence[float]) -> "StepCost":
        """Create a cost from its `coefficients`. Ones that an older replica does not report have defaults."""
        return cls(**dict(zip(_NAMES, coefficients, strict=False)))

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Return the coefficients in the order of the fields."""
        found: tuple[float, ...] = _coefficients(self)
        return found

    @property
    def advertised(self) -> tuple[float, ...]:
        """Return the coefficients as a live profile has them: without the last ones where these are as by default."""
        if self.most_context < NO_LIMIT:
            return self.coefficients
        return self.coefficients[:-2] if self.per_adapter or self.per_adapted else self.coefficients[:-4]

    def slowed(self, scale: float) -> "StepCost":
        """Return the cost of a device that takes `scale` times as long."""
        names = set(_NAMES) - {"breakpoint_rows", "most_context"}
        return replace(self, **{name: getattr(self, name) * scale for name in names})

    def seconds(self, work: StepWork) -> float:
        """Return the predicted seconds of a step."""
        seconds = self.device_seconds(work)
        return seconds if seconds > self.least_with_chunk or work.is_decodes_alone else self.least_with_chunk

    def streams_seconds(self, count: float, context: float, adapters: AdapterWork, parts: float = 1) -> float:
        """Return the predicted seconds of a step that decodes one in `parts` of so many streams: `StepWork.of_streams`
        has its work."""
        return self.decode_step_seconds(count / parts, context / parts, *adapters.over(parts))

    def device_seconds(self, work: StepWork) -> float:
        """Return the predicted seconds of a step if launching its kernels took no time."""
        tokens, attended, decodes, context, drafts, chunk_context, adapters, adapted = work
        if not (tokens or drafts):
            return self.decode_step_seconds(decodes, context, adapters, adapted)
        logits = decodes + drafts
        seconds = self.chunks_seconds(tokens, attended, tokens + logits, chunk_context, tokens + drafts)
        decode_s = self.per_decode * logits + self.context_seconds(context, decodes)
        return seconds + decode_s + (self.per_adapter * adapters + self.per_adapted * adapted)

    def decode_step_seconds(self, decodes: float, context: float, adapters: float = 0.0, adapted: float = 0.0) -> float:
        """Return the predicted seconds of a step of `decodes` streams alone, with `context` tokens in total.

        `adapters`, `adapted`: as in `StepWork`.
        """
        # The rest of `chunks_seconds` is zero. This runs for every step of a simulation.
        early = self.per_early_row * min(decodes, self.breakpoint_rows)
        decode_s = self.per_decode * decodes + self.context_seconds(context, decodes)
        return self.base + early + decode_s + (self.per_adapter * adapters + self.per_adapted * adapted)

    def draft_seconds(self, rows: float, context: float, adapter: float = 0) -> float:
        """Return the seconds that one more draft adds to `device_seconds` of a step of `rows` rows.

        `context`: tokens before the newest one of the stream, and earlier drafts of the stream.
        """
        early = self.per_early_row * min(max(self.breakpoint_rows - rows, 0.0), 1.0) if self.per_early_row else 0.0
        return self.per_decode + self.attended_seconds(context + 1.5, 1.0) + self.per_adapted * adapter + early

    def chunk_seconds(self, start: int, num_tokens: float, adapter: float = 0) -> float:
        """Return the seconds that a chunk of `num_tokens` after `start` tokens adds to a step of many rows.

        In such a step every row has the price beyond the breakpoint, and the kernels take longer than launching them.
        """
        return self.many_rows_seconds(start, num_tokens, adapter) if num_tokens > 0 else 0.0

    def tokens_within(
        self, seconds: float, start: int, work: StepWork = NO_WORK, adapter: float = 0, alone: float | None = None
    ) -> float:
        """Return the tokens of the largest chunk after `start` tokens of context with which a step takes `seconds`.

        With a fraction, as a mean over steps. `work`: of the step without the chunk. `alone`: `device_seconds` of
        `work`, where known. 0: the step takes longer with any chunk of two tokens.
        """
        if seconds < self.least_with_chunk:
            return 0.0
        left = seconds - (self.device_seconds(work) if alone is None else alone) - self.per_chunk_context * start
        early_rows = self.breakpoint_rows - work.rows
        if early_rows <= 0:
            return self._tokens_in(left, start, adapter)
        tokens = self._tokens_in(left, start, adapter, self.per_early_row)
        if tokens < early_rows:
            return tokens
        return max(self._tokens_in(left - self.per_early_row * early_rows, start, adapter), early_rows)

    def _tokens_in(self, seconds: float, start: int, adapter: float, more: float = 0.0) -> float:
        """Return the tokens of a chunk that take `seconds`, each `more` than in a step of many rows."""
        most = self.most_context
        if start < most:
            per_token = max(self.per_token(start, adapter) + more, 0.0)
            tokens = _most_tokens(seconds, per_token, self.per_attended)
            if start + tokens / 2 <= most:
                return tokens
        per_token = self.per_token(most, adapter) + self.per_far * (start - most) + more
        return _most_tokens(seconds, per_token, self.per_far)

    def prefill_seconds(self, start: float, end: float, chunk: float, adapter: float = 0) -> float:
        """Return the seconds of a prompt's tokens `[start, end)`, in chunks of `chunk` tokens; 0 without tokens."""
        return super().prefill_seconds(start, end, chunk, adapter) if end > start else 0.0

    def last_step_seconds(self, start: float, end: float, chunk: float, adapter: float = 0) -> float:
        """Return the seconds of the last of the prompt's steps; 0 without tokens."""
        return super().last_step_seconds(start, end, chunk, adapter) if end > start else 0.0


_NAMES = tuple(each.name for each in fields(StepCost))
_coefficients = attrgetter(*_NAMES)
_ROUNDING = 1e-9  # seconds per row


def _most_tokens(seconds: float, per_token: float, per_attended: float) -> float:
    """Return the largest n with `per_attended / 2 · n² + per_token · n <= seconds`; 0 if there is none."""
    if seconds <= 0:
        return 0.0
    if per_token <= 0 and per_attended <= 0:
        return NO_LIMIT
    root = sqrt(per_token * per_token + 2 * per_attended * seconds)
    return min(2 * seconds / (per_token + root), NO_LIMIT)  # the form of the positive root without cancellation
