"""Shared by all tests of this folder: four rank processes, which import torch for seconds, and one loaded model.

Each fixture imports torch itself: tests of pure rooms do without.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from crossdock.workers.model.model import LoadedModel

    from .ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator["Ranks"]:
    from .ranks import Ranks

    quad = Ranks(4)
    yield quad
    quad.close()


@pytest.fixture(scope="session")
def smollm2(model_dir: Path) -> "LoadedModel":
    """SmolLM2-135M in fp32. An engine on it allocates the pool, and takes it from the engine before."""
    from crossdock.workers.model.load import load_model
    from crossdock.workers.model.model_spec import ModelSpec

    return load_model(ModelSpec(str(model_dir), "float32"))
