"""Replicas and ingresses forked from a process that has imported what they import, while Ray and Serve start.

Ray starts a worker as `python <script> default_worker.py …`; the script is this file. A worker that has `SOCKET` in its
runtime environment is forked: the script passes its arguments, environment and open files to the forking process, and
ends. Other workers, or all where that process is gone, start as Ray starts them.

No machine with GPUs forks: libraries that have looked for one cannot be forked.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

SOCKET = "CROSSDOCK_FORKING"  # names the socket of the forking process
ROLE = "CROSSDOCK_FORKED"  # names what the worker will be
_IMPORTED = {  # by role, in this order: a replica takes the longest to start
    "replica": (
        "crossdock.workers.model.load",
        "crossdock.workers.replica.engine.calibrate",
        "crossdock.workers.replica.engine.engine_loader",
        "crossdock.workers.replica.serving.engine_thread",
        "crossdock.workers.replica.transfer.handover",
        "transformers.models.auto.modeling_auto",
        "fastapi",
    ),
    "ingress": (
        "crossdock.cluster.api.endpoints",
        "crossdock.cluster.dispatch.dispatcher",
        "crossdock.cluster.serve.media",
        "transformers.models.auto.tokenization_auto",
        "uvicorn",
    ),
}
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri")
_LONGEST_REQUEST = 1 << 20  # bytes
_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_FORKED = b"f"
_FOR = "--for"  # the parent of the forking process
_CONTEXT = "--serialized-runtime-env-context="
_forking: list[subprocess.Popen[bytes]] = []  # the forking process that this one has started, if any


@contextlib.contextmanager
def forked_replicas(environment: dict[str, str]) -> Iterator[None]:
    """Have the Ray that is started meanwhile on this machine fork its replicas, unless the machine has a GPU.

    A command enters it before its own imports, which take half a second. `environment`: variables for the
    replicas' process, beside those of this one.
    """
    if any(Path(gpu).exists() for gpu in _GPUS):
        yield
        return
    name = f"crossdock-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")  # not a file, which would stay when this process is killed
        listener.listen(64)
        own = ["-P", "-m", __name__, _FOR, str(os.getpid())]  # -P: no module of the folder it is called in
        process = subprocess.Popen(
            [sys.executable, *own],
            stdin=listener.fileno(),
            stdout=subprocess.DEVNULL,  # its workers have outputs of their own
            stderr=subprocess.DEVNULL,
            env=os.environ | environment | {"OMP_WAIT_POLICY": "PASSIVE"},  # torch reads it when imported
            start_new_session=True,  # Ctrl-C is for the command
        )
    os.environ[SOCKET] = name
    _forking.append(process)
    try:
        yield
    finally:
        fork_none()
        process.wait()
        _forking.remove(process)


def fork_none() -> None:
    """End the forking process, if there is one: replicas that start from now on are not forked."""
    os.environ.pop(SOCKET, None)
    for process in _forking:
        process.kill()


def is_forking() -> bool:
    """Return whether there is a forking process."""
    return SOCKET in os.environ


@contextlib.contextmanager
def forking_workers() -> Iterator[None]:
    """Have `ray.init` start workers by this file, if there is a forking process."""
    from ray._private import parameter

    parameters = parameter.RayParams
    if is_forking():
        parameter.RayParams = partial(parameters, setup_worker_path=__file__)
    try:
        yield
    finally:
        parameter.RayParams = parameters


def runtime_env(role: str) -> dict[str, Any]:
    """Return the options of an actor that is forked, if there is a forking process; else none.

    `role`: of `_IMPORTED`.
    """
    return {"runtime_env": {"env_vars": {SOCKET: os.environ[SOCKET], ROLE: role}}} if is_forking() else {}


# -- the forking process ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Asked:
    """A worker that is asked for."""

    connection: socket.socket
    request: dict[str, Any]
    files: list[int]

    @property
    def role(self) -> str | None:
        return cast(str | None, self.request["environment"].get(ROLE))

    @property
    def has_left(self) -> bool:
        """Return whether who asked has ended: Ray kills a process that has become no worker in time."""
        return bool(select.select([self.connection], [], [], 0)[0])  # it says nothing after its request

    def close(self) -> None:
        """Close the connection and the files, which the worker has now."""
        self.connection.close()
        for file in self.files:
            os.close(file)


def fork_workers(modules: Mapping[str, Sequence[str]], parent: int) -> None:
    """Import `modules`, without Ray, which reads its environment then. Fork a worker for each connection.

    `modules`: by role. A worker is forked as soon as those of its role, and of the roles before, are imported; a worker
    of another role when all are. Stdin is the socket that listens. This process ends with its parent, whose number is
    `parent`.
    """
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return  # it has ended before
    listener = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    signal.signal(signal.SIGCHLD, _reap)
    gc.disable()  # imports make no garbage worth a seventh of their time
    waiting: list[_Asked] = []
    for asked in _askers(listener, modules, waiting):
        if not asked.has_left:
            if not os.fork():
                break
            with contextlib.suppress(OSError):  # it has left since
                asked.connection.send(_FORKED)
        asked.close()
    else:
        return
    listener.close()
    asked.connection.close()
    for other in waiting:  # else it would never hear that the forking process has ended
        other.close()
    _become_worker(asked.request, asked.files)


def _askers(listener: socket.socket, modules: Mapping[str, Sequence[str]], waiting: list[_Asked]) -> Iterator[_Asked]:
    """Import `modules`, and yield each worker that is asked for once it can be forked. Does not end.

    Those in `waiting` cannot be forked yet.
    """
    for role, names in modules.items():
        for name in names:
            importlib.import_module(name)
            waiting += _arrived(listener)
        assert "ray" not in sys.modules
        gc.freeze()  # else each worker looks at 400,000 objects again, and copies their pages as it does
        for asked in [asked for asked in waiting if asked.role == role]:
            waiting.remove(asked)
            yield asked
    while waiting:
        yield waiting.pop(0)
    while True:
        select.select([listener], [], [])
        yield from _arrived(listener)


def _arrived(listener: socket.socket) -> Iterator[_Asked]:
    """Yield the workers that this user's processes have asked for by now."""
    while select.select([listener], [], [], 0)[0]:
        connection, _ = listener.accept()
        if not _is_of_this_user(connection):
            connection.close()
            continue
        request, files, _, _ = socket.recv_fds(connection, _LONGEST_REQUEST, 3)
        if request:
            yield _Asked(connection, json.loads(request), files)
        else:  # who connected has ended
            connection.close()


def _is_of_this_user(connection: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


def _reap(number: int, frame: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become_worker(request: dict[str, Any], files: list[int]) -> None:
    """Run Ray's worker in this process, which has just been forked."""
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)  # the raylet kills the group of a worker that has ended
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


# -- a worker as Ray starts it ---------------------------------------------------------------------------------------


def start(arguments: list[str]) -> None:
    """Have the worker forked that this process was started for, or run it as Ray's own script does."""
    variables = variables_of(arguments)
    if SOCKET in variables:
        with contextlib.suppress(OSError):
            ask(arguments, variables, f"\0{variables[SOCKET]}")
            return
    sys.argv = _own_arguments(arguments)
    if _context_of(arguments):
        sys.argv = [str(Path(arguments[0]).with_name("setup_worker.py")), *arguments]
    # Without a runtime environment Ray's setup would import Ray for half a second, and then start Python again.
    runpy.run_path(sys.argv[0], run_name="__main__")


def variables_of(arguments: list[str]) -> dict[str, str]:
    """Return the variables of a worker's runtime environment."""
    variables: dict[str, str] = _context_of(arguments).get("env_vars") or {}
    return variables


def _context_of(arguments: list[str]) -> dict[str, Any]:
    """Return the settings of a worker's runtime environment; empty without one."""
    context = next((each.removeprefix(_CONTEXT) for each in arguments if each.startswith(_CONTEXT)), "{}")
    return json.loads(context) or {}


def _own_arguments(arguments: list[str]) -> list[str]:
    """Return the script of a worker and its arguments, without those of the setup."""
    return [each for each in arguments if not each.startswith((_CONTEXT, "--language="))]


def ask(arguments: list[str], variables: dict[str, str], address: str) -> None:
    """Have the forking process at `address` fork a worker with these variables. Raises OSError."""
    request = {
        "arguments": _own_arguments(arguments),
        "environment": dict(os.environ) | variables,
        "folder": os.getcwd(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        if not _is_of_this_user(connection):
            raise OSError("the socket is another user's")
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        if connection.recv(1) != _FORKED:
            raise OSError("the forking process has ended")


if __name__ == "__main__":
    if sys.argv[1] == _FOR:
        fork_workers(_IMPORTED, int(sys.argv[2]))
    else:
        start(sys.argv[1:])
