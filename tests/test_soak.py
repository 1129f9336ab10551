"""The tenth of the soak that is each day's, and the record of what passed."""

import os
import subprocess
import sys
from collections import Counter
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from tests import soak

TODAY = date(2026, 11, 28)  # for these tests
DAYS = [TODAY + timedelta(number) for number in range(soak.TURNS)]
TESTS = [f"tests/{file}.py::test_{file}_holds[{number}]" for file in "abcdef" for number in range(100)]
CASES = """
import pytest

pytestmark = pytest.mark.soak

@pytest.fixture
def broken():
    yield
    raise OSError("at the end")

@pytest.mark.parametrize("case", [*range(30)])
def test_case_passes(case): ...

@pytest.mark.timeout(3600)
def test_long_one_passes(): ...

def test_fails():
    raise OSError("here")

def test_fails_at_its_end(broken): ...

def test_is_skipped():
    pytest.skip("needs what is not here")
"""


def test_each_test_has_one_turn_in_ten_days() -> None:
    turns = [soak.in_turn(TESTS, day) for day in DAYS]
    assert Counter(test for chosen in turns for test in chosen) == Counter(TESTS)
    assert max(map(len, turns)) < 2 * len(TESTS) / soak.TURNS
    assert sorted(soak.in_turn(TESTS, TODAY)) == sorted(soak.in_turn(TESTS, TODAY + timedelta(soak.TURNS)))


def test_turn_keeps_tests_of_a_file_together_and_begins_with_each_file_once() -> None:
    turns = [soak.in_turn(TESTS, TODAY + timedelta(soak.TURNS * number)) for number in range(6)]
    for chosen in turns:
        files = [test.partition("::")[0] for test in chosen]
        assert sum(one != other for one, other in pairwise(files)) == len(set(files)) - 1
    assert len({chosen[0].partition("::")[0] for chosen in turns}) == 6
    assert soak.in_turn([], TODAY) == []


@pytest.mark.parametrize(
    ("seconds", "fits"),
    [(None, False), (20.0, True), (soak.LONGEST_S, False)],
)
def test_test_fits_into_a_tenth_once_it_has_passed_in_few_seconds(seconds: float | None, fits: bool) -> None:
    record = {} if seconds is None else {"a": soak.Passed(TODAY, seconds)}
    assert soak.fits("a", record) == fits


def test_record_is_read_as_written_and_keeps_what_did_not_run_and_drops_what_is_gone(tmp_path: Path) -> None:
    path, this = tmp_path / "soak.tsv", "tests/test_soak.py::test_turn_keeps_tests_of_a_file_together"
    old = soak.Passed(date(2026, 1, 2), 3.0)
    names = [f"tests/test_soak.py::{name.__name__}" for name in (test_each_test_has_one_turn_in_ten_days, run)]
    soak.write_record(path, {this: old, "tests/test_gone.py::test_a": old, **dict.fromkeys(names, old)})
    record = soak.updated(soak.read_record(path), {names[0]: 4.5}, TODAY)
    assert record == {names[0]: soak.Passed(TODAY, 4.5), names[1]: old}


def test_record_of_the_checkout_has_only_tests_that_exist() -> None:
    record = soak.read_record(soak.RECORD)
    assert record
    assert [test for test in record if not soak.exists(test)] == []


def run(folder: Path, **variables: str) -> str:
    """Run the tests of CASES with the plugin, and return what pytest printed."""
    (folder / "test_cases.py").write_text(CASES)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    soak\ntimeout = 300\n")
    options = ["-p", "tests.soak", "-p", "no:cacheprovider", f"--rootdir={folder}", f"-c{folder}/pytest.ini", "-ra"]
    command = [sys.executable, "-m", "pytest", "--import-mode=importlib", *options, str(folder / "test_cases.py")]
    ended = subprocess.run(
        command,
        cwd=soak.ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return ended.stdout


def test_run_records_what_passed_and_nothing_else(tmp_path: Path) -> None:
    record = tmp_path / "soak.tsv"
    soak.write_record(record, {"test_cases.py::test_fails": soak.Passed(TODAY, 3.0)})
    printed = run(tmp_path, CROSSDOCK_SOAK_RECORD=str(record))
    assert "32 passed, 1 failed, 1 skipped, 1 error" in printed.replace("1 failed, 32 passed", "32 passed, 1 failed")
    found = soak.read_record(record)
    assert found["test_cases.py::test_fails"].day == TODAY, "when it last passed"
    names = [test.partition("::")[2] for test in found]
    cases = [f"test_case_passes[{number}]" for number in range(30)]
    assert sorted(names) == sorted([*cases, "test_long_one_passes", "test_fails"])


def test_run_of_a_day_has_the_recorded_tests_of_its_turn_and_tells_of_the_others(tmp_path: Path) -> None:
    long = "test_cases.py::test_long_one_passes"
    (day,) = [day for day in DAYS if soak.has_turn(long, day)]
    first, *chosen = soak.in_turn([f"test_cases.py::test_case_passes[{number}]" for number in range(30)], day)
    record = tmp_path / "soak.tsv"
    seconds = {long: soak.LONGEST_S, **dict.fromkeys(chosen, 3.0)}
    soak.write_record(record, {test: soak.Passed(TODAY, each) for test, each in seconds.items()})
    printed = run(tmp_path, CROSSDOCK_SOAK_DAY=str(day), CROSSDOCK_SOAK_RECORD=str(record))
    assert chosen
    assert f" {len(chosen)} passed" in printed
    assert f"not in the tenth of the soak: too long, last passed on {TODAY}: {long}" in printed
    assert f"not in the tenth of the soak: not in the record of what passed: {first}" in printed


def test_test_after_the_limit_of_a_tenth_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    soak.pytest_runtest_setup(request.node)
    monkeypatch.setattr(soak, "_deadline", [0.0])
    with pytest.raises(pytest.skip.Exception, match="needs more time than the 720 s of a tenth"):
        soak.pytest_runtest_setup(request.node)
