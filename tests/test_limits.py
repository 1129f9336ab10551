"""A run of pytest ends at once, and leaves no process: when a test hangs, on Ctrl-C, on SIGTERM; with Ray as well.

It lists at its end which tests were skipped for want of a program.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
from tqdm import tqdm

from tests import file_seconds
from tests.forked_workers import PROCESSES
from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
HANGS_IN_CALLBACK = """
import asyncio, time
from pathlib import Path

def test_hangs():
    def callback():
        loop.call_soon(callback)  # what the signal raises ends this callback, and asyncio runs the next one
        time.sleep(600)

    loop = asyncio.new_event_loop()
    loop.call_soon(callback)
    loop.run_forever()
"""
WAITS = """
import multiprocessing, subprocess, sys, time
from pathlib import Path

def test_waits():
    lock = multiprocessing.get_context("spawn").Lock()
    Path("semaphore").write_text(lock._semlock.name.removeprefix("/"))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path("child").write_text(str(child.pid))
    Path("ready").touch()
    time.sleep(600)
"""
WAITS_WITH_RAY = """
import time
from pathlib import Path

def test_waits(ray_cluster):
    Path("ready").touch()
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass  # as asyncio does with what a handler raises
"""


SKIPS = """
import os
import pytest

def test_what_it_starts_records_no_seconds():
    assert "CROSSDOCK_TESTS_SECONDS" not in os.environ

def test_skips():
    pytest.skip("needs promtool: apt-get install prometheus")

def test_skips_for_another_reason():
    pytest.skip("there is no reason")
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder inside the tests, so that the run in it has their conftest.py."""
    made = ROOT / "tests" / f".child-{os.getpid()}"
    made.mkdir()
    yield made
    subprocess.run(["rm", "-r", str(made)], check=True)


def child_pytest(folder: Path, text: str, *options: str) -> subprocess.Popen[str]:
    (folder / "test_child.py").write_text(text)
    command = [Path(sys.executable).with_name("pytest"), "-q", "-p", "no:cacheprovider", *options, "test_child.py"]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def test_test_that_hangs_in_callback_ends_the_process_with_stacks(folder: Path) -> None:
    child = child_pytest(folder, HANGS_IN_CALLBACK, "--timeout=1")
    output, _ = child.communicate(timeout=240)
    assert child.returncode == 1
    assert "test_hangs has not ended" in output
    assert "in callback" in output, output


@pytest.mark.parametrize(
    ("text", "number"),
    [
        pytest.param(WAITS, signal.SIGINT, id="child, SIGINT"),
        pytest.param(WAITS_WITH_RAY, signal.SIGTERM, id="Ray, SIGTERM"),
    ],
)
def test_signal_ends_the_run_and_all_its_processes(folder: Path, text: str, number: signal.Signals) -> None:
    child = child_pytest(folder, text)
    eventually(lambda: (folder / "ready").exists() or child.poll() is not None, "no test began")
    below = psutil.Process(child.pid).children(recursive=True)
    assert below
    child.send_signal(number)
    output, _ = child.communicate(timeout=240)
    assert child.returncode == 128 + number
    assert f"ended by {number.name}" in output
    assert "in test_waits" in output, "the stacks"
    _, alive = psutil.wait_procs(below, timeout=240)
    assert alive == []
    assert not [file for file in folder.glob("semaphore") if Path(f"/dev/shm/sem.{file.read_text()}").exists()]


def _lock(answer: Connection) -> None:
    answer.send(type(tqdm.get_lock()).__name__)


def test_progress_bar_of_a_forked_process_has_no_lock_that_outlives_it() -> None:
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_lock, args=(theirs,))
    process.start()
    assert ours.recv() == type(threading.RLock()).__name__
    process.join(240)


def test_run_lists_missing_programs_with_their_packages_and_records_its_own_seconds_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(file_seconds.TO, str(folder / "seconds"))
    child = child_pytest(folder, SKIPS)
    output, _ = child.communicate(timeout=240)
    assert child.returncode == 0, output
    assert [line.split("\t")[0] for line in (folder / "seconds").read_text().splitlines()] == [
        f"tests/{folder.name}/test_child.py"
    ]
    assert [line for line in output.splitlines() if line.startswith("hole:")] == [
        "hole: 1 skipped: needs promtool: apt-get install prometheus"
    ]
