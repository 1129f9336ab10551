"""The formula of a step's seconds, over the coefficients of one replica, or over arrays with those of many."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Figure = TypeVar("Figure", float, Floats)


@dataclass(frozen=True)
class CostFormula(Generic[Figure]):
    """Predicts the seconds of steps; `StepCost` says what the coefficients mean.

    A router asks for its replicas at once: coefficients, tokens and seconds then are arrays, `[replica]`.
    """

    base: Figure
    per_prefill_token: Figure
    per_attended: Figure
    per_decode: Figure
    per_context: Figure
    breakpoint_rows: Figure
    per_early_row: Figure
    least_with_chunk: Figure
    per_chunk_context: Figure
    per_adapter: Figure
    per_adapted: Figure
    most_context: Figure
    per_far: Figure

    larger: ClassVar[Callable[..., Any]]  # of two figures
    smaller: ClassVar[Callable[..., Any]]
    floor: ClassVar[Callable[..., Any]]
    chosen: ClassVar[Callable[..., Any]]  # of two figures: the first where a condition holds

    def early_seconds(self, rows: Figure) -> Figure:
        """Return the seconds that `rows` rows take in addition to their price beyond the breakpoint."""
        seconds: Figure = self.per_early_row * self.smaller(rows, self.breakpoint_rows)
        return seconds

    def attended_seconds(self, attended: Figure, rows: Figure) -> Figure:
        """Return the seconds in which attention of `rows` rows of prompts or drafts reads `attended` tokens in all."""
        near = self.smaller(attended, self.most_context * rows)
        seconds: Figure = self.per_attended * near + self.per_far * (attended - near)
        return seconds

    def context_seconds(self, context: Figure, decodes: Figure) -> Figure:
        """Return the seconds in which attention of `decodes` streams reads `context` tokens in all."""
        near = self.smaller(context, self.most_context * decodes)
        seconds: Figure = self.per_context * near + self.per_far * (context - near)
        return seconds

    def chunks_seconds(
        self, tokens: Figure, attended: Figure, rows: Figure, chunk_context: Figure, attending: Figure
    ) -> Figure:
        """Return the seconds of a step without what decodes and adapters add, if launching its kernels takes no time.

        The quantities are those of `StepWork`; `rows` counts those of decodes too, `attending` tokens and drafts.
        """
        seconds = self.base + self.per_prefill_token * tokens + self.attended_seconds(attended, attending)
        early: Figure = self.per_early_row * self.smaller(
            rows, self.breakpoint_rows
        )  # `early_seconds`: a call takes time
        return seconds + self.per_chunk_context * chunk_context + early

    def fixed_seconds(self, start: Figure) -> Figure:
        """Return the seconds of a step with a chunk after `start` tokens that do not grow with a chunk of many rows.

        Below 0 where the first rows of a step are cheaper than further ones."""
        seconds: Figure = self.base + self.early_seconds(self.breakpoint_rows) + self.per_chunk_context * start
        return seconds

    def breakpoint_seconds(self, start: Figure) -> Figure:
        """Return the seconds of the shortest step in which a further token has the price of many rows."""
        return self.chunk_step_seconds(start, self.larger(self.breakpoint_rows, 2))

    def chunk_step_seconds(self, start: Figure, num_tokens: Figure, adapter: float = 0) -> Figure:
        """Return the seconds of a step of one chunk alone, of `num_tokens` after `start` tokens of context."""
        attended = num_tokens * (start + num_tokens / 2)
        seconds = self.chunks_seconds(num_tokens, attended, num_tokens, start, num_tokens)
        if adapter:
            seconds = seconds + self.per_adapted * (num_tokens * adapter)
        longer: Figure = self.larger(seconds, self.least_with_chunk * (num_tokens > 1))
        return longer

    def per_token(self, context: Figure, adapter: float) -> Figure:
        """Return the seconds of a prompt token after `context` tokens, in a step of many rows."""
        near = self.smaller(context, self.most_context)
        seconds: Figure = self.per_prefill_token + self.per_attended * near + self.per_far * (context - near)
        return seconds + self.per_adapted * adapter if adapter else seconds

    def many_rows_seconds(self, start: Figure, num_tokens: Figure, adapter: float = 0) -> Figure:
        """Return the seconds that a chunk of `num_tokens` after `start` tokens adds to a step of many rows."""
        return self.per_chunk_context * start + num_tokens * self.per_token(start + num_tokens / 2, adapter)

    def prefill_seconds(self, start: Figure, end: Figure, chunk: Figure, adapter: float = 0) -> Figure:
        """Return the seconds of a prompt's tokens `[start, end)` alone on a replica, in steps of `chunk` tokens.

        There is at least one token.
        """
        num_full = self.floor((end - start - 1) / chunk)  # steps before the last one, which may be shorter
        full = num_full * (self.base + self.early_seconds(chunk))
        full = full + self.many_rows_seconds(start, num_full * chunk, adapter)
        full = full + self.per_chunk_context * (num_full - 1) * (start + chunk * num_full / 2)
        longer: Figure = self.larger(full, num_full * self.least_with_chunk)
        return self.chunk_step_seconds(start + num_full * chunk, end - start - num_full * chunk, adapter) + longer

    def last_step_seconds(self, start: Figure, end: Figure, chunk: Figure, adapter: float = 0) -> Figure:
        """Return the seconds of the last of the steps that `prefill_seconds` is the sum of."""
        before = self.floor((end - start - 1) / chunk) * chunk  # in half the time of `%` over arrays
        return self.chunk_step_seconds(start + before, end - start - before, adapter)


class StepCosts(CostFormula[Floats]):
    """The coefficients of many replicas, `[replica]` each."""

    larger = staticmethod(np.maximum)
    smaller = staticmethod(np.minimum)
    floor = staticmethod(np.floor)
    chosen = staticmethod(np.where)
