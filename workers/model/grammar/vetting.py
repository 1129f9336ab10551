"""The vetting process: compiles each grammar in a child of its own, within limits of time, memory and stack.

Run as `python -m` by `Vetter`. It reads frames from stdin, first the tokenizer, then grammars, and writes one answer
for each to stdout. It ends when stdin does.

A grammar of a few kilobytes can make llguidance overflow the stack, or take minutes and gigabytes. Neither can be
stopped in a thread. This process has no thread but its own and imports little, so that each child is a quick fork.
"""

import ctypes
import json
import os
import random
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLTokenizer

from crossdock.workers.model.grammar.matcher import check, invalid, new_matcher, text_tokens
from crossdock.workers.schedule.request import Grammar, InvalidField

CPU_SECONDS = 1.0  # of one compile and a few steps; the largest useful grammars take 0.3 s
WALL_SECONDS = 4.0  # on a busy machine
MEMORY_BYTES = 512 << 20
STACK_BYTES = 1 << 20  # an eighth of a thread's stack, so that the replica's own threads never overflow theirs

_NICE = 5  # the engine's steps come first where cores are few; a start of this process alone takes half a second
_STEPS = 8  # of a random text: some grammars fail after their first token
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_REASONS = {
    signal.SIGPROF: "it takes too long to compile",
    signal.SIGALRM: "it takes too long to compile",
    signal.SIGSEGV: "its rules are nested or chained too deeply",
    signal.SIGABRT: f"it needs more than {MEMORY_BYTES >> 20} MiB to compile",
}


def write_frame(stream: BinaryIO, message: Any) -> None:
    """Write one message: its length in four bytes, then JSON."""
    body = json.dumps(message).encode()
    stream.write(struct.pack("<I", len(body)) + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> Any | None:
    """Return the next message; None at the end of the stream."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    body = stream.read(struct.unpack("<I", header)[0])
    return json.loads(body) if body else None


def serve(requests: BinaryIO, verdicts: BinaryIO) -> None:
    """Vet one grammar after the other until `requests` ends."""
    start = read_frame(requests)
    if start is None:
        return
    tokenizer = LLTokenizer(start["tokenizer"], eos_token=start["eos_token_ids"])
    write_frame(verdicts, {"is_ready": True})
    while (asked := read_frame(requests)) is not None:
        grammar = Grammar(asked["kind"], asked["source"])
        write_frame(verdicts, _verdict(requests, tokenizer, grammar))


def _verdict(requests: BinaryIO, tokenizer: LLTokenizer, grammar: Grammar) -> dict[str, Any]:
    """Vet a grammar in a child. Returns `bytes`, or `error`, or `is_busy` where only the machine was too slow."""
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(reader)
        _run(lambda: _vet(tokenizer, grammar), writer, parent)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        ready, _, _ = select.select([answer, requests], [], [])
        if answer not in ready:  # the replica has ended: it asks nothing while it waits
            os.kill(child, signal.SIGKILL)
        said = answer.read()
    _, ended, used = os.wait4(child, 0)
    status = os.waitstatus_to_exitcode(ended)
    if said and status == 0:
        verdict: dict[str, Any] = json.loads(said)
        return verdict
    if status == -signal.SIGALRM and used.ru_utime + used.ru_stime < CPU_SECONDS / 2:
        return {"is_busy": True}
    reason = _REASONS.get(signal.Signals(-status)) if status < 0 else None
    return {"error": str(invalid(grammar, reason or "it cannot be compiled within this server's limits"))}


def _run(vet: Callable[[], dict[str, Any]], writer: int, parent: int) -> None:
    """Write what `vet` returns, in a child that has only the limits' time, memory and stack. Does not return."""
    status = 1
    try:
        _limit(parent)
        verdict = json.dumps(vet()).encode()
        with os.fdopen(writer, "wb") as answer:
            answer.write(verdict)
        status = 0
    except MemoryError:
        signal.raise_signal(signal.SIGABRT)
    finally:
        os._exit(status)


def _limit(parent: int) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic would write a part of the grammar into the replica's log
    memory = _pages()[0] * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, STACK_BYTES))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)


def _vet(tokenizer: LLTokenizer, grammar: Grammar) -> dict[str, Any]:
    before = _pages()[1]
    try:
        matcher = new_matcher(tokenizer, grammar)
        _follow(matcher, tokenizer, grammar)
    except InvalidField as error:
        return {"error": str(error)}
    return {"bytes": (_pages()[1] - before) * resource.getpagesize()}


def _follow(matcher: LLMatcher, tokenizer: LLTokenizer, grammar: Grammar) -> None:
    """Let a short random text follow the grammar. InvalidField where the matcher fails on the way."""
    draw = random.Random(0)
    for _ in range(_STEPS):
        allowed = text_tokens(matcher.compute_bitmask(), tokenizer)
        check(matcher, grammar)
        if not allowed or matcher.is_stopped():
            return
        start = draw.randrange(allowed.bit_length())
        rest = allowed >> start
        matcher.consume_token(start + (rest & -rest).bit_length() - 1)  # the first allowed token from there on
        check(matcher, grammar)


def _pages() -> tuple[int, int]:
    """Return the pages of this process: all, and those in memory."""
    with open("/proc/self/statm") as file:
        size, resident = file.read().split()[:2]
    return int(size), int(resident)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # limits end children by signals that would dump them
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the whole terminal; the replica decides
    verdicts = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no verdict
    with suppress(BrokenPipeError):  # the replica has ended
        serve(sys.stdin.buffer, verdicts)
