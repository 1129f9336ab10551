"""The switch that has engines of tests compute as slowly as another machine would."""

import time

import pytest

from crossdock.workers.model.pictures.vision import PictureEncoder
from crossdock.workers.model.runner import Runner
from crossdock.workers.schedule.request.submission import Submission
from tests import slowness
from tests.workers.replica.engines import engine_on, greedy, tiny_model


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each wait, on a clock that goes on by two seconds whenever it is read."""
    waited, reads = list[float](), iter(range(0, 10_000, 2))
    monkeypatch.setattr(Runner, "compute", Runner.compute)  # both are put back after the test
    monkeypatch.setattr(PictureEncoder, "features", PictureEncoder.features)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(reads)))
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


@pytest.mark.parametrize(("asked", "least", "most"), [("5", 8.0, 8.0), ("1-25", 0.0, 48.0)])
def test_each_step_of_an_engine_waits_by_the_factor(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, asked: str, least: float, most: float
) -> None:
    """A step of two seconds takes ten, five times as long: it waits for eight."""
    engine = engine_on(tiny_model(64), num_pages=8)
    monkeypatch.setenv(slowness.VARIABLE, asked)
    slowness.slow_down()
    engine.add(Submission("a", [1, 2, 3], greedy(4)))
    while engine.has_work:
        engine.step()
    assert len(waits) == 4
    assert least <= min(waits) <= max(waits) <= most
    assert (min(waits) == max(waits)) == (least == most)


@pytest.mark.parametrize("asked", ["0.5", "3-2"])
def test_factor_that_is_none_of_a_slower_machine_is_refused(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(slowness.VARIABLE, asked)
    with pytest.raises(pytest.UsageError, match="at least 1"):
        slowness.slow_down()
