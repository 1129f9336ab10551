"""A sandbox for tests: does what each question names, in a child with limits."""

import os
import signal
import struct
import time
from typing import Any, BinaryIO

from crossdock.workers.sandbox.limited_child import ChildFailed, Limits, run_limited, sandbox_main
from crossdock.workers.sandbox.messages import questions, read_message, unpack, write_message, write_packed


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    settings = read_message(requests)
    if settings is None:
        return
    if settings.get("is_slow_to_start"):
        time.sleep(600)
    write_message(answers, {"pid": os.getpid()})
    limits = Limits(**settings["limits"])
    for question in questions(requests):
        asked = unpack(question)
        if asked.get("what") == "end the process":
            return
        if asked.get("what") == "stop the process":
            os.kill(os.getpid(), signal.SIGSTOP)
        if asked.get("what") == "write no message":
            answers.write(struct.pack("<Q", 1) + b"\xc1")  # a byte that msgpack never writes
            answers.flush()
            continue
        try:
            write_packed(answers, run_limited(do, question, requests, limits))
        except ChildFailed as failed:
            flags = ("is_too_slow", "is_too_large", "is_too_deep")
            write_message(answers, {"failed": [flag for flag in flags if getattr(failed, flag)]})


def do(asked: dict[str, Any]) -> dict[str, Any]:
    match asked["what"]:
        case "echo":
            return {"echo": asked["text"], "pid": os.getpid()}
        case "run for ever":
            while True:
                pass
        case "wait for ever":
            time.sleep(600)
        case "fill the memory":
            return {"bytes": len(bytearray(1 << 30))}
        case "overflow the stack":
            signal.raise_signal(signal.SIGSEGV)
        case "raise":
            raise KeyError("secret")
    raise AssertionError(asked)


if __name__ == "__main__":
    sandbox_main(serve)
