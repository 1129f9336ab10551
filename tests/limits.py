"""End a run of pytest at once, its child processes included: for a test beyond its limit, Ctrl-C, SIGTERM.

pytest-timeout first fails a test at its limit by a signal. asyncio swallows what that signal raises inside a callback,
and a wait in C never sees the signal. So a thread ends the whole process a little later.
"""

import contextlib
import faulthandler
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Generator
from types import FrameType
from typing import Any

import psutil
import pytest

FOLDERS: list[str] = []  # removed when a run is ended; a run that ends by itself removes them where it made them
_GRACE = 0.1  # of the limit: what a test that failed at its limit has for its clean-up
_timers: list[threading.Timer] = []
_config: list[pytest.Config] = []


def pytest_configure(config: pytest.Config) -> None:
    _config[:] = [config]
    take_signals()


def pytest_runtest_setup() -> None:
    take_signals()  # ray.init and servers install handlers of their own, which raise what pytest takes for a failure


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
    """Set the thread that ends the process, beside pytest-timeout's signal."""
    limit = settings.timeout * (1 + _GRACE)
    timer = threading.Timer(limit, _end, [f"{item.nodeid} has not ended after {limit:.0f} s", 1])
    timer.daemon = True
    timer.start()
    _timers.append(timer)
    faulthandler.dump_traceback_later(limit * (1 + _GRACE), exit=True)  # a call in C may hold all threads of Python
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer() -> Generator[None, Any, Any]:
    faulthandler.cancel_dump_traceback_later()
    while _timers:
        _timers.pop().cancel()
    return (yield)


def take_signals() -> None:
    """Have SIGINT and SIGTERM end the process, whatever handlers a library has installed since."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _on_signal)


def end_children() -> None:
    """Kill all processes below this one. A process may start another one meanwhile: look until none is left."""
    deadline = time.monotonic() + 5
    while (children := _to_end()) and time.monotonic() < deadline:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=0.5)


def _to_end() -> list[psutil.Process]:
    """Return the processes below this one that do not end by themselves.

    Python's tracker does, after it has removed the semaphores of processes that ended at once.
    """
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not any("multiprocessing.resource_tracker" in part for part in child.cmdline()):
                found.append(child)
    return found


def _on_signal(number: int, frame: FrameType | None) -> None:
    _end(f"ended by {signal.Signals(number).name}", 128 + number)


def _end(reason: str, code: int) -> None:
    """Write the reason and the stacks of all threads, end all child processes, and exit with the code."""
    try:
        if capture := _config[0].pluginmanager.getplugin("capturemanager"):
            capture.suspend_global_capture(in_=True)
        end_children()
        sys.__stderr__.write(f"\n{reason}; the stacks of all threads:\n")
        sys.__stderr__.flush()
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        for folder in FOLDERS:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(code)
