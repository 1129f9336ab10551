"""Predict the seconds of experts that ranks divide: as slices of all, or as whole ones.

A rank multiplies r rows by n of the experts of a layer, of which it has a share: all of each, or a slice. By the data
sheet of a GPU it takes

    seconds = bytes of n experts / bandwidth + 2 · r · numbers of an expert / FLOPS + 3 · r · bytes of a row / bandwidth

A row is read, and what an expert makes of it is written, and read again for the sum. With slices every rank has all
rows of all experts that a step is sent to, and each product has a part of the inner features, in whole tiles of them.
With whole experts a rank has the rows of its own. The rank that takes longest sets the pace of the layer.

Nothing is known of the router. So experts get shares of which each division is as likely as any other (the spacings of
random numbers), others in each layer that is drawn, and each row is sent to unlike experts by these shares. Draws have
a fixed seed: the same sizes always give the same seconds. The hottest of 128 experts gets five times the mean.

All else in a step takes the same seconds in both divisions, and is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from crossdock.workers.report.profile import Role

Chosen: TypeAlias = npt.NDArray[np.int64]  # experts of each row, [rows, chosen]

_MOST_ROWS = 512  # that are drawn; more rows are these, several times
_DRAWS = 32  # layers with many rows
_DRAWN_NUMBERS = 1 << 19  # in all layers with few rows
_MOST_DRAWS = 1024


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The sizes of a model from which the seconds of its experts follow."""

    layers: int  # with experts
    count: int  # of experts in a layer
    chosen: int  # of them, for a row
    inner: int  # inner features of an expert
    numbers: float  # by which an expert multiplies a row
    num_bytes: float  # of an expert
    row_bytes: int  # between layers


@dataclass(frozen=True, slots=True)
class ProductRates:
    """How fast a rank computes products."""

    bandwidth: float  # bytes a second
    flops: float
    tile: int = 1  # inner features that a product has at least, and a multiple of which it computes


class StepSeconds(NamedTuple):
    """The seconds that experts take in three steps."""

    one: float  # of one stream
    streams: float  # of as many streams as the replica takes
    chunk: float  # of a full chunk of a prompt

    def loaded(self, role: Role) -> float:
        """Return the seconds of what a loaded replica of a role computes.

        A prefill replica computes full chunks, a decode replica all streams, a mixed one both.
        """
        return (self.chunk if role != "decode" else 0) + (self.streams if role != "prefill" else 0)


def division_seconds(
    sizes: ExpertSizes, rates: ProductRates, num_ranks: int, rows: Sequence[int]
) -> tuple[StepSeconds, StepSeconds]:
    """Return the seconds of slices of experts, and of whole ones, on `num_ranks` ranks in steps of three sizes."""
    steps = [step_seconds(sizes, rates, num_ranks, each) for each in rows]
    return StepSeconds(*(slices for slices, _ in steps)), StepSeconds(*(whole for _, whole in steps))


def is_whole_faster(slices: StepSeconds, whole: StepSeconds, role: Role) -> bool:
    """Return whether whole experts take less time in a loaded replica, by two digits: slices are kept at ties."""
    return float(f"{whole.loaded(role):.2g}") < float(f"{slices.loaded(role):.2g}")


def step_seconds(sizes: ExpertSizes, rates: ProductRates, num_ranks: int, rows: int) -> tuple[float, float]:
    """Return the seconds of slices of experts, and of whole ones, in a step of so many rows."""
    bounds = [sizes.count * rank // num_ranks for rank in range(num_ranks)]  # as `even_range` divides
    drawn = min(rows, _MOST_ROWS)
    num_draws = min(max(_DRAWN_NUMBERS // (drawn * sizes.count), _DRAWS), _MOST_DRAWS)
    layers = [
        np.bincount(each.ravel(), minlength=sizes.count).astype(np.float64) * (rows / drawn)
        for each in islice(routings(sizes.count, sizes.chosen, drawn), num_draws)
    ]
    sliced = [_layer_seconds(sizes, rates, each, [0], -(-sizes.inner // num_ranks)) for each in layers]
    whole = [_layer_seconds(sizes, rates, each, bounds, sizes.inner) for each in layers]
    return sizes.layers * float(np.mean(sliced)), sizes.layers * float(np.mean(whole))


def routings(count: int, chosen: int, rows: int) -> Iterator[Chosen]:
    """Yield the `chosen` of `count` experts of each row in layers with unknown routers, the same each time."""
    random = np.random.default_rng(0)
    while True:
        shares = random.exponential(size=count)
        order = random.exponential(size=(rows, count)) / shares  # the `chosen` that come first are drawn by shares
        yield np.argpartition(order, chosen - 1, axis=1)[:, :chosen]


def routings_by_fullest(sizes: ExpertSizes, num_ranks: int, rows: int) -> list[Chosen]:
    """Return some of the `routings`, in order of the rows of their fullest ranks."""
    ends = [sizes.count * (rank + 1) // num_ranks for rank in range(num_ranks)]

    def fullest(chosen: Chosen) -> int:
        return int(np.bincount(np.searchsorted(ends, chosen.ravel(), side="right")).max())

    return sorted(islice(routings(sizes.count, sizes.chosen, rows), _DRAWS), key=fullest)


def typical_routings(ordered: Sequence[Chosen], number: int) -> list[Chosen]:
    """Return a few of `routings_by_fullest` that stand for all: evenly spaced ones."""
    return [ordered[(2 * each + 1) * len(ordered) // (2 * number)] for each in range(number)]


def _layer_seconds(
    sizes: ExpertSizes, rates: ProductRates, rows_of: npt.NDArray[np.float64], bounds: Sequence[int], inner: int
) -> float:
    """Return the seconds of the slowest rank in a layer whose experts have so many rows.

    Args:
        bounds: the first expert of each rank, which ends where the next one begins.
        inner: of their inner features, those that a rank has.
    """
    read = np.add.reduceat(rows_of > 0, bounds, dtype=np.float64)
    rows = np.add.reduceat(rows_of, bounds)
    tiled = -(-inner // rates.tile) * rates.tile
    num_bytes = read * sizes.num_bytes * inner / sizes.inner + 3 * rows * sizes.row_bytes
    products = 2 * rows * sizes.numbers * tiled / sizes.inner
    return float((num_bytes / rates.bandwidth + products / rates.flops).max())
