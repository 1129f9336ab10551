"""Which of Ray's processes a server on one machine does without: they take 170 MiB and a second of its start."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from ray._private import parameter
from ray._private.node import Node


@contextlib.contextmanager
def without_unused_processes() -> Iterator[None]:
    """Have `ray.init` start no dashboard, no autoscaler and no log monitor, for which it has no setting.

    `include_dashboard=False` starts the dashboard's process with fewer modules. The autoscaler adds nodes, and there is
    one node. The log monitor copies logs of workers to the driver, which does not show them.
    """
    parameters, start_dashboard = parameter.RayParams, Node.start_api_server
    parameter.RayParams = partial(parameters, no_monitor=True, include_log_monitor=False)
    Node.start_api_server = _without_dashboard
    try:
        yield
    finally:
        parameter.RayParams, Node.start_api_server = parameters, start_dashboard


def _without_dashboard(node: Any, **_: Any) -> None:
    node._webui_url = ""  # the raylet is given the address
