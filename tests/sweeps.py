"""Sweeps over the values of several parameters: part of their combinations in every run, the rest in the soak."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def shared_out(parts: int, *axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of the values of `axes`, of which one in so many `parts` is in every run.

    Each value of each axis is, if another axis has as many values as there are parts.
    """
    return [
        pytest.param(*(value for _, value in chosen), marks=() if sum(n for n, _ in chosen) % parts == 0 else SOAK)
        for chosen in product(*map(enumerate, axes))
    ]


SOAK = pytest.mark.soak
