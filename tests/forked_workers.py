"""Ray's workers for tests, forked from a process that has imported what replicas import: a start imports little.

As replicas of `crossdock serve` are, see cluster/serve/own_ray/forked_replicas.py; but here all workers are forked.

Nor is anything measured as a replica starts: see tests/known_seconds.py. tests/cluster/serve/flags/test_command.py
starts servers as users do.
"""

import contextlib
import importlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from crossdock.cluster.serve.own_ray.forked_replicas import ask, fork_workers, variables_of

SOCKET = "CROSSDOCK_TESTS_FORKING"  # names the socket of the forking process
_FOR = "--for"  # the parent of the forking process
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
        command = [sys.executable, "-m", "tests.forked_workers", _FOR, str(os.getpid())]
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


if __name__ == "__main__":
    if sys.argv[1] == _FOR:
        select.select([sys.stdin], [], [])  # not sooner: Ray gives its own processes a few seconds to start
        importlib.import_module("tests.known_seconds").give_known_seconds()
        fork_workers({"any": IMPORTED}, int(sys.argv[2]))
    else:
        ask(sys.argv[1:], variables_of(sys.argv[1:]), os.environ[SOCKET])
