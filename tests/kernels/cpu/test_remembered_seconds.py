"""Seconds of kernels are measured by one process, checked at later starts, and survive bad files."""

import errno
import fcntl
import json
import logging
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from crossdock.kernels.cpu import measure as measuring
from crossdock.kernels.cpu import remembered_seconds as remembered
from crossdock.kernels.cpu.choice import KernelChoice, only
from crossdock.kernels.cpu.measure import Cells, Timed
from crossdock.kernels.cpu.remembered_seconds import measured_choice
from crossdock.kernels.options import Kernel

ROWS = (1, 2, 4, 8, 16)
KERNELS: tuple[Kernel, ...] = ("own", "torch")
# Eighths of a second: the clock adds them without rounding.
OWN_IS_FASTEST = {"own": [0.125] * 5, "torch": [0.25] * 5}
TORCH_IS_FASTEST = {"own": [0.25] * 5, "torch": [0.125] * 5}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@dataclass
class TimedMachine:
    """A machine whose clock only calls advance, and the numbers of rows that were measured on it."""

    seconds: dict[str, list[float]]
    is_busy: bool = False
    now: float = 0.0
    measured: list[tuple[int, ...]] = field(default_factory=list)

    def cells(self, rows: Sequence[int]) -> Cells:
        self.measured.append(tuple(rows))
        return {
            (kernel, count): [Timed([partial(self._call, self.seconds[kernel][ROWS.index(count)])])]
            for kernel in KERNELS
            for count in rows
        }

    def _call(self, seconds: float) -> None:
        self.now += seconds

    def choice(self, key: str = "one", max_kernels: int = 2) -> KernelChoice:
        """Return the choice that a replica makes on this machine."""
        return measured_choice("products", {"key": key}, KERNELS, ROWS, self.cells, max_kernels)

    def choice_of_later_start(self, cache: Path) -> KernelChoice:
        for file in cache.glob("seconds-*.json"):
            os.utime(file, (0, 0))
        self.measured.clear()
        return self.choice()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> TimedMachine:
    made = TimedMachine(OWN_IS_FASTEST)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(measuring.time, "process_time", lambda: made.now * measuring.torch.get_num_threads())
    monkeypatch.setattr(measuring, "waited_seconds", lambda: made.now if made.is_busy else 0.0)
    return made


def stored(cache: Path) -> dict[str, object]:
    (file,) = cache.glob("seconds-*.json")
    value: dict[str, object] = json.loads(file.read_text())["value"]
    return value


def test_replicas_of_one_start_measure_once_and_log_it(
    cache: Path, machine: TimedMachine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.seconds = {"own": [0.125, 0.125, 0.125, 3.0, 3.0], "torch": [0.25, 0.25, 0.25, 1.0, 1.0]}
    with caplog.at_level(logging.INFO, remembered.__name__):
        choice = machine.choice()
    assert choice == KernelChoice("own", "torch", 8)
    (message,) = caplog.messages
    assert message == (
        "products: own below 8 rows, torch from there (ms for 1/2/4/8/16 rows: "
        "own 125/125/125/3e+03/3e+03, torch 250/250/250/1e+03/1e+03)"
    )
    assert machine.choice() == choice
    assert machine.measured == [ROWS]
    assert stored(cache) == {"seconds": machine.seconds, "is_disturbed": False}


def test_later_start_measures_a_sample_that_agrees(cache: Path, machine: TimedMachine) -> None:
    choice, before = machine.choice(), stored(cache)
    machine.seconds = {"own": [0.5] * 5, "torch": [0.4375] * 5}  # slower altogether, and torch a little faster
    assert machine.choice_of_later_start(cache) == choice == only("own")
    assert machine.measured == [(1, 4, 8)]
    assert machine.choice() == choice  # another replica of this later start
    assert machine.measured == [(1, 4, 8)]
    assert stored(cache) == before


def test_kernel_that_was_chosen_by_mistake_is_replaced_at_the_next_start(
    cache: Path, machine: TimedMachine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.seconds = TORCH_IS_FASTEST
    assert machine.choice() == only("torch")
    machine.seconds = OWN_IS_FASTEST
    with caplog.at_level(logging.INFO, remembered.__name__):
        assert machine.choice_of_later_start(cache) == only("own")
    assert machine.measured == [(1, 4, 8), ROWS]
    assert "products: torch was chosen at an earlier start and is slower now; all is measured again" in caplog.messages
    assert machine.choice_of_later_start(cache) == only("own")
    assert machine.measured == [(1, 4, 8)]


def test_busy_machine_is_measured_again_at_the_next_start(
    cache: Path, machine: TimedMachine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.seconds, machine.is_busy = TORCH_IS_FASTEST, True
    with caplog.at_level(logging.INFO, remembered.__name__):
        assert machine.choice() == only("torch")
    assert caplog.messages[0].endswith("the machine was busy, so the next start measures again")
    assert stored(cache)["is_disturbed"] is True
    assert machine.choice() == only("torch")
    assert machine.measured == [ROWS]  # replicas of one start choose alike
    machine.seconds, machine.is_busy = OWN_IS_FASTEST, False
    assert machine.choice_of_later_start(cache) == only("own")
    assert machine.measured == [ROWS]  # without a sample before
    assert stored(cache)["is_disturbed"] is False


def test_machine_that_is_always_busy_keeps_the_least_seconds_of_all_starts(cache: Path, machine: TimedMachine) -> None:
    machine.is_busy = True
    machine.seconds = {"own": [0.5, 0.125, 0.125, 0.125, 0.125], "torch": [0.25] * 5}
    machine.choice()
    machine.seconds = {"own": [0.125, 0.5, 0.5, 0.125, 0.125], "torch": [0.25] * 5}
    assert machine.choice_of_later_start(cache) == only("own")
    assert stored(cache) == {"seconds": OWN_IS_FASTEST, "is_disturbed": True}


def test_load_at_a_later_start_replaces_no_choice(cache: Path, machine: TimedMachine) -> None:
    machine.choice()
    before = stored(cache)
    machine.seconds, machine.is_busy = TORCH_IS_FASTEST, True
    assert machine.choice_of_later_start(cache) == only("own")
    assert machine.measured == [(1, 4, 8)]
    assert stored(cache) == before


def test_model_with_memory_for_one_kernel_keeps_its_compromise(cache: Path, machine: TimedMachine) -> None:
    machine.seconds = {"own": [0.125, 0.125, 0.25, 0.375, 0.375], "torch": [0.25] * 5}
    for _ in range(2):
        machine.measured.clear()
        assert machine.choice(max_kernels=1) == only("own")
        for file in cache.glob("seconds-*.json"):
            os.utime(file, (0, 0))
    assert machine.measured == [(1, 4, 8)]


def test_other_weights_threads_or_code_are_measured_again(
    cache: Path, machine: TimedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.choice()
    machine.choice("two")
    monkeypatch.setattr(remembered.torch, "get_num_threads", lambda: 96)
    machine.choice()
    monkeypatch.setattr(remembered, "cpu_flags", lambda: frozenset({"amx_bf16"}))
    machine.choice()
    assert machine.measured == [ROWS] * 4
    assert len(list(cache.glob("seconds-*.json"))) == 4


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": "another", "value": {}}', '{"key": 1}'])
def test_bad_file_is_measured_again(cache: Path, machine: TimedMachine, content: str) -> None:
    choice = machine.choice()
    (file,) = cache.glob("seconds-*.json")
    whole = file.read_text()
    file.write_text(content)
    assert machine.choice() == choice
    assert json.loads(file.read_text()) == json.loads(whole)
    for seconds in ({}, {"own": [0.0, 1.0]}, {"own": [1.0, "nan"], "torch": [1.0, 1.0]}):
        for value in (seconds, {"seconds": seconds, "is_disturbed": False}, {"seconds": OWN_IS_FASTEST}):
            file.write_text(json.dumps(json.loads(whole) | {"value": value}))
            assert machine.choice() == choice
            assert json.loads(file.read_text()) == json.loads(whole)


def test_cache_that_cannot_be_made_is_no_error(
    tmp_path: Path, machine: TimedMachine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, remembered.__name__):
        assert machine.choice() == only("own")
    assert "not kept for later starts" in caplog.messages[0]


def test_cache_that_can_only_be_read_is_checked_at_each_start(
    cache: Path, machine: TimedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.choice()

    def refused(*_: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(remembered, "_turn", refused)
    assert machine.choice_of_later_start(cache) == only("own")
    assert machine.measured == [(1, 4, 8)]


def test_seconds_are_kept_on_a_file_system_without_locks_and_measured_again_at_the_next_start(
    cache: Path, machine: TimedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(remembered.fcntl, "flock", refused)
    assert machine.choice() == machine.choice() == only("own")
    assert machine.measured == [ROWS]
    assert stored(cache)["is_disturbed"] is True  # other processes may have measured too


def test_process_that_holds_the_lock_for_long_is_not_waited_for(
    cache: Path, machine: TimedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "_LONGEST_WAIT_S", 0.1)
    cache.mkdir()
    with (cache / "measure.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert machine.choice() == only("own")
    assert stored(cache)["is_disturbed"] is True  # the other process may have measured too
    assert machine.choice_of_later_start(cache) == only("own")
    assert stored(cache)["is_disturbed"] is False


def _ask_at_once(folder: str, number: int, barrier: object, answers: object) -> None:
    os.environ["CROSSDOCK_CACHE"] = folder

    def slower_with_every_process(rows: Sequence[int]) -> Cells:
        def call() -> None:
            sum(range(20_000 * (number + 1)))

        return {(kernel, count): [Timed([call])] for kernel in KERNELS for count in rows}

    barrier.wait()  # type: ignore[attr-defined]
    measured_choice("products", {}, KERNELS, ROWS, slower_with_every_process)
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

    assert linear_choice("products", [], remembered.torch.float32, ["torch"]) == only("torch")
