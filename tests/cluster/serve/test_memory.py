"""Memory of a family of processes."""

import subprocess
import sys

from crossdock.workers.model.memory.host_memory import free_on_host, used_by_family

_HOLD = "import os, sys; held = b'x' * (200 << 20); print(flush=True); sys.stdin.read()"
_PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_HOLD!r}])"
_FORK = "import os, sys; held = b'x' * (200 << 20); os.fork(); print(flush=True); sys.stdin.read()"


def started(code: str, lines: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(lines):
        assert process.stdout.readline()
    return process


def test_memory_of_a_child_counts_and_what_a_fork_shares_counts_once() -> None:
    for code, lines in ((_HOLD, 1), (_PARENT, 1), (_FORK, 2)):
        with started(code, lines) as process:
            assert 200 << 20 <= used_by_family(process.pid) < 300 << 20, code
            assert process.stdin is not None
            process.stdin.close()
        assert used_by_family(process.pid) == 0, "it has ended"
    assert 0 < free_on_host() < 1 << 50
