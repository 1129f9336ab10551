"""Which of Ray's processes a server on one machine does without: they take memory, and seconds of its start."""

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ray._private import parameter, ray_constants, services
from ray._private.node import Node

_AGENTS = (ray_constants.PROCESS_TYPE_DASHBOARD_AGENT, ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT)
_python_command = services._build_python_executable_command_memory_profileable


@contextlib.contextmanager
def without_unused_processes() -> Iterator[None]:
    """Have `ray.init` start no dashboard, no autoscaler and no log monitor, for which it has no setting.

    `include_dashboard=False` starts the dashboard's process with fewer modules. The autoscaler adds nodes, and there is
    one node. The log monitor copies logs of workers to the driver, which does not show them. The raylet's two agents,
    for which it waits before it begins, are replaced by `idle_agent.py`.
    """
    parameters, start_dashboard = parameter.RayParams, Node.start_api_server
    parameter.RayParams = partial(parameters, no_monitor=True, include_log_monitor=False)
    Node.start_api_server = _without_dashboard
    services._build_python_executable_command_memory_profileable = _with_idle_agents
    try:
        yield
    finally:
        parameter.RayParams, Node.start_api_server = parameters, start_dashboard
        services._build_python_executable_command_memory_profileable = _python_command


def _without_dashboard(node: Any, **_: Any) -> None:
    node._webui_url = ""  # the raylet is given the address


def _with_idle_agents(component: str, *arguments: Any, **options: Any) -> list[str]:
    """Return the command of a process of Ray, to which the caller adds the path of its script."""
    if component in _AGENTS:
        return [sys.executable, "-S", "-E", str(Path(__file__).with_name("idle_agent.py"))]
    command: list[str] = _python_command(component, *arguments, **options)
    return command
