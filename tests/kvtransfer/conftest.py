"""Docks in processes of their own, to be stopped, continued and killed."""

import importlib.util
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TRANSPORTS = ["tcp", "nixl tcp", "nixl tcp,cma"]
DEFAULTS: dict[str, Any] = {
    "role": "dock",
    "model": "m@1",
    "layer": (4, 16, 16),
    "num_layers": 8,
    "page_size": 16,
    "num_pages": 64,
    "tp": 1,
    "pp": 1,
    "rank": 0,
    "grace_seconds": 0.2,
    "max_write_bytes": 1 << 20,
    "delayed": False,
}


class DockProcess:
    """A dock elsewhere. `ask` calls it and returns the answer; `event` waits for the next event of a kind."""

    def __init__(self, transport: str, **config: Any) -> None:
        argument = json.dumps({**DEFAULTS, **config, "transport": transport})
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("dock_process.py")), argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.events: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._blob: str | None = None

    @property
    def blob(self) -> str:
        """Waits until the process is there, so that several may start at once."""
        if self._blob is None:
            self._blob = self.answers.get(timeout=30)["answer"]
        return self._blob

    def ask(self, command: str, **arguments: Any) -> Any:
        answer = self.answer(command, **arguments)
        assert "incompatible" not in answer, answer["incompatible"]
        return answer["answer"]

    def answer(self, command: str, **arguments: Any) -> dict[str, Any]:
        assert self.blob
        assert self.process.stdin
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        return self.answers.get(timeout=20)

    def event(self, kind: str, request: str, epoch: int = 1, timeout: float = 15.0) -> dict[str, Any]:
        """The first event of this kind about this epoch of the request, now or later; it is then forgotten."""
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                for event in self.events:
                    if (event["event"], event["request"], event["epoch"]) == (kind, request, epoch):
                        self.events.remove(event)
                        return event
                left = deadline - time.monotonic()
                assert left > 0, f"no {kind} of {request}/{epoch} in {timeout} s, but {self.events}"
                self._news.wait(left)

    def has(self, kind: str, request: str, epoch: int = 1) -> bool:
        with self._news:
            return any((e["event"], e["request"], e["epoch"]) == (kind, request, epoch) for e in self.events)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Ends the process in the way it ends itself, or by force if that takes long."""
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.close()
            self.process.wait(timeout=10)
        except BrokenPipeError:
            pass
        finally:
            self.kill()
            self._reader.join()
            self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            news = json.loads(line)
            if "event" in news:
                with self._news:
                    self.events.append(news)
                    self._news.notify_all()
            else:
                self.answers.put(news)


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    if kind != "tcp" and importlib.util.find_spec("nixl") is None:
        pytest.skip("the nixl extra is not installed")
    return kind


@pytest.fixture
def start(transport: str) -> Iterator[Callable[..., DockProcess]]:
    """Starts docks that live as long as the test."""
    yield from _starter(transport)


@pytest.fixture(scope="module")
def pair(transport: str) -> Iterator[tuple[DockProcess, DockProcess]]:
    """A source and a target that the harmless tests of a module share."""
    starter = _starter(transport)
    new = next(starter)
    source, target = new(role="prefill"), new(role="decode")
    yield source, target
    for dock in (source, target):
        assert dock.ask("counts")["num_open"] == 0, "a test left a transfer open"
        assert dock.ask("counts")["num_malformed"] == 0
    starter.close()


def _starter(transport: str) -> Iterator[Callable[..., DockProcess]]:
    docks: list[DockProcess] = []

    def new(**config: Any) -> DockProcess:
        docks.append(DockProcess(transport, **config))
        return docks[-1]

    try:
        yield new
    finally:
        for dock in docks:
            dock.close()
