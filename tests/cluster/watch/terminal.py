"""The `crossdock` command: in this process, at a terminal of its own (keys in, screen out), or as a background job."""

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from crossdock.cluster import cli

COMMAND = Path(sys.executable).with_name("crossdock")


def run(*args: str, **environment: str) -> Any:
    """Run a command in this process. Return its exit code and its output."""
    return CliRunner().invoke(cli.app, list(args), env={"COLUMNS": "160", **environment})


class Pty:
    """A `crossdock` command at a terminal of its own. `program`: what runs in place of the installed command.

    Without `gets_hangup` the end of the terminal sends no SIGHUP, as to a job that a shell has disowned.
    """

    def __init__(
        self, *args: str, lines: int = 20, program: Sequence[str | Path] = (COMMAND,), gets_hangup: bool = True
    ) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*program, *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": str(lines)},
            preexec_fn=_own_terminal if gets_hangup else None,
        )
        os.close(slave)
        self._seen = ""
        self.output = ""  # all of it, with its styles

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str) -> None:
        """Wait until `text` appears after the text that was expected before."""
        deadline = time.monotonic() + 240
        while text not in self._seen:
            ready, _, _ = select.select([self._master], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {text!r} in {self._seen!r}"
            piece = os.read(self._master, 65536).decode(errors="replace")
            self.output += piece
            self._seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", piece)
        self._seen = self._seen.split(text, 1)[1]

    def echoes(self) -> bool:
        """Return whether the terminal shows what is typed, as a shell needs it."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def close(self) -> int:
        """Return the exit status, once the command has ended."""
        code = self.process.wait(timeout=240)
        os.close(self._master)
        return code

    def vanish(self) -> int:
        """Close the terminal under the running command, and return the exit status."""
        os.close(self._master)
        return self.process.wait(timeout=240)


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # a ^C typed here becomes a SIGINT there
    # A test run that is a background job has SIGINT ignored, which its children inherit. At a terminal it never is.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def background_job(*args: str, **options: Any) -> subprocess.Popen[str]:
    """Start a command as a script's `crossdock … &` does: with SIGINT ignored. `options`: those of Popen."""
    ignoring = ["sh", "-c", 'trap "" INT; exec "$0" "$@"']
    return subprocess.Popen([*ignoring, COMMAND, *args], text=True, **options)
