"""The curves of a sweep: for each size of chunk, the prefill rate and the stall of the streams in the same steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.cost.cost_fit import StepCostFit
from crossdock.workers.schedule.cost.stages import gap_of

NEAR_BEST = 0.9  # share of the best tokens/s from which larger chunks gain little
_FOLDS = 5  # of the cross-validation


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of step: a chunk after `context` tokens, and `decodes` streams of `context` tokens each."""

    chunk: int  # tokens; 0: only decodes
    decodes: int
    context: int  # tokens
    seconds: float = 0.0  # median of the measured steps
    is_measured: bool = True  # False: interpolated between measured ones

    @property
    def work(self) -> StepWork:
        return StepWork.of([(self.context, self.chunk)] if self.chunk else [], [self.context] * self.decodes)


@dataclass(frozen=True)
class Curves:
    """The measured cells and the figures computed from them. Cells that did not fit into the KV pool are absent.

    In a pipeline each of `depth` steps in flight has its share of the streams, and cells are single steps alone in it.
    """

    cells: Sequence[Cell]
    depth: int = 1  # steps in flight: the stages of the pipeline
    interval_share: float = 1.0  # interval of the steps of a full pipeline / seconds of one

    @cached_property
    def chunks(self) -> list[int]:
        return sorted({cell.chunk for cell in self.cells} - {0})

    @cached_property
    def decodes(self) -> list[int]:
        """Numbers of streams beside which chunks were measured; 0: chunks alone."""
        return sorted({cell.decodes for cell in self.cells if cell.chunk})

    @cached_property
    def measured(self) -> list[Cell]:
        """The cells that were measured; the others are interpolated."""
        return [cell for cell in self.cells if cell.is_measured]

    def is_measured(self, chunk: int, decodes: int) -> bool:
        """Return whether such steps were measured at every context."""
        return all(cell.is_measured for cell in self._of(chunk, decodes))

    def stall(self, chunk: int, decodes: int) -> float | None:
        """Return the longest gap between two tokens of a stream in such steps, in seconds."""
        stretch = gap_of(self.depth, self.interval_share)
        return max((cell.seconds * stretch for cell in self._of(chunk, decodes)), default=None)

    def rate(self, chunk: int, decodes: int) -> float | None:
        """Return prompt tokens per second if every step has such a chunk, over all contexts."""
        cells = self._of(chunk, decodes)
        seconds = sum(cell.seconds for cell in cells) * self.interval_share
        return chunk * len(cells) / seconds if cells else None

    def tpot(self, chunk: int, decodes: int) -> float | None:
        """Return the mean gap between two tokens of a stream in such steps over all contexts, in seconds."""
        step = self._step(chunk, decodes)
        return None if step is None else step * gap_of(self.depth, self.interval_share)

    def ttft(self, prompt: int, chunk: int, decodes: int) -> float | None:
        """Return the seconds to the first token of a prompt of `prompt` tokens in such chunks, one in every step."""
        step = self._step(chunk, decodes)
        return None if step is None else step * ((-(-prompt // chunk) - 1) * self.interval_share + 1.0)

    @cached_property
    def best_rate(self) -> float:
        rates = [self.rate(chunk, decodes) for chunk in self.chunks for decodes in self.decodes]
        return max((rate for rate in rates if rate is not None), default=0.0)

    def efficiency(self, chunk: int, decodes: int) -> float | None:
        """Return the rate relative to the best of all cells."""
        rate = self.rate(chunk, decodes)
        return rate / self.best_rate if rate is not None else None

    def knee(self, decodes: int) -> int:
        """Return the smallest chunk whose tokens/s are within 10 % of the best beside `decodes` streams.

        Without streams the GEMMs become compute-bound there: larger chunks hardly reduce the seconds per token.

        Raises:
            ValueError: no chunk was measured beside `decodes` streams.
        """
        rates = {chunk: rate for chunk in self.chunks if (rate := self.rate(chunk, decodes)) is not None}
        if not rates:
            raise ValueError(f"chunks: none of {self.chunks} was measured beside {decodes} decodes")
        return min(chunk for chunk, rate in rates.items() if rate >= NEAR_BEST * max(rates.values()))

    def chunk_within(self, seconds: float, decodes: int, page_size: int) -> int:
        """Return the largest page-aligned chunk whose worst stall beside `decodes` streams is at most `seconds`.

        Sizes between the measured ones are interpolated. 0: the smallest measured chunk takes longer.
        """
        points = [(chunk, stall) for chunk in self.chunks if (stall := self.stall(chunk, decodes)) is not None]
        if not points or points[0][1] > seconds:
            return 0
        chunks, stalls = zip(*points, strict=True)
        tokens = int(np.interp(seconds, np.maximum.accumulate(stalls), chunks))
        return max(tokens - tokens % page_size, points[0][0])

    def fit(self) -> StepCost:
        """Return the StepCost fitted to all measured cells."""
        return StepCostFit([(cell.work, cell.seconds) for cell in self.measured]).cost

    def held_out_errors(self) -> list[float]:
        """Return |predicted - actual| / actual of every measured cell, predicted from a fit to the other fifths."""
        errors = []
        cells = self.measured
        for fold in range(min(_FOLDS, len(cells))):
            rest = [(cell.work, cell.seconds) for number, cell in enumerate(cells) if number % _FOLDS != fold]
            if rest:
                errors += relative_errors(StepCostFit(rest).cost, cells[fold::_FOLDS])
        return errors

    def _step(self, chunk: int, decodes: int) -> float | None:
        """Return the mean seconds of such a step over all contexts."""
        cells = self._of(chunk, decodes)
        return sum(cell.seconds for cell in cells) / len(cells) if cells else None

    def _of(self, chunk: int, decodes: int) -> list[Cell]:
        return [cell for cell in self.cells if (cell.chunk, cell.decodes) == (chunk, decodes)]


def relative_errors(cost: StepCost, cells: Sequence[Cell]) -> list[float]:
    """Return |predicted - actual| / actual of each cell."""
    return [abs(cost.seconds(cell.work) - cell.seconds) / cell.seconds for cell in cells]
