"""The measurement of a sweep on an engine, one step at a time, with fewer steps where the curve is straight."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf, log
from statistics import median

from crossdock.cluster.tune.curves import Cell
from crossdock.workers.replica.engine.calibrate import measure_step
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.memory.page_needs import PageNeeds

_STRAIGHT = 0.05  # relative error of an interpolated step below which its neighbours are interpolated too
_WIDE = 8  # a span of chunks is never interpolated if its larger one is more than so many times the smaller one
_ALIKE = 0.05  # largest relative difference of a cell's measurements that needs no further one


def grid(chunks: Sequence[int], decodes: Sequence[int], contexts: Sequence[int]) -> list[Cell]:
    """Return a cell for every combination, with chunks alone and decodes alone among them."""
    return [
        Cell(chunk, streams, context)
        for streams in sorted({0, *decodes})
        for context in sorted(set(contexts))
        for chunk in sorted({0, *chunks})
        if chunk or streams
    ]


def fitting(engine: Engine, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells that fit into the model's length and the KV pool."""
    pool = engine.pages
    longest = engine.model.max_model_len
    most_tokens = engine.config.max_num_batched_tokens
    pages = PageNeeds(pool.page_size, pool.windows, most_tokens, pool.state_pages).at_once

    return [
        cell
        for cell in cells
        if cell.context + max(cell.chunk, 1) <= longest
        and cell.decodes * pages(cell.context + 1) + pages(cell.context + cell.chunk) <= pool.num_pages
    ]


class Sweep:
    """The measured cells of a grid. An interrupted sweep keeps those of the numbers of streams that it has finished.

    A line is all chunks beside one number of streams at one context. Its ends are measured, then the middle. Where the
    middle is as the ends predict, chunks of similar size are interpolated: `cost`, times a factor that goes from one
    measured neighbour's to the other's.

    Every cell is measured in two rounds, so that a load from elsewhere on the machine affects all of them alike. A cell
    whose measurements differ gets up to `repeats`. Its seconds are the median.

    All steps together take `budget_s` or little more. The steps that take longest are left out where one round of them
    would take longer, and are told from their largest measured neighbour. So are they where steps take longer than
    predicted, as on a machine that is busy now. A second round, and the sizes between those that are not straight, come
    while seconds are left.
    """

    def __init__(
        self,
        engine: Engine,
        cells: Sequence[Cell],
        repeats: int,
        cost: StepCost,
        progressed: Callable[[float, float], None] = lambda *_: None,
        budget_s: float = inf,
    ) -> None:
        """`cells`: as `grid` orders them. `progressed` is called after each step with the predicted seconds of what is
        done, and of all."""
        self._engine = engine
        self._cells = cells
        self._repeats = repeats
        self._cost = cost
        self._progressed = progressed
        self._times: dict[Cell, list[float]] = {}
        self._finished: set[int] = set()  # numbers of streams
        # Predicted seconds; unplanned: of rounds after the planned ones.
        self._done = 0.0
        self._unplanned = 0.0
        # Measured seconds.
        self._spent = 0.0
        self._budget_s = budget_s
        self._measured = self._affordable()
        self._planned = self._least()
        smallest = min((cell.chunk for cell in cells if cell.chunk), default=0)
        self._needed = {cell for cell in self._planned if cell.chunk <= smallest}  # others are told from these
        self._rounds = min(repeats, 2 if 2 * sum(map(self._predicted, self._planned)) <= budget_s else 1)

    def run(self) -> None:
        """Measure. After an exception, `cells` returns what was measured before it."""
        for streams, lines in groupby(self._lines(), lambda line: line[0].decodes):
            for line in lines:
                for _ in _chosen(line, self._is_straight):
                    pass
            self._finished.add(streams)
        for number in range(1, self._repeats):
            again = [
                cell
                for cell, times in self._times.items()
                if number < self._rounds or max(times) > (1 + _ALIKE) * min(times)
            ]
            if not self._has_time_for(again):
                break
            if number >= self._rounds:
                self._unplanned += sum(map(self._predicted, again))
            for cell in again:
                self._measure(cell)

    def cells(self) -> list[Cell]:
        """Return the cells of all finished numbers of streams, with their seconds, measured or interpolated."""
        cells = [cell for cell in self._cells if cell.decodes in self._finished]
        return [
            replace(cell, seconds=median(self._times[cell]))
            if cell in self._times
            else replace(cell, seconds=self._interpolated(cell), is_measured=False)
            for cell in cells
        ]

    def _affordable(self) -> list[Cell]:
        """Return the cells without those that take longest, so that the least of them can be measured in time. Each
        line keeps its decodes alone and its smallest chunk."""
        self._measured = list(self._cells)
        smallest = min((cell.chunk for cell in self._cells if cell.chunk), default=0)
        further = sorted((cell for cell in self._cells if cell.chunk > smallest), key=self._predicted)
        while further and sum(map(self._predicted, self._least())) > self._budget_s:
            self._measured.remove(further.pop())
        return self._measured

    def _least(self) -> set[Cell]:
        """Return the cells that are measured even if all lines are straight."""
        return {cell for line in self._lines() for cell in _chosen(line, lambda _: True)}

    def _lines(self) -> Iterator[list[Cell]]:
        for _, line in groupby(self._measured, lambda cell: (cell.decodes, cell.context)):
            yield list(line)

    def _is_straight(self, cell: Cell) -> bool:
        """Measure a cell, and return whether it is as its measured neighbours predict; False for the end of a line."""
        expected = self._interpolated(cell)
        if cell not in self._needed:
            ahead = (self._needed if cell in self._planned else self._planned) - self._times.keys()
            if not self._has_time_for([cell, *ahead]):
                return True
        seconds = self._measure(cell)
        return abs(expected - seconds) <= _STRAIGHT * seconds

    def _has_time_for(self, cells: Iterable[Cell]) -> bool:
        """Return whether the budget suffices for cells, if these are as slow as those before."""
        slowness = max(self._spent / self._done, 1.0) if self._done else 1.0
        return self._spent + slowness * sum(map(self._predicted, cells)) <= self._budget_s

    def _measure(self, cell: Cell) -> float:
        chunk = (cell.context, cell.chunk) if cell.chunk else None
        step = measure_step(self._engine, chunk, cell.decodes, cell.context, repeats=1)
        assert step is not None, "the pool holds every cell of an idle engine"
        [seconds] = step[1]
        self._times.setdefault(cell, []).append(seconds)
        self._spent += seconds
        self._done += self._predicted(cell)
        expected = self._rounds * sum(map(self._predicted, self._planned | {*self._times})) + self._unplanned
        self._progressed(self._done, expected)
        return seconds

    def _interpolated(self, cell: Cell) -> float:
        """Return the seconds of a cell from its measured neighbours of the line.

        Beyond the largest measured chunk they are as far off the prediction as there. Without any, they are infinite.
        """
        line = [other for other in self._times if (other.decodes, other.context) == (cell.decodes, cell.context)]
        below = max((other for other in line if 0 < other.chunk < cell.chunk), key=_chunk, default=None)
        above = min((other for other in line if other.chunk > cell.chunk), key=_chunk, default=None)
        if below is None:
            return inf
        if above is None:
            return self._predicted(cell) * median(self._times[below]) / self._predicted(below)
        low, high = (median(self._times[other]) / self._predicted(other) for other in (below, above))
        share = log(cell.chunk / below.chunk) / log(above.chunk / below.chunk)
        return self._predicted(cell) * (low + share * (high - low))

    def _predicted(self, cell: Cell) -> float:
        return self._cost.seconds(cell.work)


def _chosen(line: Sequence[Cell], is_straight: Callable[[Cell], bool]) -> Iterator[Cell]:
    """Yield the cells of a line that are to be measured, each after `is_straight` was asked for it.

    The decodes alone and both ends come first, then the middle of every span that is not straight or is wide.
    """
    alone = [cell for cell in line if not cell.chunk]
    sized = [cell for cell in line if cell.chunk]
    for cell in (*alone, *dict.fromkeys([*sized[:1], *sized[-1:]])):
        is_straight(cell)
        yield cell
    spans = [(0, len(sized) - 1)]
    while spans:
        low, high = spans.pop()
        if high - low < 2:
            continue
        middle = (low + high) // 2
        straight = is_straight(sized[middle])
        yield sized[middle]
        halves = ((low, middle), (middle, high))
        spans += [(a, b) for a, b in halves if not straight or sized[b].chunk > _WIDE * sized[a].chunk]


def _chunk(cell: Cell) -> int:
    return cell.chunk
