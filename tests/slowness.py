"""A machine that computes steps and pictures more slowly: CROSSDOCK_TEST_SLOWNESS=5 has each take five times as long.

`1-25` draws a factor for each, from 1 to 25. A test must pass on any machine: what a scheduler decides follows from the
seconds that it measures. Engines of the tests' process and of Ray's workers are slow; their other ranks wait for them.
"""

import os
import random
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

VARIABLE = "CROSSDOCK_TEST_SLOWNESS"


def slow_down() -> None:
    """Have engines of this process compute as slowly as the variable says. Without it nothing is imported."""
    if not (asked := os.environ.get(VARIABLE)):
        return
    least, _, most = asked.partition("-")
    factors = float(least), float(most or least)
    if not 1 <= factors[0] <= factors[1]:
        raise pytest.UsageError(f"{VARIABLE}={asked}: give a factor of at least 1, or two as in 1-25")

    from crossdock.workers.model.pictures.vision import PictureEncoder
    from crossdock.workers.model.runner import Runner

    Runner.compute = _slowed(Runner.compute, *factors)  # type: ignore[method-assign]
    PictureEncoder.features = _slowed(PictureEncoder.features, *factors)  # type: ignore[method-assign]


def _slowed(compute: Callable[..., Any], least: float, most: float) -> Callable[..., Any]:
    draw = random.Random(0)

    @wraps(compute)
    def compute_and_wait(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        computed = compute(*arguments, **named)
        time.sleep((draw.uniform(least, most) - 1) * (time.monotonic() - began))
        return computed

    return compute_and_wait


def pytest_configure() -> None:
    slow_down()
