"""The environment of Ray's processes."""

import json
import os
import subprocess
import sys
import tempfile

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


START = """
import json, os, stat, sys
from pathlib import Path
import ray
from crossdock.cluster.config_file import load
from crossdock.cluster.serve.lifetime import start_ray

os.umask(0o022)
start_ray(load(None, {}))
session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
paths = [Path.home() / ".ray", Path.home() / ".ray/auth_token", session]
print(json.dumps([f"{stat.S_IMODE(path.stat().st_mode):o}" for path in paths]))
ray.shutdown()
"""


def test_token_and_sockets_of_a_ray_that_is_started_here_are_closed_to_other_users() -> None:
    with tempfile.TemporaryDirectory(prefix="cd-ray-", dir="/tmp") as folder:  # short, for the paths of Ray's sockets
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {"HOME": folder, "RAY_TMPDIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", START]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == ["700", "600", "700"]


WITHOUT_HOME = """
import ray
from crossdock.cluster.config_file import load
from crossdock.cluster.serve.lifetime import start_ray

start_ray(load(None, {}))
print(ray.get(ray.remote(lambda: 5).remote()))
ray.shutdown()
"""


def test_ray_starts_for_a_user_whose_home_cannot_be_written() -> None:
    """As in containers with a user of any number. Root can write everywhere, but makes no folder below a file."""
    with tempfile.TemporaryDirectory(prefix="cd-ray-", dir="/tmp") as folder:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {
            "HOME": "/dev/null",
            "RAY_TMPDIR": folder,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        command = [sys.executable, "-c", WITHOUT_HOME]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "5"
