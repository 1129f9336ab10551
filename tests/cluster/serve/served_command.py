"""A real `crossdock serve`, for tests to ask and to disturb."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.ports import free_port
from tests.cluster.watch.terminal import background_job
from tests.waiting import eventually


@contextmanager
def serving(log: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `crossdock serve` as a background job, and yield its process and URL once it serves."""
    port = free_port()
    with log.open("w") as output:
        server = background_job("serve", *args, "--port", str(port), stdout=output, stderr=subprocess.STDOUT)
    try:
        last = f"Dashboard: http://127.0.0.1:{port}/dashboard\n"  # of the lines that tell where it serves
        eventually(lambda: last in log.read_text() or server.poll() is not None, log.read_text, 480)
        assert server.poll() is None, log.read_text()
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
