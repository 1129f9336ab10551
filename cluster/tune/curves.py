"""What a sweep shows: for each size of chunk, how fast prompts go and how long the streams beside them wait."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from crossdock.workers.schedule.cost import StepCost, StepCostFit, StepWork

NEAR_BEST = 0.9  # of the best tokens/s: from there on larger chunks gain little
_FOLDS = 5


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of step: a chunk after `context` tokens, beside `decodes` streams of `context` tokens each."""

    chunk: int  # tokens; 0: decodes alone
    decodes: int
    context: int  # tokens
    seconds: float = 0.0  # median of the measured steps

    @property
    def work(self) -> StepWork:
        return StepWork.of([(self.context, self.chunk)] if self.chunk else [], [self.context] * self.decodes)


@dataclass(frozen=True)
class Curves:
    """The measured cells, and what is read off them. Cells that the KV pool did not hold are absent."""

    cells: Sequence[Cell]

    @cached_property
    def chunks(self) -> list[int]:
        return sorted({cell.chunk for cell in self.cells} - {0})

    @cached_property
    def decodes(self) -> list[int]:
        """Numbers of streams beside which chunks were measured, 0 the chunks alone."""
        return sorted({cell.decodes for cell in self.cells if cell.chunk})

    def stall(self, chunk: int, decodes: int) -> float | None:
        """Seconds of the longest such step: the gap between two tokens that every stream in it sees."""
        return max((cell.seconds for cell in self._of(chunk, decodes)), default=None)

    def rate(self, chunk: int, decodes: int) -> float | None:
        """Prompt tokens per second while every step carries such a chunk, over all contexts."""
        cells = self._of(chunk, decodes)
        return chunk * len(cells) / sum(cell.seconds for cell in cells) if cells else None

    @cached_property
    def best_rate(self) -> float:
        rates = [self.rate(chunk, decodes) for chunk in self.chunks for decodes in self.decodes]
        return max((rate for rate in rates if rate is not None), default=0.0)

    def efficiency(self, chunk: int, decodes: int) -> float | None:
        """Its rate, relative to the best of all."""
        rate = self.rate(chunk, decodes)
        return rate / self.best_rate if rate is not None else None

    def knee(self, decodes: int) -> int:
        """The smallest chunk whose tokens/s are within 10 % of the best beside as many streams. With no stream this is
        where the GEMMs become compute-bound: a larger chunk hardly lowers the seconds per token any more."""
        rates = {chunk: rate for chunk in self.chunks if (rate := self.rate(chunk, decodes)) is not None}
        if not rates:
            raise ValueError(f"chunks: none of {self.chunks} was measured beside {decodes} decodes")
        return min(chunk for chunk, rate in rates.items() if rate >= NEAR_BEST * max(rates.values()))

    def chunk_within(self, seconds: float, decodes: int, page_size: int) -> int:
        """The largest page-aligned chunk whose worst stall beside `decodes` streams is at most `seconds`, between the
        measured ones by interpolation; 0 when not even the smallest is."""
        points = [(chunk, stall) for chunk in self.chunks if (stall := self.stall(chunk, decodes)) is not None]
        if not points or points[0][1] > seconds:
            return 0
        chunks, stalls = zip(*points, strict=True)
        tokens = int(np.interp(seconds, np.maximum.accumulate(stalls), chunks))
        return max(tokens - tokens % page_size, points[0][0])

    def fit(self) -> StepCost:
        return StepCostFit([(cell.work, cell.seconds) for cell in self.cells]).cost

    def held_out_errors(self) -> list[float]:
        """|predicted - actual| / actual of every cell, predicted by a StepCost fitted to the other four fifths."""
        errors = []
        for fold in range(min(_FOLDS, len(self.cells))):
            rest = [(cell.work, cell.seconds) for number, cell in enumerate(self.cells) if number % _FOLDS != fold]
            if rest:
                errors += relative_errors(StepCostFit(rest).cost, self.cells[fold::_FOLDS])
        return errors

    def _of(self, chunk: int, decodes: int) -> list[Cell]:
        return [cell for cell in self.cells if (cell.chunk, cell.decodes) == (chunk, decodes)]


def relative_errors(cost: StepCost, cells: Sequence[Cell]) -> list[float]:
    """|predicted - actual| / actual, of each cell."""
    return [abs(cost.seconds(cell.work) - cell.seconds) / cell.seconds for cell in cells]
