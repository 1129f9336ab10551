"""Steps measured at an earlier start are used again unless they are faster now."""

from collections.abc import Callable
from pathlib import Path

import pytest

from crossdock.workers.replica.engine.remembered_sweep import Sweep, remembered_sweep
from crossdock.workers.schedule.cost.cost import StepWork
from tests.workers.replica.engines import engine_on, tiny_model

CHUNK, DECODES = StepWork.of([(0, 64)]), StepWork.of([], [32] * 4)
EARLIER: Sweep = [(CHUNK, 0.1), (StepWork.of([(0, 16)]), 0.04), (DECODES, 0.02), (StepWork.of([], [32]), 0.01)]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    tiny_model(64)  # loads the compiled kernels before this test has a cache directory without them
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path))
    return tmp_path


def never() -> Sweep:
    raise AssertionError("steps were measured")


def at(speed: float) -> Callable[[], Sweep]:
    """Return a check that finds steps this many times as fast as at the earlier start."""
    return lambda: [(CHUNK, 0.1 / speed), (DECODES, 0.02 / speed)]


def test_start_after_another_of_the_same_engine_measures_no_sweep() -> None:
    assert remembered_sweep(engine_on(tiny_model(64), num_pages=8), lambda: EARLIER, never) == EARLIER
    assert remembered_sweep(engine_on(tiny_model(64), num_pages=8), never, at(speed=1.1)) == EARLIER


def test_machine_that_was_far_busier_at_the_earlier_start_measures_again() -> None:
    now = [(work, seconds / 3) for work, seconds in EARLIER]
    remembered_sweep(engine_on(tiny_model(64), num_pages=8), lambda: EARLIER, never)
    assert remembered_sweep(engine_on(tiny_model(64), num_pages=8), lambda: now, at(speed=3)) == now
    assert remembered_sweep(engine_on(tiny_model(64), num_pages=8), never, at(speed=3)) == now


def test_machine_that_was_busier_at_the_earlier_start_scales_what_it_knows_once() -> None:
    remembered_sweep(engine_on(tiny_model(64), num_pages=8), lambda: EARLIER, never)
    scaled = remembered_sweep(engine_on(tiny_model(64), num_pages=8), never, at(speed=1.6))
    assert [work for work, _ in scaled] == [work for work, _ in EARLIER]
    assert [seconds for _, seconds in scaled] == pytest.approx([seconds / 1.6 for _, seconds in EARLIER], rel=0.1)
    assert remembered_sweep(engine_on(tiny_model(64), num_pages=8), never, at(speed=1.6)) == scaled


def test_machine_that_is_busy_now_keeps_what_it_knows() -> None:
    remembered_sweep(engine_on(tiny_model(64), num_pages=8), lambda: EARLIER, never)
    assert remembered_sweep(engine_on(tiny_model(64), num_pages=8), never, at(speed=0.3)) == EARLIER


def test_other_model_or_other_settings_measure_their_own() -> None:
    other = [(CHUNK, 0.2), (DECODES, 0.1)]
    remembered_sweep(engine_on(tiny_model(64), num_pages=8), lambda: EARLIER, never)
    assert remembered_sweep(engine_on(tiny_model(80), num_pages=8), lambda: other, never) == other
    assert remembered_sweep(engine_on(tiny_model(64), num_pages=9), lambda: other, never) == other
    assert remembered_sweep(engine_on(tiny_model(64), num_pages=8, max_num_seqs=2), lambda: other, never) == other


@pytest.mark.parametrize("content", ["", "{}", '{"key": "another", "value": []}'])
def test_damaged_file_is_measured_again(content: str, cache: Path) -> None:
    remembered_sweep(engine_on(tiny_model(64), num_pages=8), lambda: EARLIER, never)
    (file,) = cache.rglob("sweep-*.json")
    file.write_text(content)
    assert remembered_sweep(engine_on(tiny_model(64), num_pages=8), lambda: EARLIER, never) == EARLIER
    assert file.read_text() != content


def test_cache_directory_that_cannot_be_written_is_no_error(cache: Path) -> None:
    (cache / "steps").touch()
    assert remembered_sweep(engine_on(tiny_model(64), num_pages=8), lambda: EARLIER, never) == EARLIER
