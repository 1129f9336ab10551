"""Which of Ray's processes a server on one machine does without: they take memory, and seconds of its start."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ray._private import parameter, ray_constants, services
from ray._private.node import Node
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # of a compiled module

from crossdock.cluster.serve.own_ray.forked_replicas import is_forking

_AGENTS = (ray_constants.PROCESS_TYPE_DASHBOARD_AGENT, ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT)
_PRESTARTED = "--num_prestart_python_workers="
_python_command = services._build_python_executable_command_memory_profileable
_start_process = services.start_ray_process
_get_node = services.get_node
_LOOK_S = 0.02  # between two looks whether the raylet is there
_PATIENCE_S = 300.0  # for the raylet, which takes seconds on an idle machine
_raylet: list[subprocess.Popen[bytes]] = []  # the last one that was started here


@contextlib.contextmanager
def without_unused_processes() -> Iterator[None]:
    """Have `ray.init` start no dashboard, no autoscaler and no log monitor, for which it has no setting.

    `include_dashboard=False` starts the dashboard's process with fewer modules. The autoscaler adds nodes, and there is
    one node. The log monitor copies logs of workers to the driver, which does not show them. The raylet's two agents,
    for which it waits before it begins, are replaced by `idle_agent.py`. Where replicas and ingresses are forked, one
    worker starts with the raylet, for Serve's controller, and not one for each core. `ray.init` waits for the raylet
    for 30 s, which are few on a busy machine: it asks when the raylet is there or has ended, or after `_PATIENCE_S`.
    benchmarks/records/memory-and-start.md has what each of these saves.
    """
    parameters = parameter.RayParams
    start_dashboard = Node.start_api_server
    parameter.RayParams = partial(parameters, no_monitor=True, include_log_monitor=False)
    Node.start_api_server = _without_dashboard
    services._build_python_executable_command_memory_profileable = _with_idle_agents
    services.start_ray_process = _started
    services.get_node = _get_registered_node
    try:
        yield
    finally:
        parameter.RayParams = parameters
        Node.start_api_server = start_dashboard
        services._build_python_executable_command_memory_profileable = _python_command
        services.start_ray_process = _start_process
        services.get_node = _get_node


def _without_dashboard(node: Any, **_: Any) -> None:
    node._webui_url = ""  # the raylet is given the address


def _with_idle_agents(component: str, *arguments: Any, **options: Any) -> list[str]:
    """Return the command of a process of Ray, to which the caller adds the path of its script."""
    if component in _AGENTS:
        return [sys.executable, "-S", "-E", str(Path(__file__).with_name("idle_agent.py"))]
    command: list[str] = _python_command(component, *arguments, **options)
    return command


def _started(command: list[str], process_type: str, *arguments: Any, **options: Any) -> Any:
    """Start a process of Ray; the raylet with one worker before it is asked for any, where workers are forked."""
    if is_forking():
        command = [f"{_PRESTARTED}1" if each.startswith(_PRESTARTED) else each for each in command]
    started = _start_process(command, process_type, *arguments, **options)
    if process_type == ray_constants.PROCESS_TYPE_RAYLET:
        _raylet[:] = [started.process]
    return started


def _get_registered_node(gcs_address: str, node_id: str) -> Any:
    """Return Ray's information of a node, once its raylet has registered. Ray raises its own error where it has not."""
    client = GcsClient(address=gcs_address)
    deadline = time.monotonic() + _PATIENCE_S
    while not client.get_all_node_info() and _is_running() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return _get_node(gcs_address, node_id)


def _is_running() -> bool:
    """Return whether the raylet has not ended."""
    return all(raylet.poll() is None for raylet in _raylet)
