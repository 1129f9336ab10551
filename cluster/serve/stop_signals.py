"""SIGINT and SIGTERM end `crossdock serve` at any moment, without a traceback and without leaving processes behind."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.2  # between two looks for a signal


class StopSignal(Exception):  # nothing went wrong
    """SIGINT or SIGTERM has come."""


class StopRequest:
    """Notes SIGINT and SIGTERM, and raises `StopSignal` where that leaves nothing half done.

    A handler that raises would interrupt Ray's code anywhere, print its traceback, and leave processes behind.
    """

    def __init__(self) -> None:
        self.has_come = False
        self.is_urgent = False  # SIGINT, which comes from a person, or a second signal
        self.listen()

    def listen(self) -> None:
        """Take the signals, also from a handler that was installed meanwhile."""
        for number in _STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.is_urgent = self.has_come or number == signal.SIGINT
        self.has_come = True

    def check(self) -> None:
        """Raise StopSignal if a signal has come."""
        if self.has_come:
            raise StopSignal

    def wait(self) -> None:
        """Wait for a moment. Raises StopSignal if a signal has come."""
        time.sleep(_LOOK_S)
        self.check()


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process on SIGINT and SIGTERM, without a traceback, as long as it has started no other.

    Within the context `StopRequest` takes over.
    """

    def end(number: int, frame: Any) -> None:
        if os.isatty(1):
            os.write(1, b"\x1b[?25h\n")  # a progress display hides the cursor
        os._exit(0)

    before = {number: signal.signal(number, end) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is end:
                signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore both signals from now on."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
