"""Seconds of kernels are measured once for each machine, by one process, and survive bad files."""

import json
import logging
import multiprocessing
import os
from pathlib import Path

import pytest

from crossdock.kernels.cpu import measure
from crossdock.kernels.cpu.choice import KernelChoice, only
from crossdock.kernels.cpu.measure import Cells, Timed, measured_choice

ROWS = (1, 8)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the calls advance."""
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    return now


def cells(clock: list[float]) -> Cells:
    """Calls whose seconds are known: `own` is slower with 8 rows."""

    def taking(seconds: float) -> Timed:
        def call() -> None:
            clock[0] += seconds

        return Timed([call], scale=10)

    return {
        ("own", 1): [taking(0.01)],
        ("own", 8): [taking(0.3)],
        ("torch", 1): [taking(0.02)],
        ("torch", 8): [taking(0.05), taking(0.05)],
    }


def ask(clock: list[float], key: str = "one") -> KernelChoice:
    return measured_choice("products", {"key": key}, ("own", "torch"), ROWS, lambda: cells(clock))


def forbidden() -> Cells:
    raise AssertionError("measured again")


def test_seconds_are_measured_once_and_logged(
    cache: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, measure.__name__):
        choice = ask(clock)
    assert choice == KernelChoice("own", "torch", 8)
    (message,) = caplog.messages
    assert message == "products: own below 8 rows, torch from there (ms for 1/8 rows: own 100/3e+03, torch 200/1e+03)"
    assert measured_choice("products", {"key": "one"}, ("own", "torch"), ROWS, forbidden) == choice
    (file,) = cache.glob("seconds-*.json")
    assert json.loads(file.read_text())["value"]["torch"] == pytest.approx([0.2, 1.0])


def test_other_weights_threads_or_code_are_measured_again(
    cache: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(clock)
    ask(clock, "two")
    monkeypatch.setattr(measure.torch, "get_num_threads", lambda: 96)
    ask(clock)
    monkeypatch.setattr(measure, "cpu_flags", lambda: frozenset({"amx_bf16"}))
    ask(clock)
    assert len(list(cache.glob("seconds-*.json"))) == 4


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": "another", "value": {}}', '{"key": 1}'])
def test_bad_file_is_measured_again(cache: Path, clock: list[float], content: str) -> None:
    choice = ask(clock)
    (file,) = cache.glob("seconds-*.json")
    whole = file.read_text()
    file.write_text(content)
    assert ask(clock) == choice
    assert json.loads(file.read_text())["key"] == json.loads(whole)["key"]
    for wrong in ({}, {"own": [0.0, 1.0]}, {"own": [1.0, "nan"], "torch": [1.0, 1.0]}):
        file.write_text(json.dumps(json.loads(whole) | {"value": wrong}))
        assert ask(clock) == choice


def test_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, measure.__name__):
        assert ask(clock) == KernelChoice("own", "torch", 8)
    assert "measured again at every start" in caplog.messages[0]


def _ask_at_once(folder: str, number: int, barrier: object, answers: object) -> None:
    os.environ["CROSSDOCK_CACHE"] = folder

    def slower_with_every_process() -> Cells:
        def call() -> None:
            sum(range(20_000 * (number + 1)))

        return {(kernel, rows): [Timed([call])] for kernel in ("own", "torch") for rows in ROWS}  # type: ignore[misc]

    barrier.wait()  # type: ignore[attr-defined]
    measured_choice("products", {}, ("own", "torch"), ROWS, slower_with_every_process)
    answers.put({path.name: path.read_text() for path in Path(folder, "kernels").glob("seconds-*")})  # type: ignore[attr-defined]


def test_processes_that_start_at_once_read_one_measurement(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_ask_at_once, args=(str(tmp_path), i, barrier, answers)) for i in range(3)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 1  # no partial file is left


def test_one_kernel_is_not_measured() -> None:
    from crossdock.kernels.cpu.linear import linear_choice

    assert linear_choice("products", [], measure.torch.float32, ["torch"]) == only("torch")
