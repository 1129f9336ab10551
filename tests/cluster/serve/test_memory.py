"""Memory of a family of processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from crossdock.workers.model.memory import host_memory
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


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_stays_within_the_limit_of_a_container(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files as Linux writes them in the groups of both versions. The page cache of files is free."""
    folder = tmp_path / "memory" if version == 1 else tmp_path
    folder.mkdir(exist_ok=True)
    limit, used = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    (folder / f"memory.{used}").write_text(f"{300 << 10}\n")
    (folder / "memory.stat").write_text(f"{'total_' * (version == 1)}inactive_file {100 << 10}\n")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    (folder / f"memory.{limit}").write_text(f"{1 << 20}\n")
    assert free_on_host() == (1024 - 300 + 100) << 10
    (folder / f"memory.{limit}").write_text("9223372036854771712\n" if version == 1 else "max\n")  # no limit
    assert free_on_host() > 1 << 20
