"""The caller's side of a sandbox: starts the process, asks it, replaces it if it ends."""

import logging
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, BinaryIO

from crossdock.workers.sandbox.messages import read_message, write_message
from crossdock.workers.sandbox.limited_child import Limits

logger = logging.getLogger(__name__)

_MARGIN_S = 5.0  # beyond a child's wall seconds, to send an answer


class SandboxBusy(RuntimeError):
    """There is no answer: the machine was too slow, or the process ended. Another attempt may succeed."""


class Sandbox:
    """One process that answers messages. Calls must not overlap.

    The process ends when its stdin does: with `close`, with this object, or with this process however that ends.
    """

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        *,
        title: str,
        limits: Limits,
        start_patience_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """The process starts with `start` or the first question.

        Args:
            module: run as `python -m`; it calls `sandbox_main` with its own `serve`.
            settings: the first message that the process reads, with `limits` added. It answers once it is ready.
            title: of the process, in errors and in the log.
            limits: of each answer.
            start_patience_s: seconds until the process must be ready.
            environment: variables of the process, beside those of this one.
        """
        self._module, self._title = module, title
        self._settings = {**settings, "limits": asdict(limits)}
        self._start_patience_s, self._patience_s = start_patience_s, limits.wall_seconds + _MARGIN_S
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._first_answer: dict[str, Any] | None = None
        self._has_ended = False
        self._closing: weakref.finalize[Any, Any] | None = None

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process, unless it runs. SandboxBusy: `end` has been called."""
        if self._process is not None:
            return
        if self._has_ended:
            raise SandboxBusy(f"{self._title} has ended")
        path = os.pathsep.join(entry for entry in sys.path if entry)
        # A new interpreter, never a fork: this process has threads, and memory that a network card may know.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self._environment, "PYTHONPATH": path},
        )
        self._closing = weakref.finalize(self, _end, self._process)
        with suppress(BrokenPipeError):  # then there will be no answer
            write_message(_stdin(self._process), self._settings)

    def first_answer(self) -> dict[str, Any] | None:
        """Wait until the process has read its settings, and return the answer to them; None where the process ended.

        Raises:
            TimeoutError: there is none in time.
        """
        self.start()
        assert self._process is not None
        if self._first_answer is None:
            self._first_answer = _answer(self._process, self._start_patience_s)
        return self._first_answer

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the process's answer.

        Raises:
            SandboxBusy: there is none.
        """
        answer = self._ask(asked) or self._ask(asked)  # the process may have ended since the last answer
        if answer is None or answer.get("is_busy"):
            raise SandboxBusy(f"{self._title} had not enough time, or ended twice")
        return answer

    def close(self) -> None:
        """End the process. Another question starts the next one."""
        if self._closing is not None:
            self._closing()
        self._process, self._closing, self._first_answer = None, None, None

    def end(self) -> None:
        """End the process, for good. Any thread may call."""
        self._has_ended = True
        self.close()

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer; None where the process ended. SandboxBusy: it hung."""
        answer: dict[str, Any] | None = None
        self.start()
        process = self._process
        assert process is not None
        try:
            self.first_answer()
            write_message(_stdin(process), asked)
            answer = _answer(process, self._patience_s)
        except TimeoutError as error:
            self.close()
            raise SandboxBusy(f"{self._title} hung") from error
        except (OSError, ValueError):
            pass  # the process has ended, `end` has closed its pipes, or what it wrote is no message
        if answer is None:
            logger.warning("%s ended; another starts", self._title)
            self.close()
        return answer


def _stdin(process: "subprocess.Popen[bytes]") -> BinaryIO:
    assert process.stdin is not None
    return process.stdin  # type: ignore[return-value]


def _answer(process: "subprocess.Popen[bytes]", patience_s: float) -> dict[str, Any] | None:
    """Return the process's next answer; None where the process ended. TimeoutError: none came in time."""
    stdout = process.stdout
    assert stdout is not None
    if not select.select([stdout], [], [], patience_s)[0]:
        raise TimeoutError
    answer: dict[str, Any] | None = read_message(stdout)  # type: ignore[arg-type]
    return answer


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(OSError):
        _stdin(process).close()
    if process.stdout is not None:
        process.stdout.close()
    process.kill()
    process.wait()
