"""The sandbox's own side: computes each answer in a fork that has only so much time, memory and stack.

A question of a few kilobytes can take gigabytes and minutes, overflow a stack, or use a fault of a library written in
C. None of these can be stopped in a thread. A sandbox has no thread but its own, so that each child is a quick fork.
"""

import ctypes
import os
import resource
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from crossdock.workers.sandbox.messages import pack, read_message, unpack

_NICE = 5  # the engine's steps come first where cores are few
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one child."""

    cpu_seconds: float
    wall_seconds: float  # on a busy machine
    memory_bytes: int  # beside the memory of the sandbox
    stack_bytes: int | None = None
    opens_files: bool = True  # False: neither files nor sockets, beside those that are open


class ChildFailed(RuntimeError):
    """A child that was ended by its limits, by a fault or by an exception, without an answer."""

    def __init__(self, number: int | None) -> None:
        """`number`: the signal that ended the child. None: an exception did."""
        super().__init__(f"the child ended with signal {number}")
        self.is_too_slow = number in (signal.SIGPROF, signal.SIGALRM)
        self.is_too_large = number == signal.SIGABRT
        self.is_too_deep = number == signal.SIGSEGV


def sandbox_main(serve: Callable[[BinaryIO, BinaryIO], None]) -> None:
    """Let `serve` read messages from stdin and write answers to stdout, until stdin ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # limits end children by signals that would dump them
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the whole terminal; the caller decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    with suppress(BrokenPipeError):  # the caller has ended
        # Without a buffer: `select` must see a message that comes right behind a question.
        serve(os.fdopen(0, "rb", buffering=0, closefd=False), answers)


def run_limited(compute: Callable[[], dict[str, Any]], requests: BinaryIO, limits: Limits) -> dict[str, Any]:
    """Run `compute` in a child. Returns its result, or `is_busy` (only the machine was too slow), or `is_interrupted`.

    Args:
        compute: returns what msgpack can pack.
        requests: the caller's messages, without a buffer. During the wait only an interrupt or the end of the stream
            can come: both end the child.
        limits: of the child.

    Raises:
        ChildFailed: the child ended without an answer.
    """
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(reader)
        _run(compute, writer, parent, limits)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        ready, _, _ = select.select([answer, requests], [], [])
        is_interrupted = False
        if answer not in ready:
            os.kill(child, signal.SIGKILL)
            is_interrupted = read_message(requests) is not None
        said = answer.read()
    _, ended, used = os.wait4(child, 0)
    status = os.waitstatus_to_exitcode(ended)
    if said and status == 0:
        found: dict[str, Any] = unpack(said)
        return found
    if is_interrupted:
        return {"is_interrupted": True}
    if status == -signal.SIGALRM and used.ru_utime + used.ru_stime < limits.cpu_seconds / 2:
        return {"is_busy": True}
    raise ChildFailed(-status if status < 0 else None)


def memory_pages() -> tuple[int, int]:
    """Return the pages of this process: all, and those in memory."""
    with open("/proc/self/statm") as file:
        size, resident = file.read().split()[:2]
    return int(size), int(resident)


def _run(compute: Callable[[], dict[str, Any]], writer: int, parent: int, limits: Limits) -> NoReturn:
    """Write what `compute` returns, in the child."""
    status = 1
    try:
        _limit(parent, limits)
        said = pack(compute())
        with os.fdopen(writer, "wb") as answer:
            answer.write(said)
        status = 0
    except MemoryError:
        signal.raise_signal(signal.SIGABRT)
    finally:
        os._exit(status)


def _limit(parent: int, limits: Limits) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library's warnings may quote what a client sent
    memory = memory_pages()[0] * resource.getpagesize() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if limits.stack_bytes is not None:
        resource.setrlimit(resource.RLIMIT_STACK, (limits.stack_bytes, limits.stack_bytes))
    if not limits.opens_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)
