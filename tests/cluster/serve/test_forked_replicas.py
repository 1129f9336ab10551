import json
import os
import secrets
import select
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from crossdock.cluster.serve.own_ray import forked_replicas
from crossdock.cluster.serve.own_ray.forked_replicas import ROLE, SOCKET, ask, fork_none
from tests.waiting import eventually

RUN_FORKING = "import os; from crossdock.cluster.serve.own_ray.forked_replicas import fork_workers; "
RUN_FORKING += 'fork_workers({"replica": ["early"], "ingress": ["late"]}, os.getppid())'
WAITS = "import pathlib, time\nwhile not pathlib.Path({go!r}).exists(): time.sleep(0.01)\n"
WORKER = "import pathlib, sys\npathlib.Path(sys.argv[1]).write_text(str('late' in sys.modules))\n"


def forking() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if forked_replicas.__name__ in " ".join(child.cmdline())]


def test_forking_process_ends_when_no_replica_will_be_forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forked_replicas, "_GPUS", [str(tmp_path / "none")])
    with forked_replicas.forked_replicas({}):
        assert SOCKET in os.environ
        (process,) = eventually(forking)  # its command line is empty for a moment
        fork_none()
        assert SOCKET not in os.environ
        process.wait(timeout=240)
    assert not forking()


def test_forking_process_ends_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forked_replicas, "_GPUS", [str(tmp_path / "none")])
    with forked_replicas.forked_replicas({}):
        assert len(eventually(forking)) == 1
    assert not forking()
    assert SOCKET not in os.environ


def test_worker_is_forked_once_the_modules_of_its_role_are_imported(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text("")
    (tmp_path / "late.py").write_text(WAITS.format(go=str(tmp_path / "go")))
    (tmp_path / "worker.py").write_text(WORKER)
    address = f"\0crossdock-test-{os.getpid()}"

    def forked(role: str) -> bool:
        """Have a worker forked, and return whether its process has the module of ingresses."""
        said = tmp_path / f"{role}-{secrets.token_hex(4)}"
        ask([str(tmp_path / "worker.py"), str(said)], {ROLE: role}, address)
        return eventually(lambda: said.exists() and said.read_text()) == "True"

    with ThreadPoolExecutor() as pool, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        replica = pool.submit(forked, "replica")
        assert select.select([listener], [], [], 60)[
            0
        ]  # it has asked, so the process hears it before it imports `late`
        process = subprocess.Popen([sys.executable, "-c", RUN_FORKING], stdin=listener, cwd=tmp_path)
        try:
            assert not replica.result(timeout=240), "it did not wait for the modules of ingresses"
            ingress = pool.submit(forked, "ingress")
            (tmp_path / "go").touch()
            assert ingress.result(timeout=240)
            assert forked("replica")
        finally:
            process.kill()
            process.wait(timeout=240)


def test_worker_that_is_not_forked_yet_hears_that_the_forking_process_has_ended(tmp_path: Path) -> None:
    """A worker that was forked meanwhile does not keep its connection open."""
    (tmp_path / "early.py").write_text("")
    (tmp_path / "late.py").write_text(WAITS.format(go=str(tmp_path / "go")))
    (tmp_path / "worker.py").write_text(WAITS.format(go=str(tmp_path / "end")))
    address = f"\0crossdock-test-{os.getpid()}-end"

    until_end, output = os.pipe()
    with ExitStack() as opened, open(until_end, "rb") as end_of_workers:
        listener, ingress, replica = (
            opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(3)
        )
        listener.bind(address)
        listener.listen()
        for client, role in ((ingress, "ingress"), (replica, "replica")):
            client.settimeout(240)
            client.connect(address)
            request = {"arguments": ["worker.py"], "environment": {ROLE: role}, "folder": str(tmp_path)}
            socket.send_fds(client, [json.dumps(request).encode()], [0, output, 2])
        os.close(output)
        process = subprocess.Popen([sys.executable, "-c", RUN_FORKING], stdin=listener, cwd=tmp_path)
        try:
            assert replica.recv(1) == b"f"
            process.kill()
            assert ingress.recv(1) == b""
        finally:
            process.kill()
            process.wait(timeout=240)
            (tmp_path / "end").touch()
        assert select.select([end_of_workers], [], [], 60)[0], "the forked worker ends"
        assert end_of_workers.read() == b""


def test_worker_that_was_given_up_before_its_fork_ends_no_fork_of_others(tmp_path: Path) -> None:
    """On a slow machine Ray kills what waits for the fork of a worker, and starts it again."""
    (tmp_path / "early.py").write_text("")
    (tmp_path / "late.py").write_text(WAITS.format(go=str(tmp_path / "go")))
    (tmp_path / "worker.py").write_text(WORKER)
    address = f"\0crossdock-test-{os.getpid()}-given-up"

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        for request in ({"arguments": ["worker.py", "given-up"], "environment": {}, "folder": str(tmp_path)}, None):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
                killed.connect(address)
                if request is not None:
                    socket.send_fds(killed, [json.dumps(request).encode()], [0, 1, 2])
        process = subprocess.Popen([sys.executable, "-c", RUN_FORKING], stdin=listener, cwd=tmp_path)
        try:
            (tmp_path / "go").touch()
            ask([str(tmp_path / "worker.py"), str(tmp_path / "said")], {ROLE: "ingress"}, address)
            assert eventually((tmp_path / "said").exists)
            assert process.poll() is None, "the next one is forked, too"
        finally:
            process.kill()
            process.wait(timeout=240)
    assert not (tmp_path / "given-up").exists()


@pytest.mark.parametrize(("context", "script"), [("{}", "worker.py"), ('{"env_vars": {"A": "1"}}', "setup_worker.py")])
def test_worker_with_a_runtime_environment_alone_is_set_up_by_ray(tmp_path: Path, context: str, script: str) -> None:
    for name in ("worker.py", "setup_worker.py"):
        (tmp_path / name).write_text("import sys; print(sys.argv)")
    asked = [
        str(tmp_path / "worker.py"),
        f"--serialized-runtime-env-context={context}",
        "--language=PYTHON",
        "--port=1",
    ]
    run = [sys.executable, forked_replicas.__file__, *asked]
    ran = subprocess.run(run, capture_output=True, text=True, check=True, timeout=240)
    own = [str(tmp_path / "worker.py"), "--port=1"]
    assert ran.stdout.strip() == str(own if script == "worker.py" else [str(tmp_path / script), *asked])
