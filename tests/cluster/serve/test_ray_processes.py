"""The wait for the raylet of a Ray that starts here."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from crossdock.cluster.serve.own_ray import ray_processes


class Ray:
    """Ray's other side: a clock that passes as it is waited for, and a raylet that registers at 100 s."""

    now = 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        gcs = SimpleNamespace(get_all_node_info=lambda: {"n1": "up"} if self.now >= 100 else {})
        monkeypatch.setattr(ray_processes, "time", clock)
        monkeypatch.setattr(ray_processes, "GcsClient", lambda address: gcs)
        monkeypatch.setattr(ray_processes, "_get_node", lambda address, node_id: gcs.get_all_node_info().get(node_id))
        monkeypatch.setattr(ray_processes, "_raylet", [])

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


def start(*command: str) -> subprocess.Popen[bytes]:
    """Start a process as Ray starts its raylet."""
    with ray_processes.without_unused_processes():
        started = ray_processes.services.start_ray_process(list(command), "raylet", fate_share=False)
    process: subprocess.Popen[bytes] = started.process
    return process


def node() -> object:
    with ray_processes.without_unused_processes():
        found: object = ray_processes.services.get_node("address", "n1")
        return found


def test_raylet_that_takes_longer_than_ray_waits_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(monkeypatch)
    raylet = start(sys.executable, "-c", "import time; time.sleep(600)")
    try:
        assert node() == "up"
        assert 100 <= ray.now < 101
    finally:
        raylet.kill()
        raylet.wait()


def test_raylet_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(monkeypatch)
    start("true").wait()
    assert node() is None
    assert ray.now == 0
