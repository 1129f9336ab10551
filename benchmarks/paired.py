"""Processes with the code of two checkouts, which take turns: so a disturbance of the machine meets both."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from tables import cell, markdown


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
def answering(checkout: Path, script: Path, function: str) -> Iterator[Checkout]:
    """Start a process with the package of `checkout` that calls a function of `script` with each list that it is asked.

    The process ends afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "crossdock").symlink_to(checkout.resolve(), target_is_directory=True)
        environment = os.environ | {"PYTHONPATH": folder, "OMP_WAIT_POLICY": "PASSIVE"}
        process = subprocess.Popen(
            [sys.executable, __file__, str(script.resolve()), function],
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


def in_rounds(
    sides: Sequence[Checkout], rounds: int, questions: Mapping[str, Callable[[Checkout, int], float]]
) -> dict[str, list[list[float]]]:
    """Return the figures of each question by round and side. A question asks a checkout, in a round of this number.

    In every round each question is answered by one after the other, and the next round begins with another one.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in questions}
    for number in range(rounds + 1):
        for name, ask in questions.items():
            figures = [0.0] * len(sides)
            for turn in range(len(sides)):
                side = (turn + number) % len(sides)
                figures[side] = ask(sides[side], number)
            if number:  # the first round has first calls
                found[name].append(figures)
        print(f"round {number} of {rounds}; load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return found


def report(found: Mapping[str, list[list[float]]], names: Sequence[str], unit: str) -> str:
    """Return a table: the medians of each side, and the medians of the ratio to the first side."""
    heads = [f"{name} / {names[0]}" for name in names[1:]]
    lines = [["", *(f"{name}, {unit}" for name in names), *heads]]
    others = range(1, len(names))
    for question, rounds in found.items():
        middles = [median(figures) for figures in zip(*rounds, strict=True)]
        ratios = [median(figures[side] / figures[0] for figures in rounds) for side in others]
        lines.append([question, *map(cell, middles), *(f"{ratio:.3f}" for ratio in ratios)])
    every = [geometric_mean([each[side] / each[0] for rounds in found.values() for each in rounds]) for side in others]
    lines.append(["all (geometric mean)", *("" for _ in names), *(f"{ratio:.3f}" for ratio in every)])
    return markdown(lines)


def _answer(script: Path, function: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    sys.path.insert(0, str(script.parent))
    called = getattr(importlib.import_module(script.stem), function)
    for line in sys.stdin:
        print(json.dumps(called(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    _answer(Path(sys.argv[1]), sys.argv[2])
