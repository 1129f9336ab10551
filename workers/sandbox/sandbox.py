"""The caller's side of a sandbox: starts the process, asks it, replaces it if it ends."""

import logging
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, BinaryIO

from crossdock.workers.sandbox.interruption import Interruption
from crossdock.workers.sandbox.limited_child import Limits
from crossdock.workers.sandbox.messages import INTERRUPT, read_message, write_message

logger = logging.getLogger(__name__)

_MARGIN_S = 5.0  # beyond a child's wall seconds, to send an answer
_START_S = 300.0  # until a process must be ready: three seconds on an idle machine, a minute on a slow and busy one
_KEPT = ("PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG", "LC_ALL")  # others may be secrets, such as HF_TOKEN


class SandboxBusy(RuntimeError):
    """There is no answer: the machine was too slow, or the process ended. Another attempt may succeed."""


class SandboxInterrupted(RuntimeError):
    """The caller's interruption ended the work."""


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
        start_patience_s: float = _START_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """The process starts with `start` or the first question.

        Args:
            module: run as `python -m`; it calls `sandbox_main` with its own `serve`.
            settings: the first message that the process reads, with `limits` added. The process answers once ready.
            title: of the process, in errors and in the log.
            limits: of each answer.
            start_patience_s: seconds until the process must be ready.
            environment: variables of the process. Of this one's, it has those of `_KEPT` alone.
        """
        self._module = module
        self._title = title
        self._settings = {**settings, "limits": asdict(limits)}
        self._start_patience_s = start_patience_s
        self._patience_s = limits.wall_seconds + _MARGIN_S
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._first_answer: dict[str, Any] | None = None
        self._has_ended = False
        self._closing: weakref.finalize[Any, Any] | None = None
        self._ready_by = 0.0

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
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        # A new interpreter, never a fork: this process has threads, and memory that a network card may know.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, **self._environment, "PYTHONPATH": path},
        )
        self._closing = weakref.finalize(self, _end, self._process)
        self._ready_by = time.monotonic() + self._start_patience_s
        with suppress(BrokenPipeError):  # then there will be no answer
            write_message(_stdin(self._process), self._settings)

    def first_answer(self, interruption: Interruption | None = None) -> dict[str, Any] | None:
        """Wait until the process has read its settings, and return the answer to them; None where the process ended.

        Raises:
            SandboxInterrupted: `interruption` was set before. The process goes on with its start.
            TimeoutError: there is no answer in time.
        """
        self.start()
        assert self._process is not None
        if self._first_answer is None:
            patience_s = max(0.0, self._ready_by - time.monotonic())
            if _wait(self._process, patience_s, interruption):
                raise SandboxInterrupted
            self._first_answer = _answer(self._process)
        return self._first_answer

    def ask(self, asked: Mapping[str, Any], interruption: Interruption | None = None) -> dict[str, Any]:
        """Return the process's answer.

        Raises:
            SandboxBusy: there is no answer.
            SandboxInterrupted: `interruption` was set before an answer. The child has ended, the process goes on.
        """
        answer = self._ask(asked, interruption)
        if answer is None:  # the process may have ended since the last answer
            answer = self._ask(asked, interruption)
        if answer is None or answer.get("is_busy"):
            raise SandboxBusy(f"{self._title} had not enough time, or ended twice")
        if answer.get("is_interrupted"):
            raise SandboxInterrupted
        return answer

    def close(self) -> None:
        """End the process. Another question starts the next one."""
        if self._closing is not None:
            self._closing()
        self._process = None
        self._closing = None
        self._first_answer = None

    def end(self) -> None:
        """End the process, for good. Any thread may call."""
        self._has_ended = True
        self.close()

    def _ask(self, asked: Mapping[str, Any], interruption: Interruption | None) -> dict[str, Any] | None:
        """Return the answer; None where the process ended. SandboxBusy: the process hung."""
        answer: dict[str, Any] | None = None
        self.start()
        process = self._process
        assert process is not None
        try:
            self.first_answer(interruption)
            if interruption is not None and interruption.is_set:
                raise SandboxInterrupted
            write_message(_stdin(process), asked)
            if _wait(process, self._patience_s, interruption):
                write_message(_stdin(process), INTERRUPT)
                _wait(process, self._patience_s)
            answer = _answer(process)
        except TimeoutError as error:
            self.close()
            raise SandboxBusy(f"{self._title} hung") from error
        except (OSError, ValueError):
            pass  # the process has ended, `end` has closed its pipes, or what it wrote is no message
        except SandboxInterrupted:  # before the question
            raise
        except BaseException:  # such as MemoryError: the rest of this answer would be read as the next one's
            self.close()
            raise
        if answer is None:
            logger.warning("%s ended; another starts", self._title)
            self.close()
        return answer


def _stdin(process: "subprocess.Popen[bytes]") -> BinaryIO:
    assert process.stdin is not None
    return process.stdin  # type: ignore[return-value]


def _wait(process: "subprocess.Popen[bytes]", patience_s: float, interruption: Interruption | None = None) -> bool:
    """Wait for the process's next answer. Returns True where an interruption came first. TimeoutError: neither came."""
    assert process.stdout is not None
    # `select` takes no descriptor from 1024 on.
    answers = process.stdout.fileno()
    events = select.poll()
    events.register(answers, select.POLLIN)
    if interruption is not None:
        events.register(interruption.fileno(), select.POLLIN)
    ready = events.poll(patience_s * 1000)
    if not ready:
        raise TimeoutError
    return answers not in dict(ready)


def _answer(process: "subprocess.Popen[bytes]") -> dict[str, Any] | None:
    """Return the process's next answer; None where the process ended."""
    stdout = process.stdout
    assert stdout is not None
    answer = read_message(stdout)  # type: ignore[arg-type]
    if not isinstance(answer, dict | None):
        raise ValueError("what a child wrote is no answer")
    return answer


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()  # first: a thread that writes to it holds the lock of its stdin
    with suppress(OSError):
        _stdin(process).close()
    if process.stdout is not None:
        process.stdout.close()
    process.wait()
