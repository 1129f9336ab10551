"""Processes for tests, forked from one that has imported what they import: ranks of worker groups, and Ray's workers.

Ray's workers are forked as replicas of `crossdock serve` are, see cluster/serve/own_ray/forked_replicas.py; but here
all workers are. Nor is anything measured as a replica starts: see tests/known_seconds.py.
tests/cluster/serve/flags/test_command.py starts servers as users do.
"""

import atexit
import contextlib
import importlib
import multiprocessing
import os
import select
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from unittest.mock import patch

from crossdock.cluster.serve.own_ray.forked_replicas import ask, fork_workers, variables_of

SOCKET = "CROSSDOCK_TESTS_FORKING"  # names the socket of the process that forks Ray's workers
IMPORTED = (
    "crossdock.cluster.api.endpoints",
    "crossdock.cluster.serve.media",
    "crossdock.workers.model.load",
    "crossdock.workers.replica.engine.calibrate",
    "crossdock.workers.replica.serving.engine_thread",
    "crossdock.workers.replica.transfer.handover",
    "fastapi",
    "jsonschema",  # this and the next one are Ray's
    "requests",
    "uvicorn",
)
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(  # a rank then takes 0.2 s of a core to join its first worker group, and 0.7 s without
    [
        "pytest",
        "tests.own_locks",
        "crossdock.workers.replica.serving.follower",
        "tests.workers.architectures",
        "transformers.models.llama.modeling_llama",
    ]
)


def fork_the_server() -> None:
    """Fork the server of `PROCESSES` from this process, which has imported much, and neither Ray nor NIXL.

    It imports the rest when the first process is asked for. Without, the server starts from nothing.
    """
    resource_tracker.ensure_running()
    with patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(_: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
    """Do as `spawnv_passfds` does for a fork server, but without a new Python."""
    if number := os.fork():
        return number
    try:
        _serve(arguments[-1], *passed)
    finally:  # it leaves by SystemExit
        os._exit(0)


def _serve(program: str, listening: int, parents_end: int) -> None:
    for file in map(int, os.listdir("/proc/self/fd")):
        if file > 2 and file not in (listening, parents_end):
            with contextlib.suppress(OSError):  # that of the listing
                os.close(file)
    forkserver._forkserver.__init__()  # its lock is held
    if listening in select.select([listening, parents_end], [], [])[0]:
        exec(program)


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
        process = PROCESSES.Process(target=_fork_workers, args=(listener,))
        process.start()
    assert process.pid is not None
    parameters = parameter.RayParams
    os.environ[SOCKET] = path
    parameter.RayParams = partial(parameters, setup_worker_path=__file__)
    try:
        yield process.pid
    finally:
        parameter.RayParams = parameters
        del os.environ[SOCKET]
        process.kill()
        process.join()


def _fork_workers(listener: socket.socket) -> None:
    """Fork a worker for each connection, in the first process; be a worker of Ray, in each of the others."""
    os.dup2(listener.fileno(), 0)
    listener.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    select.select([0], [], [])  # not sooner: Ray gives its own processes a few seconds to start
    importlib.import_module("tests.known_seconds").give_known_seconds()
    importlib.import_module("tests.slowness").slow_down()
    try:
        fork_workers({"any": IMPORTED}, os.getppid())
    finally:
        atexit._run_exitfuncs()  # multiprocessing's processes leave them out


if __name__ == "__main__":
    ask(sys.argv[1:], variables_of(sys.argv[1:]), os.environ[SOCKET])
