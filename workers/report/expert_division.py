"""Predict the seconds of steps of a model whose experts are divided among ranks: as slices of all, or as whole ones.

A rank multiplies r rows by n of the experts of a layer, of which it has a share: all of each, or a slice. It takes

    seconds = bytes of n experts / bandwidth + 2 · r · numbers of an expert / FLOPS
            + 3 · r · bytes of a row / bandwidth + n · seconds of a call

A row is read, and what an expert makes of it is written, and read again for the sum. With slices every rank has all
rows of all experts that a step is sent to, and each product has a part of the inner features, in whole tiles of them.
With whole experts a rank has the rows of its own. The rank that takes longest sets the pace of the layer.

Nothing is known of the router. So experts get shares of which each division is as likely as any other (the spacings of
random numbers), others in each layer that is drawn, and each row is sent to unlike experts by these shares. Draws have
a fixed seed: the same sizes always give the same seconds. The hottest of 128 experts gets five times the mean.

All other products of a step take the same seconds in both divisions. Attention and the sums over ranks do too, and are
left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from crossdock.workers.report.profile import Role

Rows: TypeAlias = npt.NDArray[np.float64]  # of each expert of a layer

_MOST_ROWS = 512  # that are drawn; more rows are these, several times
_DRAWS = 32  # layers with many rows
_DRAWN_NUMBERS = 1 << 19  # in all layers with few rows
_MOST_DRAWS = 1024


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The sizes of a model from which seconds follow. Those of a rank are its part of what all divide alike."""

    layers: int  # with experts
    count: int  # of experts in a layer
    chosen: int  # of them, for a row
    inner: int  # inner features of an expert
    numbers: float  # by which an expert multiplies a row
    num_bytes: float  # of an expert
    row_bytes: int  # between layers
    rest_numbers: float = 0  # by which a rank multiplies a row beside experts
    rest_bytes: float = 0  # that a rank reads beside experts
    head_numbers: float = 0  # by which a rank multiplies the last row of each sequence


@dataclass(frozen=True, slots=True)
class ProductRates:
    """How fast a rank computes products."""

    bandwidth: float  # bytes a second
    flops: float
    call_s: float = 0  # for the products of one expert; 0: one launch computes those of all
    tile: int = 1  # inner features that a product has at least, and a multiple of which it computes


class StepSeconds(NamedTuple):
    """The seconds of three steps."""

    one: float  # of one stream
    streams: float  # of as many streams as the replica takes
    chunk: float  # of a full chunk of a prompt

    def loaded(self, role: Role) -> float:
        """Return the seconds of what a loaded replica of a role computes.

        A prefill replica computes full chunks, a decode replica all streams, a mixed one both.
        """
        return (self.chunk if role != "decode" else 0) + (self.streams if role != "prefill" else 0)


def division_seconds(
    sizes: ExpertSizes, rates: ProductRates, num_ranks: int, num_streams: int, num_tokens: int
) -> tuple[StepSeconds, StepSeconds]:
    """Return the seconds of steps with slices of experts, and with whole ones, on `num_ranks` ranks.

    Args:
        num_streams: the most that the replica takes.
        num_tokens: of a full chunk.
    """
    steps = [
        step_seconds(sizes, rates, num_ranks, rows, logits)
        for rows, logits in ((1, 1), (num_streams, num_streams), (num_tokens, 1))
    ]
    return StepSeconds(*(slices for slices, _ in steps)), StepSeconds(*(whole for _, whole in steps))


def is_whole_faster(slices: StepSeconds, whole: StepSeconds, role: Role) -> bool:
    """Return whether whole experts take less time in a loaded replica, by two digits: slices are kept at ties."""
    return float(f"{whole.loaded(role):.2g}") < float(f"{slices.loaded(role):.2g}")


def step_seconds(
    sizes: ExpertSizes, rates: ProductRates, num_ranks: int, rows: int, logits: int
) -> tuple[float, float]:
    """Return the seconds of a step with slices of experts, and with whole ones.

    Args:
        rows: of the step.
        logits: how many of the rows get logits.
    """
    bounds = [sizes.count * rank // num_ranks for rank in range(num_ranks)]  # as `even_range` divides
    routings = list(_routings(sizes.count, sizes.chosen, rows))
    sliced = [_layer_seconds(sizes, rates, each, [0], -(-sizes.inner // num_ranks)) for each in routings]
    whole = [_layer_seconds(sizes, rates, each, bounds, sizes.inner) for each in routings]
    products = rows * sizes.rest_numbers + logits * sizes.head_numbers
    rest = sizes.rest_bytes / rates.bandwidth + 2 * products / rates.flops
    return rest + sizes.layers * float(np.mean(sliced)), rest + sizes.layers * float(np.mean(whole))


def _layer_seconds(sizes: ExpertSizes, rates: ProductRates, rows_of: Rows, bounds: Sequence[int], inner: int) -> float:
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
    return float((num_bytes / rates.bandwidth + products / rates.flops + read * rates.call_s).max())


def _routings(count: int, chosen: int, rows: int) -> Iterator[Rows]:
    """Yield the rows of each expert, `[count]`, in layers with unknown routers. The seed is fixed."""
    random = np.random.default_rng(0)
    drawn = min(rows, _MOST_ROWS)
    for _ in range(min(max(_DRAWN_NUMBERS // (drawn * count), _DRAWS), _MOST_DRAWS)):
        shares = random.exponential(size=count)
        order = random.exponential(size=(drawn, count)) / shares  # the `chosen` that come first are drawn by shares
        first = np.argpartition(order, chosen - 1, axis=1)[:, :chosen]
        yield (np.bincount(first.ravel(), minlength=count) * (rows / drawn)).astype(np.float64)
