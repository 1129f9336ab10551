"""A process of pictures, videos or grammars whose library is taken over: a child tries what its question names."""

import ctypes
import errno
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from crossdock.cluster.api.media import picture_process, preparation
from crossdock.cluster.api.media.decoding import BadPicture
from crossdock.workers.model.grammar import vetting
from crossdock.workers.sandbox import limited_child
from crossdock.workers.schedule.request.submission import InvalidField

MARK = "taken over:"
_LIBC = ctypes.CDLL(None, use_errno=True)


def system_call(number: int, *arguments: int) -> int:
    """Make a call by its number on x86_64, as foreign code would."""
    found: int = _LIBC.syscall(number, *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return found


def fork_and_hold_the_pipe() -> None:
    """Leave a process behind that has the pipe of the answer, and give none."""
    if os.fork():
        os._exit(0)
    time.sleep(600)


def descriptors() -> list[str]:
    """Follow each descriptor of this process; name its end."""
    found = []
    for number in range(256):
        try:
            os.lseek(number, 0, os.SEEK_CUR)
            found.append(f"{number}: file" if os.read(number, 1) else "null")
        except OSError as error:
            if error.errno != errno.EBADF:
                found.append("pipe" if error.errno == errno.ESPIPE else str(error))
    return found


def compute_in_a_thread() -> str:
    """Compute in a thread, which decoders of videos do."""
    thread = threading.Thread(target=sum, args=(range(1000),))
    thread.start()
    thread.join()
    return "done"


ATTACKS: dict[str, Callable[[], Any]] = {
    "environment": lambda: sorted(os.environ),
    "descriptors": descriptors,
    "thread": compute_in_a_thread,
    "file": lambda: os.open("/etc/passwd", os.O_RDONLY),
    "socket": lambda: socket.socket(socket.AF_INET),
    "local socket": lambda: socket.socketpair(),
    "fork": os.fork,
    "other program": lambda: os.execv("/bin/true", ["true"]),
    "new folder": lambda: os.mkdir("/tmp/made-by-a-taken-over-child"),
    "rights of a file": lambda: os.chmod("/tmp", 0o1777),
    "signal of the sandbox": lambda: os.kill(1, 0),
    "higher limits": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    "no more timers": lambda: signal.setitimer(signal.ITIMER_REAL, 0),
    "deaf to timers": lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
    "memory of others": lambda: system_call(310, 1, 0, 0, 0, 0, 0),
    "debugger": lambda: system_call(101, 16, 1, 0, 0),
    "shared memory": lambda: system_call(29, 0, 4096, 0o1600),
    "ring of calls": lambda: system_call(425, 8, 0),
    "call of another width": lambda: system_call(0x40000000 | 39),
    "process by flags": lambda: system_call(56, signal.SIGCHLD, 0, 0, 0, 0),
    "process by struct": lambda: system_call(435, 0, 0),
    "fork and hold the pipe": fork_and_hold_the_pipe,
}


def attack(asked: str) -> str:
    """Try it. Returns the result, or the name of the error."""
    name = asked.removeprefix(MARK)
    if name not in ATTACKS:
        return name
    try:
        return str(ATTACKS[name]())
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    except ValueError as error:  # `setrlimit` that is not permitted
        return str(error)


def take_over(module: Any, name: str, text_of: Callable[[Any], str], error: Callable[[str], Exception]) -> None:
    """Replace a function of a module for questions that begin with `MARK`."""
    honest = getattr(module, name)

    def hostile(*arguments: Any, **options: Any) -> Any:
        if (text := text_of(arguments)).startswith(MARK):
            raise error(attack(text))
        return honest(*arguments, **options)

    setattr(module, name, hostile)


if __name__ == "__main__":
    os.environ.pop("UNFILTERED", None) and setattr(limited_child, "can_filter", lambda: False)
    if os.environ.pop("KIND") == "grammar":
        take_over(vetting, "new_matcher", lambda given: given[1].source, lambda text: InvalidField(text, "grammar"))
        limited_child.sandbox_main(vetting.serve)
    else:
        sys.modules["torch"] = None  # type: ignore[assignment]
        for name in ("decode", "read_clip"):
            take_over(preparation, name, lambda given: given[0].decode("latin-1"), BadPicture)
        limited_child.sandbox_main(picture_process.serve)
