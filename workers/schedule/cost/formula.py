"""The formula of a step's seconds, over the coefficients of one replica, or over arrays with those of many."""

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Figure = TypeVar("Figure", float, Floats)


class CostFormula(Generic[Figure]):
    """Predicts the seconds of steps; `StepCost` says what the coefficients mean.

    A router asks for its replicas at once: coefficients, tokens and seconds then are arrays, `[replica]`.
    """

    base: Figure
    per_prefill_token: Figure
    per_attended: Figure
    per_decode: Figure
    per_context: Figure
    bend_rows: Figure
    per_early_row: Figure
    least_with_chunk: Figure

    def larger(self, one: Figure, other: Figure) -> Figure:
        raise NotImplementedError

    def early_seconds(self, rows: Figure) -> Figure:
        """Return the seconds that `rows` rows take in addition to their price beyond the bend."""
        raise NotImplementedError

    def work_seconds(
        self, tokens: Figure, attended: Figure, logits: Figure | float, context: Figure, rows: Figure
    ) -> Figure:
        """Return the seconds of a step if launching its kernels takes no time. The quantities are those of `StepWork`;
        `logits` are its decodes and drafts."""
        seconds = self.base + self.per_prefill_token * tokens + self.per_attended * attended
        return seconds + (self.per_decode * logits + self.per_context * context) + self.early_seconds(rows)

    def chunk_step_seconds(self, start: Figure, num_tokens: Figure) -> Figure:
        """Return the seconds of a step of one chunk alone, of `num_tokens` after `start` tokens of context."""
        attended = num_tokens * (start + num_tokens / 2)
        seconds = self.work_seconds(num_tokens, attended, 0.0, start, num_tokens)
        return self.larger(seconds, self.least_with_chunk * (num_tokens > 1))

    def many_rows_seconds(self, start: Figure, num_tokens: Figure) -> Figure:
        """Return the seconds that a chunk of `num_tokens` after `start` tokens adds to a step of many rows."""
        return self.per_context * start + num_tokens * (
            self.per_prefill_token + self.per_attended * (start + num_tokens / 2)
        )

    def prefill_seconds(self, start: Figure, end: Figure, chunk: Figure) -> Figure:
        """Return the seconds of a prompt's tokens `[start, end)` alone on a replica, in steps of `chunk` tokens.

        There is at least one token.
        """
        num_full = (end - start - 1) // chunk  # steps before the last one, which may be shorter
        full = num_full * (self.base + self.early_seconds(chunk)) + self.many_rows_seconds(start, num_full * chunk)
        full = full + self.per_context * (num_full - 1) * (start + chunk * num_full / 2)
        return self.last_step_seconds(start, end, chunk) + self.larger(full, num_full * self.least_with_chunk)

    def last_step_seconds(self, start: Figure, end: Figure, chunk: Figure) -> Figure:
        """Return the seconds of the last of the steps that `prefill_seconds` is the sum of."""
        num_tokens = (end - start - 1) % chunk + 1
        return self.chunk_step_seconds(end - num_tokens, num_tokens)


@dataclass(frozen=True, slots=True)
class StepCosts(CostFormula[Floats]):
    """The coefficients of many replicas, `[replica]` each."""

    base: Floats
    per_prefill_token: Floats
    per_attended: Floats
    per_decode: Floats
    per_context: Floats
    bend_rows: Floats
    per_early_row: Floats
    least_with_chunk: Floats

    def larger(self, one: Floats, other: Floats) -> Floats:
        found: Floats = np.maximum(one, other)
        return found

    def early_seconds(self, rows: Floats) -> Floats:
        found: Floats = self.per_early_row * np.minimum(rows, self.bend_rows)
        return found
