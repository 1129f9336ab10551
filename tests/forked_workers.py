"""Ray's workers for tests, forked from a process that has imported what replicas import: a start imports little.

Ray starts a worker as `python <script> default_worker.py ...`. For tests the script is this file. It passes its
arguments, environment and open files to the forking process, which forks the worker, and ends.

Nor is anything measured as a replica starts: see tests/known_seconds.py. tests/cluster/serve/flags/test_command.py
starts servers as users do.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

SOCKET = "CROSSDOCK_TESTS_FORKING"  # names the socket of the forking process
IMPORTED = (
    "crossdock.cluster.api.endpoints",
    "crossdock.cluster.serve.media",
    "crossdock.workers.model.load",
    "crossdock.workers.replica.engine.calibrate",
    "crossdock.workers.replica.serving.engine_thread",
    "crossdock.workers.replica.transfer.handover",
    "fastapi",
    "uvicorn",
)
_LONGEST_REQUEST = 1 << 20  # bytes
_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


@contextlib.contextmanager
def forked_workers(folder: Path) -> Iterator[int]:
    """Have the Ray that starts and ends meanwhile fork its workers. Yields the number of the forking process.

    `folder`: short, for the path of a socket.
    """
    from ray._private import parameter

    path = str(folder / "forking")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        command = [sys.executable, "-m", "tests.forked_workers"]
        process = subprocess.Popen(command, stdin=listener, cwd=Path(__file__).parents[1])
    parameters = parameter.RayParams
    os.environ[SOCKET] = path
    parameter.RayParams = partial(parameters, setup_worker_path=__file__)
    try:
        yield process.pid
    finally:
        parameter.RayParams = parameters
        del os.environ[SOCKET]
        process.kill()
        process.wait()


def serve(listener: socket.socket) -> None:
    """Import what replicas import, without Ray. Then fork a worker for each connection, for ever."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    select.select([listener], [], [])  # not sooner: Ray gives its own processes a few seconds to start
    _import_all()
    gc.collect()
    gc.freeze()  # else each worker looks at 400,000 objects again, and copies their pages as it does
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        connection, _ = listener.accept()
        with connection:
            request, files, _, _ = socket.recv_fds(connection, _LONGEST_REQUEST, 3)
            if not os.fork():
                break
        for file in files:
            os.close(file)
    listener.close()
    _become_worker(json.loads(request), files)


def _import_all() -> None:
    """Not Ray: as it is imported it reads its environment, which differs by worker, and begins its random numbers."""
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("tests.known_seconds").give_known_seconds()
    assert "ray" not in sys.modules


def _reap(number: int, frame: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become_worker(request: dict[str, Any], files: list[int]) -> None:
    """Run Ray's worker in this process, which has just been forked."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def ask(arguments: list[str]) -> None:
    """Have the forking process fork the worker that this process was started for."""
    environment, passed = dict(os.environ), []
    for argument in arguments:
        if argument.startswith("--serialized-runtime-env-context="):
            environment |= json.loads(argument.partition("=")[2]).get("env_vars", {})
        elif not argument.startswith("--language="):
            passed.append(argument)
    request = {"arguments": passed, "environment": environment, "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(environment[SOCKET])
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        connection.recv(1)  # ends once the worker is forked


if __name__ == "__main__":
    if sys.argv[1:]:
        ask(sys.argv[1:])
    else:
        serve(socket.socket(fileno=os.dup(sys.stdin.fileno())))
