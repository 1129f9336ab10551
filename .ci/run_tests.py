"""Run the tests in three lanes, print what each file took, and name a file that grew past its recorded share.

Usage: python .ci/run_tests.py [--record | --pure | pytest's arguments ...]
Without arguments: all tests, after the files that they need once (tests/first_files.py). The other files stand in one
list: first those that wait more, last those that mostly compute. One lane runs the files that share a Ray, and then
takes groups of files from the head of the list; one takes groups from its end. A group has about four minutes, and at
most a quarter of what is left, so that both lanes end together also where the record is wrong for this machine. A third
lane runs beside them the files whose processes compute for less than WAITING of their time: two lanes alone leave a
core without work. More lanes are no faster: what a test waits for computes, too (four lanes on two cores came to a load
of 34).
Each group is a process of its own: what its files load goes with it. It is forked from a process that has imported
torch and transformers, which takes a core 8 s. --record writes tests/seconds.tsv. --pure runs the tests of PURE, in a
process without torch.

Why not pytest-xdist: it starts each worker as a new Python, which imports for these 8 s, and keeps it for the whole
run, with the memory of every file that ran there. A worker takes any file next, or all files of one mark: there is no
order by recorded seconds, no lane for files that wait, and no process that collects what tests leave behind. To fork
workers, to renew them and to plan their files would be as many lines on top of it. 74 files without Ray (those of
tests/router and of five folders of tests/workers; 1,309 tests; 2 cores of a Zen 5 with other work on them, 2026-11-30)
took 93 s of CPU with `-n 2 --dist loadfile`, and 91 s here. By the clock they took 98 s and 148 s: so few files make
few groups, and one lane had none left after 70 s. The minutes of all files are not measured.

SIGINT and SIGTERM end all processes of the run. So does the end of the run: a process that outlives it is a failure.
"""

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import connection, forkserver, resource_tracker, util
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "seconds.tsv"
GROUP_S = 240.0
LEAST_S = 20.0  # a group where the lanes meet: to start one takes a slow core 3 s
WAITING = 0.6  # CPU seconds of a wall second, of a file that mostly waits
_HELPERS_S = 5.0
PURE = (
    "tests/router",
    "tests/workers/schedule",
    "tests/workers/report",
    "tests/workers/sandbox/test_sandbox.py",
    "tests/cluster/simulate",
    "tests/test_plain_english.py",
    "tests/test_checks_of_tests.py",
    "tests/test_run_tests.py",
)
# A file may take three times its share, and 30 s more: what is slow differs by machine.
GROWTH = 3.0
FLOOR_S = 30.0
_SUBREAPER = 36  # prctl's PR_SET_CHILD_SUBREAPER: processes whose parent has ended become children of this one
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT  # look, and leave it to multiprocessing if it is its own
_TOLD = ("FAILED ", "ERROR ", "hole: ")
FORKS = multiprocessing.get_context("forkserver")
_IMPORTED = [  # of others, not of ours, which pytest rewrites; no Ray, which starts threads
    "tests.own_folders",  # the variables that the others read
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "transformers.modeling_utils",
    "fastapi",
    "uvicorn",
    "hypothesis",
    "openai",
    "anthropic",  # takes a core 2.4 s (an Intel Xeon with AMX, 2026-12-01); tests of the API are in several groups
]
_REWRITE = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"  # plugins of pytest are


class Seconds(NamedTuple):
    """Seconds of one test file by the wall clock and of the CPU, all processes' together; MiB of memory at its end."""

    wall: float
    cpu: float
    mib: int = 0


def read_seconds(path: Path) -> dict[str, Seconds]:
    """Return the seconds in a file of lines `path wall cpu [MiB]`. A test file that ran twice has its sum."""
    seconds: dict[str, Seconds] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        name, wall, cpu, *mib = line.split("\t")
        before = seconds.get(name, Seconds(0.0, 0.0))
        seconds[name] = Seconds(before.wall + float(wall), before.cpu + float(cpu), int(mib[0]) if mib else 0)
    return seconds


def write_record(seconds: dict[str, Seconds]) -> None:
    lines = [f"{name}\t{took.wall:.1f}\t{took.cpu:.1f}\n" for name, took in sorted(seconds.items())]
    RECORD.write_text("".join(lines))


def waiting(files: Iterable[str], record: dict[str, Seconds]) -> list[str]:
    """Return the files that mostly wait. A file without a record is not among them."""
    return sorted(file for file in files if file in record and record[file].cpu < WAITING * record[file].wall)


def in_order(files: Iterable[str], record: dict[str, Seconds]) -> deque[str]:
    """Return the files in groups by their paths, of about GROUP_S; the group that waits most comes first."""
    made = sorted(_cut(sorted(files), record, GROUP_S), key=lambda group: _computing(group, record))
    return deque(file for group in made for file in group)


def take(left: deque[str], record: dict[str, Seconds], *, from_end: bool) -> list[str]:
    """Take a group of files from one end of a list. IndexError: no file is left.

    By the record a group takes GROUP_S, and at most a quarter of what is left, or LEAST_S. So lanes end together, also
    where the files of one take longer than recorded. Groups that were made before the run let one lane end after 33.5
    minutes, and the other after 41.2 (2 cores of a Zen 3, 2026-11-30).
    """
    seconds = max(LEAST_S, min(GROUP_S, sum(_wall(file, record) for file in left) / 4))
    next_file = left.pop if from_end else left.popleft
    group = [next_file()]
    filled = _wall(group[0], record)
    while left and filled + _wall(left[-1 if from_end else 0], record) / 2 <= seconds:
        group.append(next_file())
        filled += _wall(group[-1], record)
    return sorted(group)


def _cut(files: list[str], record: dict[str, Seconds], seconds: float) -> list[list[str]]:
    made: list[list[str]] = []
    filled = 0.0
    for file in files:
        wall = _wall(file, record)
        if not made or filled + wall / 2 > seconds:
            made.append([])
            filled = 0.0
        made[-1].append(file)
        filled += wall
    return made


def _wall(file: str, record: dict[str, Seconds]) -> float:
    return record.get(file, Seconds(1.0, 1.0)).wall


def _computing(group: list[str], record: dict[str, Seconds]) -> float:
    known = [record[file] for file in group if file in record]
    wall = sum(took.wall for took in known)
    # What a file starts may compute on both cores: a lane is one.
    return sum(min(took.cpu, took.wall) for took in known) / wall if wall else 0.5


def grown(took: dict[str, Seconds], record: dict[str, Seconds]) -> list[str]:
    """Return a line for each file beyond its share.

    The seconds of all recorded files together say how fast this machine is now, so that a slow one refuses nothing.
    """
    both = took.keys() & record.keys()
    speed = sum(took[file].wall for file in both) / (sum(record[file].wall for file in both) or 1.0) if both else 1.0
    lines = []
    for file, (wall, *_) in sorted(took.items()):
        recorded = record.get(file, Seconds(0.0, 0.0)).wall
        if wall > (limit := speed * GROWTH * recorded + max(speed, 1.0) * FLOOR_S):
            lines.append(f"{file} took {wall:.0f} s; its share is at most {limit:.0f} s ({recorded:.0f} s recorded)")
    return lines


class Run:
    """The pytest processes of one run, their output and their end."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="crossdock-run-")
        self.seconds = Path(self._folder.name) / "seconds.tsv"
        self.told: list[str] = []
        self.counts: Counter[str] = Counter()
        self.codes: list[int] = []
        self._running: list[int] = []
        self._ends = False
        self._forking = threading.Lock()  # to start a process looks at all others, as the lane does that waits for one
        os.environ.update(
            CROSSDOCK_TESTS_CACHE=f"{self._folder.name}/cache",
            CROSSDOCK_TESTS_SECONDS=str(self.seconds),
            PYTHONUNBUFFERED="1",
        )
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of some hundred processes compiles all again

    def pytest(self, arguments: list[str], prefix: str = "") -> int:
        """Run one pytest, print its lines as they come, and return its exit code."""
        code = self.forked(prefix, "pytest", "-W", _REWRITE, *arguments)
        self.codes.append(0 if code == 5 else code)  # 5: no test was selected
        return code

    def forked(self, prefix: str, module: str, *arguments: str) -> int:
        """Run a module in a forked process, print its lines as they come, and return its exit code."""
        ours, theirs = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=run_module, args=(theirs, module, arguments))
        with self._forking:
            process.start()
        theirs.close()
        assert process.pid is not None
        self._running.append(process.pid)
        reader = threading.Thread(target=self._read, args=(ours, prefix), daemon=True)
        reader.start()
        while not connection.wait([process.sentinel], 0.5):
            collect_ended()
        with self._forking:
            process.join()
        reader.join(timeout=5)  # a process that outlives pytest may hold its output open
        self._running.remove(process.pid)
        assert process.exitcode is not None
        return process.exitcode

    def lane(self, name: str, take: Callable[[], list[str]]) -> None:
        """Run groups one after another, until none is left or a signal ends the run."""
        while not self._ends:
            try:
                group = take()
            except IndexError:
                return
            options = ["-o", "console_output_style=times", "--no-header"]
            if (code := self.pytest([*options, *group], f"{name} | ")) not in (0, 5):  # 5: all were deselected
                self.told.append(f"FAILED: exit code {code} of the run of {group[0]} to {group[-1]}")

    def end(self, number: int, frame: object) -> None:
        """Forward a signal to all pytest processes; they end what they started. Kill what is left after 20 s."""
        self._ends = True
        ending = list(self._running)
        for pid in ending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + 20
        while any(map(psutil.pid_exists, ending)) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.close(0.0)
        os._exit(128 + number)

    def close(self, patience_s: float = _HELPERS_S) -> list[str]:
        """Kill and return the processes that outlived the run by more than `patience_s`, and remove its folder."""
        alive = [child for child in psutil.Process().children(recursive=True) if _alive(child)]
        forking = [child for child in alive if child.pid in _forking()]
        started = [child for child in alive if child not in forking]
        described = {child.pid: _describe(child) for child in started}
        # Python's own helpers of multiprocessing end once they see that their parent has ended, a moment later.
        _, left = psutil.wait_procs(started, timeout=patience_s)
        left = [child for child in left if _alive(child)]
        helper = resource_tracker._resource_tracker
        for child in [*left, *(each for each in forking if each.pid != helper._pid)]:
            child.kill()
        psutil.wait_procs(left, timeout=5)
        helper._stop()  # type: ignore[attr-defined]  # it removes the semaphores of processes that ended at once
        self._folder.cleanup()
        util._run_finalizers()  # of multiprocessing: its own temporary folder
        return [described[child.pid] for child in left]

    def _read(self, output: connection.Connection, prefix: str) -> None:
        with open(output.fileno(), closefd=False) as lines:
            for line in lines:
                sys.stdout.write(prefix + line)
                sys.stdout.flush()
                if line.startswith(_TOLD):
                    self.told.append(line.rstrip())
                elif re.match(r"=+ .* in [\d.]+s", line):
                    for count, what in re.findall(r"(\d+) (passed|failed|skipped|deselected|errors?|xfailed)", line):
                        self.counts[what] += int(count)


def run_module(output: connection.Connection, module: str, arguments: tuple[str, ...]) -> None:
    """Run a module as `python -m` does, with its output into a pipe: what a forked process does."""
    os.setsid()  # Ctrl-C at a terminal reaches the run alone
    os.chdir(ROOT)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    sys.dont_write_bytecode = False  # PYTHONDONTWRITEBYTECODE reached the process that is forked from by a flag, -B
    sys.argv = [module, *arguments]
    if "torch" in sys.modules:
        importlib.import_module("tests.forked_workers").fork_the_server()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing's processes leave them out


def collect_ended() -> None:
    """Collect ended processes that were started by ended ones: tests wait until such processes are gone."""
    with contextlib.suppress(ChildProcessError):  # another lane has collected it
        while (ended := os.waitid(os.P_ALL, 0, _ENDED)) and ended.si_pid not in _forking():
            os.waitpid(ended.si_pid, os.WNOHANG)


def _forking() -> set[int | None]:
    """Return the numbers of the process that is forked from and of its helper."""
    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_all(run: Run) -> None:
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    tests = {file for file in files if Path(file).match("test_*.py") and (ROOT / file).exists()}
    FORKS.set_forkserver_preload(_IMPORTED)
    run.forked("first    | ", "tests.first_files")
    record = read_seconds(RECORD)
    with_ray = {file for file in tests if "ray_cluster" in (ROOT / file).read_text()}
    beside = waiting(tests - with_ray, record)
    left = in_order(tests - with_ray - {*beside}, record)
    own = {"waits   ": [beside] if beside else [], "serves  ": [sorted(with_ray)] if with_ray else [], "computes": []}
    taking = threading.Lock()

    def take_for(name: str) -> list[str]:
        if own[name] or name == "waits   ":
            return own[name].pop()
        with taking:
            return take(left, record, from_end=name == "computes")

    lanes = [threading.Thread(target=run.lane, args=(name, partial(take_for, name))) for name in own]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()


def report(run: Run, began: float, record: bool) -> bool:
    """Print what the run of all tests told, and return whether it passed."""
    took = read_seconds(run.seconds)
    for file, (wall, cpu, mib) in sorted(took.items(), key=lambda item: -item[1].wall)[:20]:
        print(f"{wall:7.1f} s, {cpu:6.1f} s CPU, {mib:5} MiB at its end: {file}")
    passed = not any(run.codes)
    if record and passed:
        write_record(took)
    elif passed and (lines := grown(took, read_seconds(RECORD))):
        print(*lines, "If that is meant: make test-seconds", sep="\n")
    print(*run.told, sep="\n")
    print(", ".join(f"{count} {what}" for what, count in run.counts.items()), f"in {time.monotonic() - began:.0f} s")
    return passed


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    run = Run()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, run.end)
    if arguments in ([], ["--record"]):
        run_all(run)
        passed = report(run, began, record=bool(arguments))
    elif arguments == ["--pure"]:
        os.environ["CROSSDOCK_TESTS_PURE"] = "1"
        passed = run.pytest(["-q", *PURE]) == 0
    else:
        passed = run.pytest(["--durations=20", *arguments]) == 0
    if left := run.close():
        print(f"FAILED: these processes outlived the tests: {', '.join(left)}")
    return 0 if passed and not left else 1


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # also of the processes that are forked
    sys.exit(main(sys.argv[1:]))
