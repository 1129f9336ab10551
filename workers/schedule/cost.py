"""Predict the seconds of a step: `StepCost` is the formula, `StepCostFit` learns its coefficients from measured steps.

`python benchmarks/step_cost.py` measures how well, for steps that the fit has not seen and for a served mix.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True, slots=True)
class StepWork:
    """The quantities of a step that its duration depends on."""

    prefill_tokens: int = 0
    attended: float = 0.0  # sum over chunks of tokens * (context before the chunk + tokens / 2)
    decodes: int = 0
    context: int = 0  # sum of tokens before each chunk and each decode: attention reads them once for each

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]], decode_contexts: Sequence[int] = ()) -> "StepWork":
        """Return the work of a step with these `chunks`, (start, num_tokens) each.

        `decode_contexts`: the number of tokens before each decoded token.
        """
        tokens, attended, context = 0, 0.0, sum(decode_contexts)
        for start, num_tokens in chunks:
            tokens += num_tokens
            attended += num_tokens * (start + num_tokens / 2)
            context += start
        return cls(tokens, attended, len(decode_contexts), context)

    def features(self) -> NDArray[np.float64]:
        """Return the factors of the five coefficients of `StepCost`, shape (5,)."""
        return np.array([1.0, self.prefill_tokens, self.attended, self.decodes, self.context])


class StepCost(BaseModel):
    """seconds(step) = base + per_prefill_token·tokens + per_attended·Σ chunk·(context + chunk/2) + per_decode·decodes
    + per_context·Σ context, the last sum over chunks and decodes. Measured, never configured; all coefficients are in
    seconds and at least 0.

    The last term is for reading the context's pages, once for each decode and once for each chunk of any size. Without
    it for chunks, a one-page chunk 12k tokens deep is predicted a fifth too short (SmolLM2-135M, Zen 4, 2026-11-21).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: float = Field(ge=0)
    per_prefill_token: float = Field(ge=0)
    per_attended: float = Field(0.0, ge=0)
    per_decode: float = Field(0.0, ge=0)
    per_context: float = Field(0.0, ge=0)

    @classmethod
    def of(cls, coefficients: Sequence[float]) -> "StepCost":
        """Create a cost from its `coefficients`."""
        return cls(**dict(zip(cls.model_fields, coefficients, strict=True)))

    @property
    def coefficients(self) -> tuple[float, float, float, float, float]:
        """Return the coefficients in the order of `StepWork.features`."""
        return self.base, self.per_prefill_token, self.per_attended, self.per_decode, self.per_context

    def seconds(self, work: StepWork) -> float:
        """Return the predicted seconds of a step."""
        return (
            self.base
            + self.per_prefill_token * work.prefill_tokens
            + self.per_attended * work.attended
            + self.decode_seconds(work.decodes, work.context)
        )

    def decode_seconds(self, decodes: float, context: float) -> float:
        """Return the seconds that `decodes` streams of `context` tokens in total add to a step."""
        return self.per_decode * decodes + self.per_context * context

    def chunk_seconds(self, start: int, num_tokens: float) -> float:
        """Return the seconds that a chunk of `num_tokens` after `start` tokens of context adds to a step."""
        if num_tokens <= 0:
            return 0.0
        return self.per_context * start + num_tokens * (
            self.per_prefill_token + self.per_attended * (start + num_tokens / 2)
        )

    def tokens_within(self, seconds: float, start: int) -> int:
        """Return the tokens of the largest chunk after `start` tokens of context that adds at most `seconds`."""
        seconds -= self.per_context * start
        if seconds <= 0:
            return 0
        linear = self.per_prefill_token + self.per_attended * start
        if linear <= 0 and self.per_attended <= 0:
            return _NO_LIMIT
        # The positive root of per_attended/2 · n² + linear · n = seconds, in the form without cancellation.
        root = (linear * linear + 2 * self.per_attended * seconds) ** 0.5
        return min(int(2 * seconds / (linear + root)), _NO_LIMIT)

    def prefill_seconds(self, start: int, end: int, chunk: int) -> float:
        """Return the seconds of a prompt's tokens `[start, end)` alone on a replica, in steps of `chunk` tokens."""
        tokens = max(end - start, 0)
        num_chunks = -(-tokens // chunk)
        read_again = self.per_context * (num_chunks - 1) * (start + chunk * num_chunks / 2) if num_chunks else 0.0
        return num_chunks * self.base + self.chunk_seconds(start, tokens) + read_again

    def last_step_seconds(self, start: int, end: int, chunk: int) -> float:
        """Return the seconds of the last of the steps that `prefill_seconds` is the sum of; 0 where there is none."""
        if end <= start:
            return 0.0
        tokens = (end - start - 1) % chunk + 1
        return self.base + self.chunk_seconds(end - tokens, tokens)


_NO_LIMIT = 1 << 40

# The columns of `StepWork.features` differ by nine orders of magnitude; scaled, the normal equations are solvable.
_SCALE = np.array([1.0, 1e2, 1e5, 1e1, 1e4])


@dataclass(slots=True)
class StepCostFit:
    """Fits a `StepCost` to measured steps.

    The method is least squares over the warm-up sweep and, with exponential forgetting, over the steps since: recursive
    least squares in its information form, two running sums.

    Errors are relative to the step's duration, so that a decode of 6 ms weighs as much as a chunk of 600 ms. They are
    relative to the predicted duration, so that the mean is learnt. Relative to the actual one, slow steps weigh less:
    predictions are 8 % too short if steps vary by 20 %.

    The sums of the sweep never decay: after a week of decodes alone the replica still knows what a chunk costs.
    Coefficients cannot be negative: the best feasible solution among all subsets of columns is taken, which is exact
    for five. A step that takes a multiple of its prediction (a pause, another process) is left out, unless such steps
    become the rule.
    """

    sweep: Sequence[tuple[StepWork, float]]  # (work, seconds) measured at the start; at least one
    memory: int = 512  # steps after which an observation's weight is 1/e: seconds of decodes, enough to average
    cost: StepCost = field(init=False)
    num_rejected: int = 0
    overrun: float = 1.2  # until steps with chunks are seen: 1.1 to 1.2 was measured live, see benchmarks/RESULTS.md
    """95th percentile of actual / predicted seconds of recent steps with chunks; at least 1."""
    _sweep_sums: tuple[NDArray[np.float64], NDArray[np.float64]] = field(init=False)
    _sums: tuple[NDArray[np.float64], NDArray[np.float64]] = field(init=False)
    _errors: deque[float] = field(init=False)
    _overruns: deque[float] = field(init=False)
    _rejected_in_a_row: int = 0
    _since_fit: int = 0

    def __post_init__(self) -> None:
        if not self.sweep:
            raise ValueError("sweep must have at least one measured step")
        self._errors = deque(maxlen=self.memory)
        self._overruns = deque(maxlen=self.memory // 4)
        self._sums = np.zeros((5, 5)), np.zeros(5)
        self._sweep_sums = np.zeros((5, 5)), np.zeros(5)
        for work, seconds in self.sweep:
            _accumulate(self._sweep_sums, work, seconds, seconds)
        self._fit()

    def observe(self, work: StepWork, seconds: float) -> float:
        """Learn from a step that took `seconds`, and return the seconds that were predicted for it."""
        predicted = self.cost.seconds(work)
        error = abs(predicted - seconds) / seconds
        self._errors.append(error)
        if work.prefill_tokens:
            self._overruns.append(seconds / predicted)
        is_outlier = seconds > _OUTLIER * predicted or predicted > _OUTLIER * seconds
        if is_outlier and self._rejected_in_a_row < _PATIENCE:
            self._rejected_in_a_row += 1
            self.num_rejected += 1
            return predicted
        if not is_outlier:
            self._rejected_in_a_row = 0
        forget = 1 - 1 / self.memory
        for total in self._sums:
            total *= forget
        scale = min(max(predicted, seconds / _OUTLIER), seconds * _OUTLIER)
        _accumulate(self._sums, work, seconds, scale)
        self._since_fit += 1
        if self._since_fit >= _FIT_EVERY:
            self._fit()
        return predicted

    def error(self, quantile: float) -> float:
        """Return a quantile of |predicted - actual| / actual over the last `memory` steps; 0 before the first."""
        return float(np.quantile(self._errors, quantile)) if self._errors else 0.0

    def _fit(self) -> None:
        self._since_fit = 0
        if len(self._overruns) >= _FIT_EVERY:
            self.overrun = max(float(np.quantile(self._overruns, 0.95)), 1.0)
        matrix = self._sweep_sums[0] + self._sums[0]
        vector = self._sweep_sums[1] + self._sums[1]
        base, *rest = (float(value) for value in non_negative_solution(matrix, vector) / _SCALE)
        self.cost = StepCost(
            base=base,
            per_prefill_token=rest[0],
            per_attended=rest[1],
            per_decode=rest[2],
            per_context=rest[3],
        )


_OUTLIER = 3.0  # actual / predicted, or the inverse; predictions err by a quarter at the 90th percentile
_PATIENCE = 8  # outliers in a row that are left out; after so many the device has changed, and they count
_FIT_EVERY = 16  # steps; a fit takes 1.2 ms of CPU time (Zen 4), too much for every step


@dataclass(slots=True)
class IntervalShare:
    """Learns how soon the steps of a full pipeline follow each other, as a share of the seconds that one takes.

    A step alone in a pipeline takes the seconds of all stages: that is its latency, which `StepCost` predicts. With a
    step in every stage, one ends whenever the slowest stage has done its part. The share is the mean of these
    intervals, divided by the mean predicted latency. It is 1 / stages where stages are alike, more where one is slower
    or waits for others, and 1 for a replica of one stage. What prompts wait for is the interval of steps; what a
    stream waits for is their latency.

    Both means are over the warm-up and, with exponential forgetting, over the full steps since. A single step's
    interval also depends on its neighbours' work, so the single ratios are not averaged.
    """

    measured: Iterable[tuple[float, float]]  # (interval, predicted latency) of steps in the warm-up, in seconds
    memory: int = 256  # steps after which a step's weight is 1/e
    _intervals: float = field(init=False)
    _latencies: float = field(init=False)

    def __post_init__(self) -> None:
        measured = list(self.measured)
        self._intervals = sum(interval for interval, _ in measured)
        self._latencies = sum(latency for _, latency in measured)

    @property
    def share(self) -> float:
        """Seconds between the ends of two steps of a full pipeline, as a share of a step's predicted seconds."""
        return self._intervals / self._latencies if self._latencies else 1.0

    def observe(self, interval: float, latency: float) -> None:
        """Learn from a step that ended `interval` after the one before it, and is predicted to take `latency` alone."""
        forget = 1 - 1 / self.memory
        self._intervals = forget * self._intervals + min(interval, _OUTLIER * latency)  # one pause must not count more
        self._latencies = forget * self._latencies + latency


def _accumulate(
    sums: tuple[NDArray[np.float64], NDArray[np.float64]], work: StepWork, seconds: float, scale: float
) -> None:
    """Add one step to the sums of the normal equations. `scale`: seconds that errors are relative to."""
    row = work.features() / _SCALE / scale
    sums[0][...] += np.outer(row, row)
    sums[1][...] += row * (seconds / scale)


@cache
def _subsets() -> tuple[tuple[int, ...], ...]:
    return tuple(subset for size in range(5, 0, -1) for subset in combinations(range(5), size))


def non_negative_solution(matrix: NDArray[np.float64], vector: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return argmin over x >= 0 of x'Mx - 2v'x. One subset of columns has the optimum, with all entries positive."""
    ridge = 1e-9 * np.trace(matrix) * np.eye(5)  # a column without data must not make the system singular
    best, best_value = np.zeros(5), 0.0
    for subset in _subsets():
        index = list(subset)
        solution = np.linalg.solve((matrix + ridge)[np.ix_(index, index)], vector[index])
        if (solution < 0).any():
            continue
        full = np.zeros(5)
        full[index] = solution
        value = float(full @ matrix @ full - 2 * vector @ full)
        if value < best_value:
            best, best_value = full, value
        if len(index) == 5:
            break  # the unconstrained optimum is feasible
    return best
