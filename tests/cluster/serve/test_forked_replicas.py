import os
from pathlib import Path

import psutil
import pytest

from crossdock.cluster.serve.own_ray import forked_replicas
from crossdock.cluster.serve.own_ray.forked_replicas import SOCKET, fork_none


def forking() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if forked_replicas.__name__ in " ".join(child.cmdline())]


def test_forking_process_ends_when_no_replica_will_be_forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forked_replicas, "_GPUS", [str(tmp_path / "none")])
    with forked_replicas.forked_replicas({}):
        assert SOCKET in os.environ
        (process,) = forking()
        fork_none()
        assert SOCKET not in os.environ
        process.wait(timeout=60)
    assert not forking()


def test_forking_process_ends_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forked_replicas, "_GPUS", [str(tmp_path / "none")])
    with forked_replicas.forked_replicas({}):
        assert len(forking()) == 1
    assert not forking()
    assert SOCKET not in os.environ
