"""Four rank processes for all tests of this folder: each takes seconds to import torch."""

from collections.abc import Iterator

import pytest

from .ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    quad = Ranks(4)
    yield quad
    quad.close()
