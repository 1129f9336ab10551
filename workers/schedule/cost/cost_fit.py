"""Learn what steps cost: `StepCostFit` fits the coefficients of `StepCost` to measured steps."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from crossdock.workers.schedule.cost.cost import NO_LIMIT, StepCost, StepWork

_Floats = NDArray[np.float64]

_BREAKPOINTS = (4, 8, 16, 32, 64, 128, 256, 512)  # rows: real breakpoints are smooth, so finer ones fit no better
_SHAPES = ((0, 0), *((breakpoint, sign) for breakpoint in _BREAKPOINTS for sign in (1, -1)))
"""Shapes of the cost of rows: (breakpoint, 1 if rows are cheaper before it, -1 if they are dearer). First: none.

A shape has one more column than a line, whose coefficient is what a row costs in addition beyond the breakpoint, or
before it. So the fit of each shape is one of non-negative least squares, and no row ever makes a step shorter.
"""
_BREAKPOINT_OF, _SIGN_OF = np.array(_SHAPES, dtype=np.float64).T  # of every shape

_SCALE = np.array([1.0, 1e2, 1e5, 1e1, 1e4, 1e4, 1e2, 1e7, 1e8, 1e5])
"""The columns differ by nine orders of magnitude; scaled, the normal equations are solvable. The last three are those
of adapters, and of tokens that an indexer scores alone. They are solved for once a step had some."""

_COLUMNS = len(_SCALE)
_USUAL = range(_COLUMNS - 3)
_ADAPTERS = range(_COLUMNS - 3, _COLUMNS - 1)
_ALIKE = 1e-5 * np.outer(*[np.array([0, 0, 0, 0, 1, -1, 0, 0, 0, 0])] * 2)
"""Makes a token of context cost the same before a chunk as before a decode, where no step shows what one of them costs.
Relative to the trace of the matrix, so that a single step that shows it outweighs this."""

_CLEARLY = 0.8
"""Share of the squared error that another shape must leave to be taken: noise alone must not bend a line."""

_OUTLIER = 3.0  # actual / predicted, or the inverse; predictions err by a quarter at the 90th percentile
_PATIENCE = 8  # outliers in a row that are left out; after so many the device has changed, and they count
_FIT_EVERY = 16  # steps; so a step that is observed costs 48 us on average, fits included (Zen 5)
_MOST_RATIO = 3.0  # interval / predicted latency that counts at most: one pause must not count more


@dataclass(slots=True)
class _Sums:
    """The sums of the normal equations, for every shape at once, and of the seconds of steps that launching bounds."""

    most_context: float  # of the cost
    matrix: _Floats = field(default_factory=lambda: np.zeros((len(_SHAPES), _COLUMNS, _COLUMNS)))
    vector: _Floats = field(default_factory=lambda: np.zeros((len(_SHAPES), _COLUMNS)))
    square: float = 0.0  # of the seconds, relative to the scale
    launch: float = 0.0
    launch_weight: float = 0.0

    def add(self, work: StepWork, seconds: float, scale: float) -> None:
        """Add a step whose seconds depend on its work. `scale`: seconds that errors are relative to."""
        rows = _columns(work, self.most_context) / scale
        self.matrix += rows[:, :, None] * rows[:, None, :]
        self.vector += rows * (seconds / scale)
        self.square += (seconds / scale) ** 2

    def add_launch(self, seconds: float, scale: float) -> None:
        """Add a step that took as long as launching its kernels."""
        self.launch += seconds / scale**2
        self.launch_weight += 1 / scale**2

    def forget(self, share: float) -> None:
        """Let everything so far weigh less."""
        self.matrix *= share
        self.vector *= share
        self.square *= share
        self.launch *= share
        self.launch_weight *= share

    def plus(self, other: "_Sums") -> "_Sums":
        return _Sums(
            self.most_context,
            self.matrix + other.matrix,
            self.vector + other.vector,
            self.square + other.square,
            self.launch + other.launch,
            self.launch_weight + other.launch_weight,
        )

    def solve(self, shape: int) -> tuple[StepCost, float]:
        """Return the cost of the shape that fits best, and its squared error."""
        columns = [*_USUAL, *(_ADAPTERS if self.vector[shape, _ADAPTERS[-1]] else ())]
        columns += [_COLUMNS - 1] if self.vector[shape, -1] else []
        square = np.ix_(columns, columns)
        matrix = self.matrix[shape][square]
        vector = self.vector[shape, columns]
        found = non_negative_solution(matrix + np.trace(matrix) * _ALIKE[square], vector)
        error = self.square + float(found @ matrix @ found - 2 * vector @ found)
        least = self.launch / self.launch_weight if self.launch_weight else 0.0
        coefficients = np.zeros(_COLUMNS)
        coefficients[columns] = found / _SCALE[columns]
        return _cost(shape, coefficients, least, self.most_context), max(error, 0.0) + _EXACT * self.square


_EXACT = 1e-3  # squared relative error for which no shape is preferred: 3 %, the noise of the best of three steps


@dataclass(slots=True)
class StepCostFit:
    """Fits a `StepCost` to measured steps.

    The method is least squares over the warm-up sweep and, with exponential forgetting, over the steps since: recursive
    least squares in its information form, two running sums for each of the shapes that the cost of rows may have.

    Errors are relative to the step's duration, so that a decode of 6 ms weighs as much as a chunk of 600 ms. They are
    relative to the predicted duration, so that the mean is learnt. Relative to the actual one, slow steps weigh less:
    predictions are 8 % too short if steps vary by 20 %.

    The sums of the sweep never decay: after a week of decodes alone the replica still knows what a chunk costs.
    Coefficients cannot be negative: the best feasible solution among all subsets of columns is taken, which is exact
    for so few. A step that takes a multiple of its prediction (a pause, another process) is left out, unless such steps
    become the rule.

    The sweep shows whether launching kernels bounds short steps with a chunk. A later step whose prediction is that
    bound counts for the bound; other steps count for the coefficients.
    """

    sweep: Sequence[tuple[StepWork, float]]  # (work, seconds) measured at the start; at least one
    memory: int = 512  # steps after which an observation's weight is 1/e: seconds of decodes, enough to average
    most_context: float = NO_LIMIT  # tokens that a row attends to, where an indexer chooses them
    cost: StepCost = field(init=False)
    num_rejected: int = 0
    overrun: float = 1.2  # until steps with chunks are seen: 1.1 to 1.2 was measured live
    """95th percentile of actual / predicted seconds of recent steps with chunks, outliers apart; at least 1.

    Predicted by the cost of now: so what the cost has learnt of a slower machine is not counted twice."""
    _sweep_sums: _Sums = field(init=False)
    _sums: _Sums = field(init=False)
    _shape: int = 0  # the shape in use
    _other: int = 0  # the shape that the last fit compared with it
    _errors: deque[float] = field(init=False)
    _chunked: deque[tuple[StepWork, float]] = field(init=False)  # recent steps with chunks, and their seconds
    _rejected_in_a_row: int = 0
    _since_fit: int = 0

    def __post_init__(self) -> None:
        if not self.sweep:
            raise ValueError("sweep must have at least one measured step")
        self._errors = deque(maxlen=self.memory)
        self._chunked = deque(maxlen=self.memory // 4)
        self._sums = _Sums(self.most_context)
        self._sweep_sums, self._shape = _of_sweep(self.sweep, self.most_context)
        self._fit()

    def observe(self, work: StepWork, seconds: float) -> float:
        """Learn from a step that took `seconds`, and return the seconds that were predicted for it."""
        predicted = self.cost.seconds(work)
        error = abs(predicted - seconds) / seconds
        self._errors.append(error)
        is_outlier = seconds > _OUTLIER * predicted or predicted > _OUTLIER * seconds
        if is_outlier and self._rejected_in_a_row < _PATIENCE:
            self._rejected_in_a_row += 1
            self.num_rejected += 1
            return predicted
        if not is_outlier:
            self._rejected_in_a_row = 0
        if work.prefill_tokens or work.drafts:
            self._chunked.append((work, seconds))
        self._sums.forget(1 - 1 / self.memory)
        scale = min(max(predicted, seconds / _OUTLIER), seconds * _OUTLIER)
        if predicted > self.cost.device_seconds(work):
            self._sums.add_launch(seconds, scale)
        else:
            self._sums.add(work, seconds, scale)
        self._since_fit += 1
        if self._since_fit >= _FIT_EVERY:
            self._fit()
        return predicted

    def error(self, quantile: float) -> float:
        """Return a quantile of |predicted - actual| / actual over the last `memory` steps; 0 before the first."""
        return float(np.quantile(self._errors, quantile)) if self._errors else 0.0

    def _fit(self) -> None:
        """Solve for the shape in use and for one other shape, in turn: all shapes at once would be a pause of 20 ms."""
        self._since_fit = 0
        sums = self._sweep_sums.plus(self._sums)
        self._other = (self._other + 1) % len(_SHAPES)
        self.cost, error = sums.solve(self._shape)
        cost, other_error = sums.solve(self._other)
        if other_error < _CLEARLY * error:
            self.cost = cost
            self._shape = self._other
        if len(self._chunked) >= _FIT_EVERY:
            ratios = [seconds / self.cost.seconds(work) for work, seconds in self._chunked]
            self.overrun = max(float(np.quantile(ratios, 0.95)), 1.0)


def _of_sweep(sweep: Sequence[tuple[StepWork, float]], most_context: float) -> tuple[_Sums, int]:
    """Return the sums of the sweep, and the shape that fits it best.

    Launching may bound the shortest steps with a chunk. How many steps are bound is found by trial.
    """
    ordered = sorted(sweep, key=lambda step: (step[0].is_decodes_alone, step[1]))
    num_with_chunk = sum(not work.is_decodes_alone for work, _ in sweep)
    best = plain_sums = _split(ordered, 0, most_context)
    best_error = inf
    for num_launched in range(max(num_with_chunk - _LEAST_BEYOND, 0) + 1):
        sums = _split(ordered, num_launched, most_context)
        cost, _ = sums.solve(0)
        error = _squared_error(cost, sweep)
        if num_launched and error >= _CLEARLY * best_error:
            continue
        best = sums
        best_error = error
    plain = _best_shape(plain_sums, sweep)
    bounded = _best_shape(best, sweep)
    if bounded[1] < _CLEARLY**2 * plain[1]:
        return best, bounded[0]
    return plain_sums, plain[0]


_LEAST_BEYOND = 3  # steps with a chunk that launching does not bound: fewer do not show what a chunk costs


def _split(ordered: Sequence[tuple[StepWork, float]], num_launched: int, most_context: float) -> _Sums:
    """Return the sums of steps of which launching bounds the first `num_launched`."""
    sums = _Sums(most_context)
    for number, (work, seconds) in enumerate(ordered):
        if number < num_launched:
            sums.add_launch(seconds, seconds)
        else:
            sums.add(work, seconds, seconds)
    return sums


def _best_shape(sums: _Sums, sweep: Sequence[tuple[StepWork, float]]) -> tuple[int, float]:
    """Return the shape that fits `sums` best, and the squared error with it over the whole sweep."""
    solved = [sums.solve(shape) for shape in range(len(_SHAPES))]
    errors = [error * (1.0 if shape else _CLEARLY) for shape, (_, error) in enumerate(solved)]
    shape = errors.index(min(errors))
    return shape, _squared_error(solved[shape][0], sweep)


def _squared_error(cost: StepCost, sweep: Sequence[tuple[StepWork, float]]) -> float:
    """Return the sum of squared relative errors, with `_EXACT` for each step, as in `solve`."""
    return sum((cost.seconds(work) / seconds - 1) ** 2 + _EXACT for work, seconds in sweep)


def _columns(work: StepWork, most_context: float) -> _Floats:
    """Return the scaled factors of the coefficients, for every shape."""
    columns = np.empty((len(_SHAPES), _COLUMNS))
    tokens, attended, decodes, context, drafts, chunk_context, *adapters = work
    near = min(attended, most_context * (tokens + drafts))
    near_context = min(context, most_context * decodes)
    columns[:, :6] = (1.0, tokens, near, decodes + drafts, near_context, chunk_context)
    before = np.minimum(_BREAKPOINT_OF, work.rows)
    columns[:, 6] = np.where(_SIGN_OF > 0, work.rows - before, before)
    columns[:, 7:] = (*adapters, attended - near + context - near_context)
    columns /= _SCALE
    return columns


def _cost(shape: int, found: _Floats, least: float, most_context: float) -> StepCost:
    """Return the cost with the solution of one shape, `[column]`."""
    breakpoint, sign = _SHAPES[shape]
    base, per_prefill_token, per_attended, per_decode, per_context, per_chunk_context, extra = map(float, found[:7])
    per_adapter, per_adapted, per_far = map(float, found[7:])
    beyond = extra if sign > 0 else 0.0
    return StepCost(
        base=base,
        per_prefill_token=per_prefill_token + beyond,
        per_attended=per_attended,
        per_decode=per_decode + beyond,
        per_context=per_context,
        per_chunk_context=per_chunk_context,
        breakpoint_rows=breakpoint if extra else 0.0,
        per_early_row=-sign * extra if extra else 0.0,
        least_with_chunk=least,
        per_adapter=per_adapter,
        per_adapted=per_adapted,
        most_context=most_context,
        per_far=per_far,
    )


@cache
def _subsets(num_columns: int) -> NDArray[np.bool_]:
    """Return every subset of the columns but the empty one, [subset, column]."""
    numbers = np.arange(1, 1 << num_columns)
    return (numbers[:, None] >> np.arange(num_columns) & 1).astype(bool)


def non_negative_solution(matrix: _Floats, vector: _Floats) -> _Floats:
    """Return argmin over x >= 0 of x'Mx - 2v'x. One subset of columns has the optimum, with all entries positive."""
    num_columns = len(vector)
    ridge = 1e-9 * np.trace(matrix) * np.eye(num_columns)  # a column without data must not make the system singular
    free: _Floats = np.linalg.solve(matrix + ridge, vector)
    if (free >= 0).all():
        return free
    subsets = _subsets(num_columns)
    systems = np.where(subsets[:, :, None] & subsets[:, None, :], matrix + ridge, np.eye(num_columns))
    found: _Floats = np.linalg.solve(systems, np.where(subsets, vector, 0.0)[:, :, None])[:, :, 0]
    found = found[(found >= 0).all(axis=1)]
    values = np.einsum("si,ij,sj->s", found, matrix, found) - 2 * found @ vector
    if not len(values) or values.min() >= 0:
        return np.zeros(num_columns)
    best: _Floats = found[values.argmin()]
    return best


@dataclass(slots=True)
class IntervalShare:
    """Learns how soon the steps of a full pipeline follow each other, as a share of the seconds that one takes.

    A step alone in a pipeline takes the seconds of all stages: that is its latency, which `StepCost` predicts. With a
    step in every stage, one ends whenever the slowest stage has done its part. The share is the mean of these
    intervals, divided by the mean predicted latency. The share is 1 / stages where stages are alike, more where one is
    slower or waits for others, and 1 for a replica of one stage. Prompts wait for the interval of steps, a stream for
    their latency.

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
        self._intervals = forget * self._intervals + min(interval, _MOST_RATIO * latency)
        self._latencies = forget * self._latencies + latency
