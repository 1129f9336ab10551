"""The sandbox's own side: computes each answer in a fork that has only so much time, memory and stack.

A question of a few kilobytes can take gigabytes and minutes, overflow a stack, or use a fault of a library written in
C. None of these can be stopped in a thread. A sandbox has no thread but its own, so that each child is a quick fork.

A child may run foreign code. So it has no descriptor but the pipe of its answer, no system call but those that compute
(`system_calls.py`), and the memory of no other question: the sandbox drops each before it reads the next.
"""

import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from crossdock.workers.sandbox.messages import (
    Packed,
    pack,
    questions,
    read_message,
    read_packed,
    unpack,
    write_packed,
)
from crossdock.workers.sandbox.system_calls import LIBC, can_filter, refuse_system_calls

_NICE = 5  # the engine's steps come first where cores are few
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_MARGIN_S = 1.0  # beyond a child's wall seconds, whose timer foreign code may have stopped
_PIPE = 3  # the child's only descriptor that leads anywhere


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one child."""

    cpu_seconds: float
    wall_seconds: float  # several times those of the CPU, for a busy machine
    memory_bytes: int  # beside the memory of the sandbox; of an answer, too
    stack_bytes: int | None = None


class ChildFailed(RuntimeError):
    """A child that was ended by its limits, by a fault or by an exception, without an answer."""

    def __init__(self, number: int | None) -> None:
        """`number`: the signal that ended the child. None: an exception did."""
        super().__init__(f"the child ended with signal {number}")
        self.is_too_slow = number in (signal.SIGPROF, signal.SIGALRM)
        self.is_too_large = number == signal.SIGABRT
        self.is_too_deep = number == signal.SIGSEGV


class _Interrupted(Exception):
    """The caller has sent something, or has ended."""


def sandbox_main(serve: Callable[[BinaryIO, BinaryIO], None]) -> None:
    """Let `serve` read messages from stdin and write answers to stdout, until stdin ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # limits end children by signals that would dump them
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the whole terminal; the caller decides
    if not can_filter():
        sys.stderr.write("this kernel filters no system calls, so that a sandbox holds less (docs/security.md)\n")
    # Without buffers: `select` must see a message that comes right behind a question, and no answer stays behind.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    with suppress(BrokenPipeError):  # the caller has ended
        serve(os.fdopen(0, "rb", buffering=0, closefd=False), answers)


def answer_all(
    compute: Callable[[Any], dict[str, Any]],
    refuse: Callable[[ChildFailed], dict[str, Any]],
    requests: BinaryIO,
    answers: BinaryIO,
    limits: Limits,
) -> None:
    """Answer each question with what `compute` makes of it in a child, or `refuse` of the child's end."""
    for question in questions(requests):
        try:
            write_packed(answers, run_limited(compute, question, requests, limits))
        except ChildFailed as failed:
            write_packed(answers, pack(refuse(failed)))


def run_limited(
    compute: Callable[[Any], dict[str, Any]], question: Packed, requests: BinaryIO, limits: Limits
) -> Packed:
    """Run `compute` in a child. Returns its result, or `is_busy` (only the machine was too slow), or `is_interrupted`.

    Args:
        compute: takes the unpacked question; returns what msgpack can pack.
        question: stays packed here, so that no part of it outlives the answer.
        requests: the caller's messages, without a buffer. During the wait only an interrupt or the end of the stream
            can come: both end the child.
        limits: of the child.

    Raises:
        ChildFailed: the child ended without an answer.
    """
    deadline = time.monotonic() + limits.wall_seconds + _MARGIN_S
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if not child:
        _run(compute, question, writer, parent, limits)
    os.close(writer)
    answer = None
    is_interrupted = False
    try:
        answer = read_packed(_AnswerPipe(reader, requests, deadline), limits.memory_bytes)  # type: ignore[arg-type]
    except TimeoutError:
        pass
    except _Interrupted:
        is_interrupted = True
    finally:
        os.close(reader)
        number, cpu_seconds = _end(child, 0.0 if is_interrupted or answer is not None else deadline)
    if answer is not None:
        return answer
    if is_interrupted and read_message(requests) is not None:
        return pack({"is_interrupted": True})
    if number == signal.SIGALRM and cpu_seconds < limits.cpu_seconds / 2:
        return pack({"is_busy": True})
    raise ChildFailed(number)


class _AnswerPipe:
    """A child's pipe, as a stream that can be read until a deadline. A process of the child may hold its other end."""

    def __init__(self, reader: int, requests: BinaryIO, deadline: float) -> None:
        self._reader = reader
        self._deadline = deadline
        self._events = select.poll()
        for descriptor in (reader, requests.fileno()):
            self._events.register(descriptor, select.POLLIN)

    def readinto(self, buffer: memoryview) -> int:
        """Read what is there, once something is. Raises TimeoutError or _Interrupted."""
        ready = dict(self._events.poll(max(0.0, self._deadline - time.monotonic()) * 1000))
        if not ready:
            raise TimeoutError
        if self._reader not in ready:
            raise _Interrupted
        return os.readv(self._reader, [buffer])


def _end(child: int, deadline: float) -> tuple[int | None, float]:
    """Let a child end by itself until the deadline, then end it, and what it has started.

    Returns the signal that ended the child, if one did, and its seconds of CPU.
    """
    while is_running := os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)  # its number is its own until `wait4`
    with suppress(ProcessLookupError):  # it has ended before it led a group
        os.killpg(child, signal.SIGKILL)
    _, ended, used = os.wait4(child, 0)
    status = os.waitstatus_to_exitcode(ended)
    number = -status if status < 0 else None
    return signal.SIGALRM if is_running else number, used.ru_utime + used.ru_stime


def _run(
    compute: Callable[[Any], dict[str, Any]], question: Packed, writer: int, parent: int, limits: Limits
) -> NoReturn:
    """Write what `compute` returns, in the child."""
    status = 1
    try:
        _limit(parent, writer, limits)
        answer = pack(compute(unpack(question)))
        with os.fdopen(_PIPE, "wb", buffering=0) as pipe:
            write_packed(pipe, answer)
        status = 0
    except MemoryError:
        signal.raise_signal(signal.SIGABRT)
    finally:
        os._exit(status)


def _limit(parent: int, writer: int, limits: Limits) -> None:
    os.setsid()
    LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
    with open("/proc/self/statm") as file:
        memory = int(file.read().split()[0]) * resource.getpagesize() + limits.memory_bytes
    nowhere = os.open(os.devnull, os.O_RDWR)  # for stderr too: a library's warnings may quote what a client sent
    os.dup2(writer, _PIPE)
    for standard in range(_PIPE):
        os.dup2(nowhere, standard)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > _PIPE:
            with suppress(OSError):  # the descriptor of the list itself
                os.close(int(name))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if limits.stack_bytes is not None:
        resource.setrlimit(resource.RLIMIT_STACK, (limits.stack_bytes, limits.stack_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # where system calls cannot be filtered
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)
    if can_filter():
        refuse_system_calls()
