"""The run of all tests: groups for lanes, what a file may take, and no process that outlives it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.checks import load_check
from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
# Helpers of multiprocessing have 5 s to end, which nothing here needs.
IMPATIENT = """
import sys
sys.path.insert(0, ".ci")
import run_tests
run_tests.Run.close.__defaults__ = (0.3,)
sys.exit(run_tests.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    return load_check("run_tests")


def test_groups_hold_every_file_once_and_those_that_wait_come_first(runner: ModuleType) -> None:
    each = runner.GROUP_S * 5 / 12
    record = {f"tests/a/{i}": runner.Seconds(each, 1.0) for i in range(4)}
    record |= {f"tests/b/{i}": runner.Seconds(each, each - 1.0) for i in range(4)}
    record["tests/0/instant"] = runner.Seconds(0.0, 0.0)
    record["tests/a/end of all"] = runner.Seconds(1.0, 900.0)
    files = [*record, "tests/c/new"]
    left = runner.in_order(files, record)
    assert sorted(left) == sorted(files)
    assert runner.waiting(files, record) == [f"tests/a/{i}" for i in range(4)]
    groups = [runner.take(left, record, from_end=from_end) for from_end in (False, True)]
    assert groups[0][-1].startswith("tests/a")
    assert groups[1][0].startswith("tests/b")
    while left:
        groups.append(runner.take(left, record, from_end=False))
    assert sorted(file for group in groups for file in group) == sorted(files)
    assert all(sum(record[file].wall for file in group if file in record) < 1.25 * runner.GROUP_S for group in groups)
    with pytest.raises(IndexError):
        runner.take(left, record, from_end=True)


@pytest.mark.parametrize("slowness", [1.0, 3.0], ids=["as recorded", "files that compute take three times as long"])
@pytest.mark.parametrize("number", [1, 7, 100, 101, 115])
def test_lanes_that_take_groups_from_both_ends_end_together(runner: ModuleType, number: int, slowness: float) -> None:
    record = {f"tests/{i:03}": runner.Seconds(12.0, i / 10) for i in range(number)}
    left, ends = runner.in_order(record, record), [0.0, 0.0]
    while left:
        lane = ends.index(min(ends))
        group = runner.take(left, record, from_end=bool(lane))
        ends[lane] += sum(record[file].wall * (slowness if record[file].cpu > 6 else 1.0) for file in group)
    assert max(ends) - min(ends) <= 1.5 * slowness * runner.LEAST_S


@pytest.mark.parametrize(
    ("times", "grown"),
    [
        pytest.param({}, [], id="as recorded"),
        pytest.param({"b": 9.0}, [], id="below the floor"),
        pytest.param({"a": 250.0}, [], id="within three times its share"),
        pytest.param({"a": 700.0}, ["a"], id="beyond three times its share"),
        pytest.param({"new": 90.0}, ["new"], id="not recorded"),
    ],
)
@pytest.mark.parametrize("slowness", [0.5, 1.0, 8.0])
def test_file_beyond_its_share_is_named_however_slow_the_machine_is(
    runner: ModuleType, times: dict[str, float], grown: list[str], slowness: float
) -> None:
    record = {"a": runner.Seconds(100.0, 90.0), "b": runner.Seconds(1.0, 1.0), "c": runner.Seconds(900.0, 1.0)}
    took = {name: runner.Seconds(times.get(name, seconds.wall), 1.0) for name, seconds in record.items()}
    took |= {name: runner.Seconds(wall, 1.0) for name, wall in times.items()}
    took = {name: runner.Seconds(seconds.wall * slowness, 1.0) for name, seconds in took.items()}
    assert [line.split(" ")[0] for line in runner.grown(took, record)] == grown


def test_ended_processes_are_collected_and_the_one_that_is_forked_from_is_left(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """multiprocessing looks after its own."""
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(runner, "_forking", lambda: {child.pid})
    runner.collect_ended()
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    monkeypatch.undo()
    runner.collect_ended()
    assert not psutil.pid_exists(child.pid)
    child.wait()


@pytest.fixture
def run(tmp_path: Path) -> "subprocess.Popen[str]":
    """A run of one test, which leaves a process behind; the file `pid` has the process's number."""
    text = (
        "import os, pathlib, subprocess, sys, time\n"
        "def test_leaves_a_process():\n"
        "    wait = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "    child = subprocess.Popen(wait, start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "    here = pathlib.Path(__file__).parent\n"
        "    (here / 'new').write_text(str(child.pid))\n"
        "    (here / 'new').rename(here / 'pid')\n"
        "    time.sleep(600 if 'TEST_WAITS' in os.environ else 0)\n"
        "    assert child.poll() is None\n"
        "    assert not sys.dont_write_bytecode, 'the next run would rewrite and compile all tests again'\n"
    )
    (tmp_path / "test_child.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={tmp_path}", f"-c{tmp_path}/pytest.ini"]
    command = [sys.executable, "-c", IMPATIENT, *options, tmp_path / "test_child.py"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_process_that_outlives_the_tests_fails_the_run_and_is_killed(
    run: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    printed, _ = run.communicate(timeout=240)
    assert run.returncode == 1
    assert "1 passed" in printed
    assert "these processes outlived the tests" in printed
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_signal_ends_the_run_and_all_its_processes(waits: None, run: "subprocess.Popen[str]", tmp_path: Path) -> None:
    eventually((tmp_path / "pid").exists)
    left = psutil.Process(int((tmp_path / "pid").read_text()))
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=240)
    assert run.returncode == 128 + signal.SIGINT
    _, alive = psutil.wait_procs([left], timeout=240)
    assert alive == []


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_WAITS", "1")
