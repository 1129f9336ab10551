"""Seconds of kernels are measured by one process, kept for later starts, and survive bad files."""

import errno
import fcntl
import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from crossdock.kernels.cpu import measure as measuring
from crossdock.kernels.cpu import remembered_seconds as remembered
from crossdock.kernels.cpu.choice import KernelChoice, only
from crossdock.kernels.cpu.measure import Cells
from crossdock.kernels.cpu.remembered_seconds import measured_choice
from crossdock.kernels.options import Kernel

ROWS = (1, 2, 4, 8, 16)
KERNELS: tuple[Kernel, ...] = ("native", "torch")
# Powers of two: the clock adds them without rounding.
NATIVE_IS_FASTEST = {"native": [2**-6] * 5, "torch": [2**-5] * 5}
TORCH_IS_FASTEST = {"native": [2**-5] * 5, "torch": [2**-6] * 5}
LATER_START, DAY, WEEK = 3600.0, 1.5 * 86400.0, 8 * 86400.0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@dataclass
class TimedMachine:
    """A machine whose clocks only calls and tests advance, and how often it was measured."""

    seconds: dict[str, list[float]]
    is_busy: bool = False
    now: float = 0.0
    num_measured: int = 0
    num_calls: int = 0

    def cells(self, rows: Sequence[int]) -> Cells:
        self.num_measured += 1
        return {
            (kernel, count): [partial(self._call, self.seconds[kernel][ROWS.index(count)])]
            for kernel in KERNELS
            for count in rows
        }

    def _call(self, seconds: float) -> None:
        """Take so long; on a busy machine two of three repeats take twice as long."""
        self.now += seconds * (2 if self.is_busy and self.num_calls // 10 % 3 else 1)
        self.num_calls += 1

    def choice(self, key: str = "one") -> KernelChoice:
        """Return the choice that a replica makes on this machine."""
        return measured_choice("products", {"key": key}, KERNELS, ROWS, self.cells)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> TimedMachine:
    made = TimedMachine(NATIVE_IS_FASTEST)
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(remembered.time, "time", lambda: made.now)
    return made


def stored(cache: Path) -> list[dict[str, object]]:
    (file,) = cache.glob("seconds-*.json")
    return [*json.loads(file.read_text())["value"].values()]


def test_replicas_of_one_start_and_later_starts_measure_once_and_log_it(
    cache: Path, machine: TimedMachine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.seconds = {"native": [0.125, 0.125, 0.125, 3.0, 3.0], "torch": [0.25, 0.25, 0.25, 1.0, 1.0]}
    with caplog.at_level(logging.INFO, remembered.__name__):
        choice = machine.choice()
    assert choice == KernelChoice("native", "torch", 8)
    (message,) = caplog.messages
    assert message == (
        "products: native below 8 rows, torch from there (ms for 1/2/4/8/16 rows: "
        "native 125/125/125/3e+03/3e+03, torch 250/250/250/1e+03/1e+03)"
    )
    assert machine.choice() == choice
    machine.now += LATER_START
    assert machine.choice() == choice
    assert machine.num_measured == 1
    (kept,) = stored(cache)
    assert (kept["seconds"], kept["is_disturbed"]) == (machine.seconds, False)


def test_choice_by_mistake_is_replaced_after_a_week(machine: TimedMachine) -> None:
    machine.seconds = TORCH_IS_FASTEST
    assert machine.choice() == only("torch")
    machine.seconds, machine.now = NATIVE_IS_FASTEST, machine.now + WEEK
    assert machine.choice() == only("native")


def test_busy_machine_is_measured_again_after_a_day(
    cache: Path, machine: TimedMachine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.seconds, machine.is_busy = TORCH_IS_FASTEST, True
    with caplog.at_level(logging.INFO, remembered.__name__):
        assert machine.choice() == only("torch")
    assert caplog.messages[0].endswith("the machine was busy, so a start after a day measures again")
    machine.now += LATER_START
    assert machine.choice() == only("torch")
    assert machine.num_measured == 1, "later starts measure nothing"
    machine.seconds, machine.is_busy, machine.now = NATIVE_IS_FASTEST, False, machine.now + DAY
    assert machine.choice() == only("native")
    assert [kept["is_disturbed"] for kept in stored(cache)] == [False]


def test_load_after_a_week_replaces_no_seconds_of_an_idle_machine(cache: Path, machine: TimedMachine) -> None:
    machine.choice()
    before = stored(cache)
    machine.seconds, machine.is_busy, machine.now = TORCH_IS_FASTEST, True, machine.now + WEEK
    assert machine.choice() == only("native")
    assert stored(cache) == before


def test_other_weights_and_threads_are_beside_the_first_in_one_file_and_other_code_replaces_them(
    cache: Path, machine: TimedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.choice()
    machine.choice("two")
    monkeypatch.setattr(remembered.torch, "get_num_threads", lambda: 96)
    machine.choice()
    assert (machine.num_measured, len(stored(cache))) == (3, 3)
    monkeypatch.setattr(remembered, "_code", lambda: "newer")
    machine.choice()
    assert (machine.num_measured, len(stored(cache))) == (4, 1)


def test_other_cpu_with_the_same_home_has_a_file_of_its_own(
    cache: Path, machine: TimedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.choice()
    with monkeypatch.context() as other:
        other.setattr(remembered, "cpu_flags", lambda: frozenset({"amx_bf16"}))
        machine.choice()
    machine.choice()
    assert machine.num_measured == len(list(cache.glob("seconds-*.json"))) == 2


_UNTIMED = {"is_disturbed": False, "measured_at": 0}


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"key": "another", "value": {}}', '{"key": 1}'),
        *(None, {"seconds": NATIVE_IS_FASTEST}),
        *({"seconds": {"native": [0.0, 1.0]}, **_UNTIMED}, {"seconds": {"native": [1.0, "nan"]}, **_UNTIMED}),
    ],
)
def test_bad_file_or_entry_is_measured_again(cache: Path, machine: TimedMachine, content: object) -> None:
    choice = machine.choice()
    (file,) = cache.glob("seconds-*.json")
    whole = json.loads(file.read_text())
    (key,) = whole["value"]
    file.write_text(content if isinstance(content, str) else json.dumps(whole | {"value": {key: content}}))
    assert machine.choice() == machine.choice() == choice
    assert machine.num_measured == 2


def test_cache_that_cannot_be_made_is_no_error(
    tmp_path: Path, machine: TimedMachine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.INFO, remembered.__name__):
        assert machine.choice() == only("native")
    assert "not kept for later starts" in caplog.messages[0]


def test_cache_that_can_only_be_read_is_used(machine: TimedMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.choice()

    def refused(*_: object, **__: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(remembered, "write_cached", refused)
    monkeypatch.setattr(Path, "mkdir", refused)
    assert machine.choice() == only("native")
    assert machine.num_measured == 1
    assert machine.choice("two") == only("native")


def _no_locks(*_: object) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


def _held(*_: object) -> None:
    raise BlockingIOError


@pytest.mark.parametrize("flock", [_no_locks, _held])
def test_missing_locks_and_a_lock_that_is_held_for_long_do_not_stop_a_start(
    machine: TimedMachine, monkeypatch: pytest.MonkeyPatch, flock: Callable[..., None]
) -> None:
    monkeypatch.setattr(remembered, "_LONGEST_WAIT_S", 0.1)
    monkeypatch.setattr(fcntl, "flock", flock)
    assert machine.choice() == machine.choice() == only("native")
    assert machine.num_measured == 1


def test_starts_at_once_read_one_measurement(cache: Path) -> None:
    """Each opens the lock itself, as processes do."""
    barrier, measured = threading.Barrier(4), list[int]()

    def cells(rows: Sequence[int]) -> Cells:
        measured.append(len(rows))
        return {(kernel, count): [lambda: sum(range(20_000))] for kernel in KERNELS for count in rows}

    def start() -> KernelChoice:
        barrier.wait(240)
        return measured_choice("products", {}, KERNELS, ROWS, cells)

    with ThreadPoolExecutor(4) as pool:
        starts = [pool.submit(start) for _ in range(4)]
    assert len({each.result() for each in starts}) == len(measured) == 1
    assert len(list(cache.glob("seconds-*"))) == 1, "no partial file is left"


def test_one_kernel_is_not_measured() -> None:
    cells = dict[Sequence[int], Cells]().__getitem__  # fails when called
    assert measured_choice("products", {}, ["torch"], ROWS, cells) == only("torch")
