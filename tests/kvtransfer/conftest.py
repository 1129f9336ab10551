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
        self.news = threading.Condition()
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
        self.process.stdin.write(json.dumps([command, arguments], default=list) + "\n")
        return self.answers.get(timeout=20)

    def event(self, kind: str, request: str, epoch: int = 1, timeout: float = 15.0) -> dict[str, Any]:
        """The first event of this kind about this epoch of the request, now or later; it is then forgotten."""
        deadline = time.monotonic() + timeout
        with self.news:
            while True:
                for event in self.events:
                    if (event["event"], event["request"], event["epoch"]) == (kind, request, epoch):
                        self.events.remove(event)
                        return event
                left = deadline - time.monotonic()
                assert left > 0, f"no {kind} of {request}/{epoch} in {timeout} s, but {self.events}"
                self.news.wait(left)

    def has(self, kind: str, request: str, epoch: int = 1) -> bool:
        with self.news:
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
                with self.news:
                    self.events.append(news)
                    self.news.notify_all()
            else:
                self.answers.put(news)


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    if kind != "tcp" and importlib.util.find_spec("nixl") is None:
        pytest.skip("the nixl extra is not installed")
    return kind


@pytest.fixture(scope="module")
def harbour(transport: str) -> Iterator["Harbour"]:
    harbour = Harbour(transport)
    yield harbour
    harbour.close()


@pytest.fixture
def start(harbour: "Harbour") -> Iterator[Callable[..., DockProcess]]:
    """Gives docks for the length of a test: `start(role="prefill")`."""
    yield harbour.start
    harbour.clear()


class Harbour:
    """Docks of the module's transport. Those that a test left alive and idle serve the next one: a start takes a
    second of the two cores, and a dock should not mind what happened to others before."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.used: list[tuple[str, DockProcess]] = []
        self.idle: dict[str, list[DockProcess]] = {}

    def start(self, **config: Any) -> DockProcess:
        key = repr(sorted(config.items()))
        idle = self.idle.get(key)
        dock = idle.pop() if idle else DockProcess(self.transport, **config)
        self.used.append((key, dock))
        return dock

    def clear(self) -> None:
        used, self.used = self.used, []
        for key, dock in used:
            if dock.process.poll() is not None or "delayed" in key:
                dock.close()
                continue
            self.idle.setdefault(key, []).append(dock)
            assert dock.ask("drain", timeout=2), f"a transfer is open still: {dock.ask('counts')}"
            assert dock.ask("counts")["num_open_writes"] == 0
            assert dock.ask("counts")["num_malformed"] == 0
            dock.ask("zero")
            dock.events.clear()

    def close(self) -> None:
        for _, dock in self.used:
            dock.close()
        for docks in self.idle.values():
            for dock in docks:
                dock.close()
