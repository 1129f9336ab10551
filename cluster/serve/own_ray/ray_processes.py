"""Which of Ray's processes a server on one machine does without: they take memory, and seconds of its start."""

import contextlib
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
_PATIENCE_S = 30.0  # Ray's own for a raylet


@contextlib.contextmanager
def without_unused_processes() -> Iterator[None]:
    """Have `ray.init` start no dashboard, no autoscaler and no log monitor, for which it has no setting.

    `include_dashboard=False` starts the dashboard's process with fewer modules. The autoscaler adds nodes, and there is
    one node. The log monitor copies logs of workers to the driver, which does not show them. The raylet's two agents,
    for which it waits before it begins, are replaced by `idle_agent.py`. Where replicas and ingresses are forked, one
    worker starts with the raylet, for Serve's controller, and not one for each core. `ray.init` waits for the raylet
    for 30 s, which are few on a busy machine: it asks when the raylet is there, and then has its 30 s once more.
    benchmarks/records/memory-and-start.md has what each of these saves.
    """
    parameters = parameter.RayParams
    start_dashboard = Node.start_api_server
    parameter.RayParams = partial(parameters, no_monitor=True, include_log_monitor=False)
    Node.start_api_server = _without_dashboard
    services._build_python_executable_command_memory_profileable = _with_idle_agents
    services.start_ray_process = _with_one_worker if is_forking() else _start_process
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


def _with_one_worker(command: list[str], *arguments: Any, **options: Any) -> Any:
    """Start a process of Ray; the raylet with one worker before it is asked for any."""
    own = [f"{_PRESTARTED}1" if each.startswith(_PRESTARTED) else each for each in command]
    return _start_process(own, *arguments, **options)


def _get_registered_node(gcs_address: str, node_id: str) -> Any:
    """Return Ray's information of a node, once its raylet has registered, or after `_PATIENCE_S`."""
    client = GcsClient(address=gcs_address)
    deadline = time.monotonic() + _PATIENCE_S
    while not client.get_all_node_info() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return _get_node(gcs_address, node_id)
