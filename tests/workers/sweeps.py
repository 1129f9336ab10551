"""Sweeps over architectures or families: one of each mechanism in every run, the rest in the soak."""

from collections.abc import Iterable
from typing import Any

import pytest


def rest_in_soak(names: Iterable[str], *usual: str) -> list[Any]:
    """Return the parameters of a sweep over `names`, of which `usual` are in every run."""
    found = list(names)
    assert set(usual) <= set(found), f"{set(usual) - set(found)} are not swept"
    return [name if name in usual else pytest.param(name, marks=pytest.mark.soak) for name in found]
