"""Processes with the code of two checkouts, which take turns: so a disturbance of the machine meets both."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any


class Checkout:
    """A process that answers questions with the code of one checkout."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def ask(self, question: Any) -> Any:
        """Send one question, and return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with status {self.process.wait()}")
        return json.loads(line)


@contextmanager
def started(checkout: Path, command: list[str]) -> Iterator[Checkout]:
    """Start Python with the arguments `command` and the package of `checkout`, and end it afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "crossdock").symlink_to(checkout.resolve(), target_is_directory=True)
        environment = os.environ | {"PYTHONPATH": folder, "OMP_WAIT_POLICY": "PASSIVE"}
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=folder,
            text=True,
        )
        try:
            yield Checkout(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answering(checkout: Path, script: Path, function: str) -> AbstractContextManager[Checkout]:
    """Start a process of `checkout` that calls a function of its `script` with each list that it is asked."""
    return started(checkout, [__file__, str(script), function])


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, and whether files differ from it; the folder's name where git knows none."""
    asked = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=7", "--exclude", "*"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or checkout.name


def _answer(script: Path, function: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    sys.path.insert(0, str(script.parent))
    called = getattr(importlib.import_module(script.stem), function)
    for line in sys.stdin:
        print(json.dumps(called(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    _answer(Path(sys.argv[1]), sys.argv[2])
