"""Sweeps over values: one of each mechanism, or part of the combinations, in every run; the rest in the soak."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

SOAK = pytest.mark.soak


def rest_in_soak(values: Iterable[Any], *usual: Any) -> list[Any]:
    """Return the parameters of a sweep over `values`, of which `usual` are in every run."""
    values = list(values)
    assert not (absent := [value for value in usual if value not in values]), f"{absent} are not swept"
    return [value if value in usual else pytest.param(value, marks=SOAK) for value in values]


def shared_out(parts: int, *axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of the values of `axes`, of which one in so many `parts` is in every run.

    Each value of each axis is, if another axis has as many values as there are parts.
    """
    return [
        pytest.param(*(value for _, value in chosen), marks=() if sum(n for n, _ in chosen) % parts == 0 else SOAK)
        for chosen in product(*map(enumerate, axes))
    ]
