"""Docks in their own processes, which tests stop, continue and kill."""

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

import msgspec
import pytest

from crossdock.kvtransfer.calls import DockCall
from tests.sweeps import rest_in_soak
from tests.waiting import PATIENCE_S

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
    """A dock in another process. `ask` calls it and returns the answer; `event` waits for an event."""

    def __init__(self, transport: str, **config: Any) -> None:
        argument = json.dumps({**DEFAULTS, **config, "transport": transport})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kvtransfer.dock_process", argument],
            cwd=Path(__file__).parents[2],
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
        self._blob: bytes | None = None

    @property
    def blob(self) -> bytes:
        """The dock's blob. Waits until the process has started, so that several may start at once."""
        if self._blob is None:
            self._blob = bytes.fromhex(self.answers.get(timeout=240)["answer"])
        return self._blob

    def ask(self, command: str, **arguments: Any) -> Any:
        assert self.blob
        assert self.process.stdin
        self.process.stdin.write(json.dumps([command, arguments], default=list) + "\n")
        return self.answers.get(timeout=240)["answer"]

    def call(self, call: DockCall) -> None:
        self.ask("call", **msgspec.to_builtins(call))

    def event(self, kind: str, request: str, epoch: int = 1, timeout: float = PATIENCE_S) -> dict[str, Any]:
        """Remove and return the first event of this kind about this epoch of the request. Waits for it."""
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
        """End the process by closing its input, or by force if that takes long."""
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.close()
            self.process.wait(timeout=240)
        except BrokenPipeError:
            pass
        finally:
            self.kill()
            self._reader.join()
            self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            message = json.loads(line)
            if "event" in message:
                with self.news:
                    self.events.append(message)
                    self.news.notify_all()
            else:
                self.answers.put(message)


@pytest.fixture(scope="module", params=rest_in_soak(TRANSPORTS, "tcp", "nixl tcp"))
def transport(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    if kind != "tcp" and importlib.util.find_spec("nixl") is None:
        pytest.skip("needs NIXL: pip install nixl")
    return kind


@pytest.fixture(scope="module")
def docks(transport: str) -> Iterator["DockProcesses"]:
    processes = DockProcesses(transport)
    yield processes
    processes.close()


@pytest.fixture
def start(docks: "DockProcesses") -> Iterator[Callable[..., DockProcess]]:
    """Return a function that starts docks for one test: `start(role="prefill")`."""
    yield docks.start
    docks.clear()


class DockProcesses:
    """Docks of the module's transport. A dock that a test left alive and idle serves the next test: a start takes a
    second of two cores, and earlier transfers must not affect a dock."""

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
            assert dock.ask("drain", timeout=240), f"a transfer is still open: {dock.ask('counts')}"
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
