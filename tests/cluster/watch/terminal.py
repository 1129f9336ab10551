"""The `crossdock` command as a person meets it: keys in, screen out."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

COMMAND = Path(sys.executable).with_name("crossdock")


class Pty:
    """A `crossdock` command at a terminal of its own."""

    def __init__(self, *args: str, lines: int = 20) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [COMMAND, *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": str(lines)},
            preexec_fn=_own_terminal,
        )
        os.close(slave)
        self._seen = ""

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str) -> None:
        """Waits for `text` after what was expected before."""
        deadline = time.monotonic() + 20
        while text not in self._seen:
            ready, _, _ = select.select([self._master], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {text!r} in {self._seen!r}"
            piece = os.read(self._master, 65536).decode(errors="replace")
            self._seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", piece)
        self._seen = self._seen.split(text, 1)[1]

    def close(self) -> int:
        code = self.process.wait(timeout=20)
        os.close(self._master)
        return code


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that ^C typed here is a SIGINT there
