"""Predict the seconds in which pictures are encoded, and learn them from measured batches of pictures."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from crossdock.workers.schedule.cost.cost_fit import non_negative_solution
from crossdock.workers.schedule.request.items import Item

_Floats = NDArray[np.float64]
_SCALE = np.array([1.0, 1e2, 1e5])  # the columns differ by many orders of magnitude
_OUTLIER = 3.0  # actual / predicted, or the inverse: a pause, or another process
_PATIENCE = 8  # outliers in a row that are left out; after so many the device has changed
_MEMORY = 64  # batches after which an observation's weight is 1/e


class EncoderCost(BaseModel):
    """seconds(batch of pictures) = base + per_embedding_token·Σ rows + per_square·Σ rows². Measured, never configured.

    Rows are those of the encoder's output, one for each placeholder. A model has a fixed number of patches for each
    row, and patches of one picture attend to each other. Patches of a video attend within their own group of frames:
    each group counts as a picture.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: float = Field(0.0, ge=0)
    per_embedding_token: float = Field(0.0, ge=0)
    per_square: float = Field(0.0, ge=0)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Return the coefficients in the order of the fields, for live profiles."""
        return self.base, self.per_embedding_token, self.per_square

    def slowed(self, scale: float) -> "EncoderCost":
        """Return the cost of a device that takes `scale` times as long."""
        base, per_embedding_token, per_square = (scale * each for each in self.coefficients)
        return EncoderCost(base=base, per_embedding_token=per_embedding_token, per_square=per_square)

    def seconds(self, items: Iterable[Item]) -> float:
        """Return the predicted seconds in which `items` are encoded in one batch; 0 without items."""
        shapes = [
            (item.num_embedding_tokens, item.num_embedding_tokens * item.num_embedding_tokens / item.num_parts)
            for item in items
        ]
        rows = sum(rows for rows, _ in shapes)
        squares = sum(square for _, square in shapes)
        return float(batch_seconds(*self.coefficients, len(shapes), rows, squares))

    def added_seconds(self, num_embedding_tokens: int, num_parts: int = 1) -> float:
        """Return the seconds that one more picture, or video of so many parts, adds to a batch."""
        return float(
            batch_seconds(
                0.0,
                *self.coefficients[1:],
                1,
                num_embedding_tokens,
                num_embedding_tokens * num_embedding_tokens / num_parts,
            )
        )


def batch_seconds(base: Any, per_embedding_token: Any, per_square: Any, num_items: Any, rows: Any, squares: Any) -> Any:
    """Return the seconds of one batch of pictures; 0 without items. Floats, or arrays of replicas.

    `rows`: of all items together. `squares`: sum of the squares of the rows of each part of an item.
    """
    return base * (num_items > 0) + per_embedding_token * rows + per_square * squares


@dataclass(slots=True)
class EncoderCostFit:
    """Fits an `EncoderCost` to measured batches, as `StepCostFit` does to steps.

    The sums of the first measurements never decay. Later ones are forgotten exponentially.
    """

    sweep: Sequence[tuple[Sequence[int], float]]  # (rows of each picture of a batch, seconds) measured at the start
    cost: EncoderCost = field(init=False)
    _sweep_sums: tuple[_Floats, _Floats] = field(init=False)
    _sums: tuple[_Floats, _Floats] = field(default_factory=lambda: (np.zeros((3, 3)), np.zeros(3)))
    _rejected_in_a_row: int = 0

    def __post_init__(self) -> None:
        if not self.sweep:
            raise ValueError("sweep must have at least one measured batch")
        matrix = np.zeros((3, 3))
        vector = np.zeros(3)
        for rows, seconds in self.sweep:
            columns = _columns(rows) / seconds
            matrix = matrix + np.outer(columns, columns)
            vector = vector + columns
        self._sweep_sums = matrix, vector
        self._fit()

    def observe(self, items: Sequence[Item], seconds: float) -> float:
        """Learn from a batch of pictures that took `seconds`, and return the seconds that were predicted for it."""
        predicted = self.cost.seconds(items)
        is_outlier = seconds > _OUTLIER * predicted or predicted > _OUTLIER * seconds
        if is_outlier and self._rejected_in_a_row < _PATIENCE:
            self._rejected_in_a_row += 1
            return predicted
        self._rejected_in_a_row = self._rejected_in_a_row + 1 if is_outlier else 0
        scale = min(max(predicted, seconds / _OUTLIER), seconds * _OUTLIER)
        parts = [item.num_embedding_tokens / item.num_parts for item in items for _ in range(item.num_parts)]
        columns = _columns(parts) / scale
        keep = 1 - 1 / _MEMORY
        matrix, vector = self._sums
        self._sums = keep * matrix + np.outer(columns, columns), keep * vector + columns * (seconds / scale)
        self._fit()
        return predicted

    def _fit(self) -> None:
        (matrix, vector) = self._sweep_sums
        (later, later_vector) = self._sums
        base, per_embedding_token, per_square = non_negative_solution(matrix + later, vector + later_vector) / _SCALE
        self.cost = EncoderCost(
            base=float(base), per_embedding_token=float(per_embedding_token), per_square=float(per_square)
        )


def _columns(rows: Sequence[float]) -> _Floats:
    columns: _Floats = np.array([1.0, sum(rows), sum(each * each for each in rows)]) / _SCALE
    return columns
