"""A real Ray cluster that a test does not own alone: `ray start --head` in processes of its own, and another team."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests import limits
from tests.cluster.ports import free_port
from tests.cluster.watch.terminal import COMMAND
from tests.waiting import eventually

RAY = Path(sys.executable).with_name("ray")
PATIENT_RAY = Path(__file__).with_name("patient_ray.py")
GREETING = "hello of team B"
NUM_STARTS = 3
ASK_S = 0.2  # between two questions to the other team's application. With 0.05 they took a fifth of a busy core
START_S = 240.0  # of one start, which takes 50 s beside ten busy processes on two slow cores


@dataclass
class OtherTeam:
    """The application of others: asked all the time. `wrong`: the answers that were not its own."""

    url: str
    driver: subprocess.Popen[str]
    wrong: list[str] = field(default_factory=list)
    num_answers: int = 0
    _end: threading.Event = field(default_factory=threading.Event)

    def call(self, *line: str) -> Any:
        """Have the other team's driver call one of its functions, see other_driver.py."""
        assert self.driver.stdin is not None
        assert self.driver.stdout is not None
        self.driver.stdin.write(json.dumps(line) + "\n")
        self.driver.stdin.flush()
        for answer in self.driver.stdout:
            if answer.startswith("answer: "):
                return json.loads(answer.removeprefix("answer: "))
        raise AssertionError("the other team's driver has ended")

    def answers(self) -> bool:
        """Return whether the application has answered rightly ever since, and does so now."""
        before = self.num_answers
        eventually(lambda: self.num_answers > before + 1 or self.wrong, "the other team's application does not answer")
        return not self.wrong

    @contextmanager
    def asked(self) -> Iterator[None]:
        asking = threading.Thread(target=self._ask)
        asking.start()
        try:
            yield
        finally:
            self._end.set()
            asking.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=240) as client:
            while not self._end.wait(ASK_S):
                try:
                    text = client.get(self.url, timeout=240).text
                except httpx.HTTPError as error:
                    text = repr(error)
                self.num_answers += 1
                if text != GREETING:
                    self.wrong.append(text)


@dataclass
class JoinedCluster:
    """A cluster, the environment that joins it, and the port of its Serve's proxies."""

    environment: dict[str, str]
    port: int
    dashboard: str
    team: OtherTeam

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, log: Path, *args: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start `crossdock serve` with an emulated device."""
        command = [COMMAND, "serve", "--device", "emulated:h100-8b", *args]
        with log.open("w") as output:
            return subprocess.Popen(
                command, env=self.environment | environment, stdout=output, stderr=subprocess.STDOUT, cwd="/"
            )

    def run(self, *command: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end. Return its status, and both its outputs as `stdout`."""
        return subprocess.run(
            command,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
            cwd="/",
        )


@contextmanager
def joined_cluster() -> Iterator[JoinedCluster]:
    """Start a cluster that asks for a token, with the application of another team at /teamB."""
    folder = tempfile.mkdtemp(prefix="cd-ray-", dir="/tmp")  # short: paths of Ray's sockets end at 107 bytes
    limits.FOLDERS.append(folder)
    token = Path(folder, "token")
    token.write_text(secrets.token_hex(32))
    environment = {
        **os.environ,
        "PATH": f"{RAY.parent}:{os.environ['PATH']}",
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{START_S:.0f}",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # "no": all ports on loopback
    }
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        head, ports = _head(environment, Path(folder, "head.log"))
        stack.callback(_end, head, folder)
        joining = environment | {"RAY_ADDRESS": f"127.0.0.1:{ports['port']}"}
        port = free_port()
        driver = stack.enter_context(
            subprocess.Popen(
                [sys.executable, Path(__file__).with_name("other_driver.py"), str(port)],
                env=joining,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert driver.stdin is not None
        stack.callback(driver.stdin.close)  # its end
        team = OtherTeam(f"http://127.0.0.1:{port}/teamB", driver)
        team.call("deploy", "teamB", "/teamB", GREETING)
        stack.enter_context(team.asked())
        yield JoinedCluster(joining, port, f"http://127.0.0.1:{ports['dashboard-port']}", team)


def _head(environment: dict[str, str], log: Path) -> tuple[subprocess.Popen[bytes], dict[str, int]]:
    """Start a cluster's head. Return its process, and its ports by the names of their flags.

    A client may have taken a port meanwhile, which is not what a test looks for: a start that ended, or that does not
    end, is tried again, on other ports.
    """
    said = []
    for _ in range(NUM_STARTS):
        ports = {name: free_port() for name in ("port", "dashboard-port", "dashboard-agent-listen-port")}
        head = _start(environment, log, ports)
        with contextlib.suppress(AssertionError):
            eventually(partial(_has_started, head, log), seconds=START_S)
            if head.poll() is None:
                return head, ports
        said.append(_said(log))
        _end(head, log.parent)
    raise AssertionError(f"Ray did not start in {NUM_STARTS} tries:\n" + "\n\n".join(said))


def _start(environment: dict[str, str], log: Path, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    """Start a head."""
    flags = [f"--{name}={port}" for name, port in ports.items()]
    flags += ["--min-worker-port=0", "--max-worker-port=0", "--node-ip-address=127.0.0.1"]
    flags += ["--num-cpus=16", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
    with log.open("w") as output:
        command = [sys.executable, PATIENT_RAY, "start", "--head", *flags]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def _has_started(head: subprocess.Popen[bytes], log: Path) -> bool:
    """Return whether a head says that it runs, or has ended."""
    return "Ray runtime started" in log.read_text() or head.poll() is not None


def _said(log: Path) -> str:
    """Return the words of a head, and the newest lines of its processes' logs."""
    files = {log, *log.parent.glob("ray/session_latest/logs/*.*")}
    return "\n".join(
        f"{file.name}: {file.read_text(errors='replace')[-500:]}" for file in sorted(files) if file.is_file()
    )


def _end(head: subprocess.Popen[bytes], folder: str | Path) -> None:
    """Kill all processes of a cluster: those below its head, and those that a head which has ended left.

    Asked to end, they take half a minute.
    """
    family = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended since it was listed
            if process.pid == head.pid or any(str(folder) in part for part in process.cmdline()):
                family += [process, *process.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    head.wait()
    assert not psutil.wait_procs(family, timeout=240)[1], "processes of Ray outlived it"


def shown(log: Path, process: subprocess.Popen[bytes]) -> Callable[[], bool]:
    """Return a condition: `crossdock serve` has said where it serves. AssertionError: it has ended before."""

    def holds() -> bool:
        assert process.poll() is None, log.read_text()
        return "Dashboard: " in log.read_text()

    return holds
