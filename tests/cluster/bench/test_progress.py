"""The progress of long commands: lines in a log, a bar on a terminal."""

import io
import threading
import time

import pytest
from rich.console import Console

from crossdock.cluster.bench import progress as module
from crossdock.cluster.bench.progress import progress


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_S", 0.001)


def wait_for(file: io.StringIO, text: str) -> None:
    """Wait until a text has been written. A text that never comes ends the test by pytest's own limit."""
    deadline = time.monotonic() + 240
    while text not in file.getvalue():
        assert time.monotonic() < deadline, file.getvalue()
        time.sleep(0.001)


def log() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=80), file


@pytest.mark.usefixtures("_often")
def test_log_has_a_plain_line_now_and_then() -> None:
    console, file = log()
    with progress(console, "chat [mix]", "requests") as report:
        report(3, 10)
        wait_for(file, "chat [mix]: 3 of 10 requests, 0 s\n")
        report(4, None)
        wait_for(file, "chat [mix]: 4 requests, ")
    written = file.getvalue()
    assert "\x1b" not in written
    assert all(len(line.split()) <= 9 for line in written.splitlines())


@pytest.mark.usefixtures("_often")
def test_log_shows_percent_without_a_unit_and_never_more_than_all() -> None:
    console, file = log()
    with progress(console, "Measuring") as report:
        report(1, 4)
        wait_for(file, "Measuring: 25%, ")
        report(5, 4)
        wait_for(file, "Measuring: 100%, ")


@pytest.mark.usefixtures("_often")
def test_log_has_lines_before_anything_is_done() -> None:
    console, file = log()
    with progress(console, "Loading"):
        wait_for(file, "Loading: 0 s\n")


@pytest.mark.usefixtures("_often")
def test_no_thread_is_left_after_an_error() -> None:
    console, file = log()

    def fail() -> None:
        with progress(console, "Loading"):
            wait_for(file, "Loading")
            raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        fail()
    assert "progress" not in [thread.name for thread in threading.enumerate()]


def test_short_command_writes_nothing_to_a_log() -> None:
    console, file = log()
    with progress(console, "Loading") as report:
        report(1, 1)
    assert not file.getvalue()


@pytest.mark.usefixtures("_often")
def test_terminal_has_a_bar_that_goes_away() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True)
    with progress(console, "chat", "requests") as report:
        report(3, 10)
    assert "3 of 10 requests" in file.getvalue()
    assert file.getvalue().endswith("\x1b[2K")  # the line is erased
