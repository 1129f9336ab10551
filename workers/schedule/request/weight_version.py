"""The weights that a replica computes with, as an update named them."""

from collections.abc import Mapping
from typing import NamedTuple


class WeightVersion(NamedTuple):
    """The last update of weights. The first one of these replaces the weights of the start, which have none."""

    number: int = 0  # of the update; a replica with a lower one than others is out of date
    id: str = ""  # equal for equal weights alone: part of the salt of pages, and of what placements agree on
    name: str = "default"  # for clients, as vLLM names the weights of the start
    folder: str = ""  # with these weights, for a replica that restarts; empty: they were pushed


def unlike(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Return which tensors have unlike checksums, or are on one side alone, for an error; empty: none has."""
    names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    return f"{', '.join(names[:3])}{', …' * (len(names) > 3)}"
