"""Measures the cells of a sweep on an engine, one step at a time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from crossdock.cluster.tune.curves import Cell
from crossdock.workers.replica.calibrate import measure_step
from crossdock.workers.replica.engine import Engine


def grid(chunks: Sequence[int], decodes: Sequence[int], contexts: Sequence[int]) -> list[Cell]:
    """All combinations, chunks alone and decodes alone among them."""
    return [
        Cell(chunk, streams, context)
        for context in sorted(set(contexts))
        for streams in sorted({0, *decodes})
        for chunk in sorted({0, *chunks})
        if chunk or streams
    ]


def held(engine: Engine, cells: Sequence[Cell]) -> list[Cell]:
    """Those cells that the model's length and the KV pool leave room for."""
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
    """The same cells with their seconds: the median of `repeats` rounds, so that what else the machine does for a
    while meets all alike. `measured` is called after each step."""
    seconds: list[list[float]] = [[] for _ in cells]
    for _ in range(repeats):
        for cell, its in zip(cells, seconds, strict=True):
            chunk = (cell.context, cell.chunk) if cell.chunk else None
            step = measure_step(engine, chunk, cell.decodes, cell.context, repeats=1)
            assert step is not None, "the pool holds every cell of an idle engine"
            its += step[1]
            measured(cell)
    return [replace(cell, seconds=median(its)) for cell, its in zip(cells, seconds, strict=True)]
