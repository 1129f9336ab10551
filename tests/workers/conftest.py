"""Shared by all tests of this folder: four rank processes, which import torch for seconds.

The fixture imports torch itself: tests of pure rooms do without.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator["Ranks"]:
    from .ranks import Ranks

    quad = Ranks(4)
    yield quad
    quad.close()
