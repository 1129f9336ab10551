"""Adds the products of low-rank matrices to outputs of a linear: `B A x` for the rows of each adapter in a batch."""

from collections.abc import Iterable
from typing import TypeAlias

from torch import Tensor

Pair: TypeAlias = tuple[Tensor, Tensor]
"""A [rank, K], and B [N, rank] with the adapter's scale in it."""

Rows: TypeAlias = Tensor | slice
"""Numbers of rows, [n] int64, or a range of them."""


def add_low_rank(groups: Iterable[tuple[Pair, Rows]], x: Tensor, y: Tensor) -> None:
    """Add what each pair changes in its rows of y, in place. x: [T, K]; y: [T, N], or N as several dimensions."""
    for (a, b), rows in groups:
        delta = (x[rows] @ a.T @ b.T).view(-1, *y.shape[1:])  # [n, N]
        if isinstance(rows, slice):
            y[rows] += delta
        else:
            y.index_add_(0, rows, delta)
