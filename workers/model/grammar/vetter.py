"""The replica's side of the vetting process: starts the process, asks for verdicts, replaces it if it ends."""

import logging
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from crossdock.workers.model.grammar.vetting import WALL_SECONDS, read_frame, write_frame
from crossdock.workers.schedule.request import Grammar, InvalidField

logger = logging.getLogger(__name__)

_MODULE = "crossdock.workers.model.grammar.vetting"
_START_PATIENCE_S = 30.0  # a start takes half a second on an idle machine
_PATIENCE_S = WALL_SECONDS + 2.0  # for a verdict


class VettingBusy(RuntimeError):
    """There is no verdict: the machine was too slow, or the process ended. Another attempt may succeed."""


class Vetter:
    """Asks a process of its own whether a grammar compiles within limits. Calls must not overlap.

    The process ends when its stdin does: with `close`, with this object, or with this process however that ends.
    """

    def __init__(self, tokenizer: str, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer`: the JSON of a fast Hugging Face tokenizer. The process starts with `start` or the first call."""
        self._start_message = {"tokenizer": tokenizer, "eos_token_ids": list(eos_token_ids)}
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._closing: weakref.finalize[Any, Any] | None = None

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self._process is not None:
            return
        # A new interpreter, never a fork: this process has threads, and memory that a network card may know.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._closing = weakref.finalize(self, _end, self._process)
        with suppress(BrokenPipeError):  # then there will be no verdict
            write_frame(_stdin(self._process), self._start_message)

    def vet(self, grammar: Grammar) -> int:
        """Return the bytes that the compiled grammar takes, about.

        Raises:
            InvalidField: the grammar cannot be served; the message gives the reason.
            VettingBusy: there is no verdict.
        """
        verdict = self._ask(grammar) or self._ask(grammar)  # it may have ended since the last grammar
        if verdict is None or verdict.get("is_busy"):
            raise VettingBusy("grammars cannot be compiled in time now")
        if error := verdict.get("error"):
            raise InvalidField(error, "grammar")
        return int(verdict["bytes"])

    def close(self) -> None:
        """End the process. Another call starts the next one."""
        if self._closing is not None:
            self._closing()
        self._process, self._closing, self._is_ready = None, None, False

    def _ask(self, grammar: Grammar) -> dict[str, Any] | None:
        """Return the verdict; None where the process ended. VettingBusy: it hung."""
        verdict: dict[str, Any] | None = None
        self.start()
        assert self._process is not None
        try:
            self._is_ready = self._is_ready or _answer(self._process, _START_PATIENCE_S) is not None
            write_frame(_stdin(self._process), {"kind": grammar.kind, "source": grammar.source})
            verdict = _answer(self._process, _PATIENCE_S)
        except TimeoutError as error:
            self.close()
            raise VettingBusy("the process that compiles grammars hung") from error
        except OSError:
            pass  # it has ended
        if verdict is None:
            logger.warning("the process that compiles grammars ended; another starts")
            self.close()
        return verdict


def _stdin(process: "subprocess.Popen[bytes]") -> BinaryIO:
    assert process.stdin is not None
    return process.stdin  # type: ignore[return-value]


def _answer(process: "subprocess.Popen[bytes]", patience_s: float) -> dict[str, Any] | None:
    """Return the process's next answer; None where it ended. TimeoutError: none came in time."""
    stdout = process.stdout
    assert stdout is not None
    if not select.select([stdout], [], [], patience_s)[0]:
        raise TimeoutError
    answer: dict[str, Any] | None = read_frame(stdout)  # type: ignore[arg-type]
    return answer


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(OSError):
        _stdin(process).close()
    if process.stdout is not None:
        process.stdout.close()
    process.kill()
    process.wait()
