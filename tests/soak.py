"""Tests marked `soak`: a tenth of them for each day, and the record of when each of them last passed.

CROSSDOCK_SOAK_DAY, `today` or a date, leaves the tests whose turn that day is: in ten days in a row, each test has one.
CROSSDOCK_SOAK_RECORD names the record, else tests/soak.tsv, and has tests that pass written to it. A tenth has no test
that the record lacks: such a test has not passed yet, and would refuse every change. Nor has a tenth a test that took
LONGEST_S and more. After LIMIT_S seconds of a tenth no more tests start.
"""

import os
import time
from collections.abc import Generator, Iterable
from datetime import date
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest

DAY = "CROSSDOCK_SOAK_DAY"
TO = "CROSSDOCK_SOAK_RECORD"
ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "soak.tsv"
TURNS = 10
LONGEST_S = 240.0
LIMIT_S = 720.0  # with the last test at most LONGEST_S more, and less on CI's machine

# A run of pytest that a test starts has no turn and records nothing.
_day = os.environ.pop(DAY, None)
_to = os.environ.pop(TO, None)
_seconds: dict[str, float] = {}  # of each test that ran, its fixtures' among them
_passed: set[str] = set()
_not_passed: set[str] = set()  # also those that passed before their fixtures failed
_left_out: list[str] = []
_deadline: list[float] = []


class Passed(NamedTuple):
    """The day on which a test last passed, and the seconds that it took."""

    day: date
    seconds: float


def read_record(path: Path) -> dict[str, Passed]:
    """Return the record in a file of lines `test day seconds`, by the test's id."""
    lines = path.read_text().splitlines() if path.exists() else []
    fields = (line.rsplit("\t", 2) for line in lines)
    return {test: Passed(date.fromisoformat(day), float(seconds)) for test, day, seconds in fields}


def write_record(path: Path, record: dict[str, Passed]) -> None:
    lines = (f"{test}\t{passed.day}\t{passed.seconds:.1f}\n" for test, passed in sorted(record.items()))
    path.write_text("".join(lines))


def has_turn(test: str, day: date) -> bool:
    """Return whether a test's turn is that day: a test with this id has every tenth day."""
    number = int.from_bytes(sha256(test.encode()).digest()[:8], "big")
    return number % TURNS == day.toordinal() % TURNS


def in_turn(tests: Iterable[str], day: date) -> list[str]:
    """Return the tests whose turn is that day, in their order, from another file on at each turn.

    Tests of a file stay together, as they share what takes long to start. Where LIMIT_S ends a tenth, other tests are
    left over at the next turn.
    """
    chosen = [test for test in tests if has_turn(test, day)]
    files = list(dict.fromkeys(map(_file, chosen)))
    if not files:
        return []
    first = day.toordinal() // TURNS % len(files)
    place = {file: place for place, file in enumerate([*files[first:], *files[:first]])}
    return sorted(chosen, key=lambda test: place[_file(test)])


def fits(test: str, record: dict[str, Passed]) -> bool:
    """Return whether a test is for tenths: it has passed, in fewer seconds than LONGEST_S."""
    return test in record and record[test].seconds < LONGEST_S


def updated(record: dict[str, Passed], passed: dict[str, float], day: date, root: Path = ROOT) -> dict[str, Passed]:
    """Return the record with the tests that passed that day, by their seconds, and without functions that are gone."""
    kept = {test: before for test, before in record.items() if exists(test, root)}
    return kept | {test: Passed(day, seconds) for test, seconds in passed.items()}


def exists(test: str, root: Path = ROOT) -> bool:
    """Return whether the checkout at `root` has the function of a test."""
    name = test.partition("[")[0].rpartition("::")[2]
    return f"def {name}(" in _text(root / _file(test))


@cache
def _text(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def _file(test: str) -> str:
    return test.partition("::")[0]


def _record() -> dict[str, Passed]:
    return read_record(Path(_to) if _to else RECORD)


def _asked_day() -> date:
    assert _day is not None
    return date.today() if _day == "today" else date.fromisoformat(_day)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the day's turn that fit into a tenth. The others are told at the end."""
    if _day is None:
        return
    record = _record()
    by_id = {item.nodeid: item for item in items if item.get_closest_marker("soak")}
    chosen = in_turn(by_id, _asked_day())
    _left_out.extend(test for test in chosen if not fits(test, record))
    kept = [by_id[test] for test in chosen if test not in _left_out]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    _deadline[:] = [time.monotonic() + LIMIT_S]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _deadline and time.monotonic() > _deadline[0]:
        pytest.skip(f"needs more time than the {LIMIT_S:.0f} s of a tenth of the soak: make soak")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.add(report.nodeid)
    if not report.passed:
        _not_passed.add(report.nodeid)
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Write a test into the record when it has passed: a later test may end the process."""
    result = yield
    test = item.nodeid
    if _to and item.get_closest_marker("soak") and test in _passed - _not_passed:
        path = Path(_to)
        record = updated(read_record(path), {test: _seconds[test]}, date.today(), item.config.rootpath)
        write_record(path, record)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a day pass on which no recorded test has its turn."""
    if _day is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell what the day's tenth left out, and when such a test last passed."""
    record = _record() if _left_out else {}
    for test in _left_out:
        last = f"too long, last passed on {record[test].day}" if test in record else "not in the record of what passed"
        terminalreporter.write_line(f"not in the tenth of the soak: {last}: {test}")
