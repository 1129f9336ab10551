"""A server under test: start it in a process of its own, wait until it answers, count what it uses, end all of it."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
from tables import add_output_options

ROOT = Path(__file__).resolve().parents[1]
MARK = "CROSSDOCK_PEER_RUN"  # environment variable that all processes of a server inherit
_ENDING = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers."""

    address: str
    processes: set[int]  # ids, as found when it was ready
    start_s: float  # seconds until it answered
    processes_now: Callable[[], set[int]]


def add_server_options(parser: argparse.ArgumentParser, name: str, port: int) -> None:
    """Add the options of every benchmark that starts servers. `name`: the benchmark's, used in file names."""
    parser.add_argument("--port", type=int, default=port, help="where the servers listen (default: %(default)s)")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds until a server must answer")
    parser.add_argument(
        "--crossdock-option", action="append", default=[], metavar="--OPTION=VALUE", help="for every crossdock serve"
    )
    add_output_options(parser, name)


def crossdock_command(args: argparse.Namespace, *flags: str) -> list[str]:
    """Return the command that serves `args.model`, or the embedded model, with these flags."""
    crossdock = str(Path(sys.executable).with_name("crossdock"))
    model = [str(args.model)] if "model" in args and args.model else []  # none: the embedded one
    return [crossdock, "serve", *model, "--port", str(args.port), *flags, *args.crossdock_option]


def peer_command(args: argparse.Namespace, name: str, budget: int, *flags: str) -> list[str]:
    """Return the command with which a script of peers/ serves `args.model`."""
    venv = ["--venv", str(args.venvs / name)] if args.venvs else []
    script = str(ROOT / "benchmarks" / "peers" / f"{name}.sh")
    return [script, "serve", str(args.model), "--port", str(args.port), *venv, "--budget", str(budget), *flags]


def add_peer_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of `peer_command`."""
    parser.add_argument("--venvs", type=Path, help="directory of the peers' environments (default: .cache/peers)")


def log_of(args: argparse.Namespace, name: str) -> Path:
    """Return the file for the output of a server; its folder exists afterwards."""
    args.output.parent.mkdir(parents=True, exist_ok=True)
    log: Path = args.output.with_name(f"{args.output.name}-{name}.log")
    return log


@contextmanager
def serving(
    name: str,
    command: Sequence[str],
    args: argparse.Namespace,
    log: Path,
    model: str | None = None,
    key: str = "none",
    is_ready: Callable[[str], bool] | None = None,
) -> Iterator[RunningServer]:
    """Start a server, wait until it answers, and end all its processes afterwards.

    Args:
        name: for error messages.
        command: listens at `args.port`.
        args: with the options of `add_server_options`.
        log: its output is appended to this file.
        model: the name that clients ask for; None: the first that the server lists.
        key: an API key, where the server asks for one.
        is_ready: asked every 50 ms, with the address; None: the server completes a prompt, asked every 500 ms.

    Raises:
        RuntimeError: another server listens at the port, the server ended, or did not answer within
            `args.start_timeout` seconds.
    """
    with socket.socket() as probe:  # else the figures would be those of the other server
        if probe.connect_ex(("127.0.0.1", args.port)) == 0:
            raise RuntimeError(f"another server listens at port {args.port}: end it, or give another --port")
    mark, address = uuid.uuid4().hex, f"http://127.0.0.1:{args.port}"
    started = time.monotonic()
    handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the server ends with this
    process = launch(command, log, mark)
    try:
        while not (is_ready(address) if is_ready else _answers(address, model, key)):
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode} before it was ready; see {log}")
            if time.monotonic() - started > args.start_timeout:
                raise RuntimeError(f"{name} was not ready within {args.start_timeout} s; see {log}")
            time.sleep(0.05 if is_ready else 0.5)
        start_s, now = time.monotonic() - started, partial(processes_of, process.pid, mark)
        yield RunningServer(address, now(), start_s, now)
    finally:
        try:
            with _undisturbed():
                end(process, mark)
        finally:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Put off signals that would end this process until a server has ended: else it would go on running."""
    came: list[int] = []
    handlers = {each: signal.signal(each, lambda number, _: came.append(number)) for each in _ENDING}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    if came:
        signal.raise_signal(came[0])


def crossdock_server(
    args: argparse.Namespace, *flags: str, name: str = "crossdock", key: str = "none"
) -> AbstractContextManager[RunningServer]:
    """Serve `args.model`, or the embedded model, with these flags. `name`: of the log."""
    return serving(name, crossdock_command(args, *flags), args, log_of(args, name), key=key)


def launch(command: Sequence[str], log: Path, mark: str) -> "subprocess.Popen[bytes]":
    """Start a server in a session of its own. `mark` names its processes for `processes_of` and `end`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, MARK: mark},
            start_new_session=True,
        )


def _answers(address: str, model: str | None, key: str) -> bool:
    """Return whether the server completes a prompt: Ray's router lists the models long before an engine is ready."""
    head = {"Authorization": f"Bearer {key}"}
    try:
        models = httpx.get(f"{address}/v1/models", headers=head, timeout=5)
        if models.status_code != 200:
            return False
        body = {"model": model or models.json()["data"][0]["id"], "prompt": "One", "max_tokens": 1}
        return httpx.post(f"{address}/v1/completions", json=body, headers=head, timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def end(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Interrupt a server, wait for its processes, and kill those that stay."""
    left = processes_of(process.pid, mark)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.terminate()
    deadline = time.monotonic() + 15
    while left and time.monotonic() < deadline:
        time.sleep(0.5)
        # Processes that have lost their parent meanwhile are not found again, so those found before are kept.
        process.poll()
        left = {pid for pid in left if _is_alive(pid)} | processes_of(process.pid, mark)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


# -- processes -------------------------------------------------------------------------------------------------------


def processes_of(session: int, mark: str) -> set[int]:
    """Return the ids of all living processes of a server.

    They are the processes of its session, those with the mark in their environment, and all descendants of either. One
    sign alone does not suffice: Ray's daemons leave the session, and processes that set their title (vLLM's workers,
    Ray's) overwrite their environment.
    """
    parents: dict[int, int] = {}
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            parents[process.pid] = process.ppid()
            if os.getsid(process.pid) == session or process.environ().get(MARK) == mark:
                found.add(process.pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def command_line(pid: int) -> str:
    """Return the words of a process, or the title that it has set; an empty text where the process has ended."""
    try:
        return " ".join(psutil.Process(pid).cmdline()).strip()
    except psutil.Error:
        return ""


def memory_of(pid: int) -> dict[str, float]:
    """Return the memory of a process in MiB; nothing where it has ended.

    Pages that processes share count once in `PSS`. No other process has those of `private`.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines[1:]}
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return {"PSS": sizes["Pss"], "anonymous": sizes["Pss_Anon"], "private": private}


def memory_mib(processes: Iterable[int]) -> float:
    """Return the memory of processes; pages that they share count once (PSS)."""
    return sum(memory_of(pid).get("PSS", 0.0) for pid in processes)


def cpu_seconds(processes: Iterable[int]) -> float:
    """Return the CPU time of processes and of those of their children that have ended."""
    seconds = 0.0
    for pid in processes:
        with suppress(psutil.Error):
            seconds += sum(psutil.Process(pid).cpu_times()[:4])  # its own, and those of its children
    return seconds


class OtherLoad:
    """The CPU time of all other processes of the machine from now on, which disturb a measurement."""

    def __init__(self, processes: Iterable[int]) -> None:
        self._own = {*processes, os.getpid()}
        self._started = time.monotonic()
        self._before = self._seconds()

    def share(self) -> float:
        """Return the share of one core, the host's other guests included."""
        return max(0.0, (self._seconds() - self._before) / (time.monotonic() - self._started))

    def _seconds(self) -> float:
        of = psutil.cpu_times()
        whole = of.user + of.nice + of.system + of.irq + of.softirq + of.steal  # steal: what the host took
        return float(whole) - cpu_seconds(self._own)
