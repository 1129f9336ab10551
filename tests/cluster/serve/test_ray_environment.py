"""The environment of Ray's processes."""

import os
import subprocess
import sys

import pytest

from crossdock.cluster.serve.ray_environment import ENVIRONMENT

GROW = """
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before, kept = resident(), []
for _ in range(20):  # a large buffer, freed after a small one that stays
    large = b"a" * (20 << 20)
    kept.append(bytes(100_000))
    del large
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_large_buffers_go_back_to_the_machine() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = subprocess.run(
        [sys.executable, "-c", GROW], env=environment | ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 10 << 20
