"""The measurement of a sweep on an engine, one step at a time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from crossdock.cluster.tune.curves import Cell
from crossdock.workers.replica.calibrate import measure_step
from crossdock.workers.replica.engine import Engine


def grid(chunks: Sequence[int], decodes: Sequence[int], contexts: Sequence[int]) -> list[Cell]:
    """Return a cell for every combination, with chunks alone and decodes alone among them."""
    return [
        Cell(chunk, streams, context)
        for context in sorted(set(contexts))
        for streams in sorted({0, *decodes})
        for chunk in sorted({0, *chunks})
        if chunk or streams
    ]


def fitting(engine: Engine, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells that fit into the model's length and the KV pool."""
    size, longest = engine.config.page_size, engine.model.max_model_len

    def pages(tokens: int) -> int:
        return -(-tokens // size)

    return [
        cell
        for cell in cells
        if cell.context + max(cell.chunk, 1) <= longest
        and cell.decodes * pages(cell.context + 1) + pages(cell.context + cell.chunk) <= engine.pages.num_pages
    ]


def sweep(engine: Engine, cells: Sequence[Cell], repeats: int, measured: Callable[[Cell], None]) -> list[Cell]:
    """Return the cells with their seconds: medians of `repeats` rounds. `measured` is called after each step.

    Each round measures all cells, so that a load from elsewhere on the machine affects all of them alike.
    """
    seconds: list[list[float]] = [[] for _ in cells]
    for _ in range(repeats):
        for cell, times in zip(cells, seconds, strict=True):
            chunk = (cell.context, cell.chunk) if cell.chunk else None
            step = measure_step(engine, chunk, cell.decodes, cell.context, repeats=1)
            assert step is not None, "the pool holds every cell of an idle engine"
            times += step[1]
            measured(cell)
    return [replace(cell, seconds=median(times)) for cell, times in zip(cells, seconds, strict=True)]
