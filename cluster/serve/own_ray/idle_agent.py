"""Stands for one of the two Python agents that Ray's raylet starts, and waits for, before it begins: run by path.

It says at once what ports there are. The agent for metrics and the dashboard never comes: its ports are -1, as where
Ray is installed without them. The agent for runtime environments starts in this process when somebody wants one.
Standard library alone: this takes 20 ms, the agents import for a second or two.
"""

import os
import select
import socket
import sys
from pathlib import Path

_LOOK_S = 1.0  # between two looks whether the raylet is there
_NONE = "-1"


def main(agent: str, arguments: list[str]) -> None:
    """Stand for the agent whose script is `agent`, until it is needed or the raylet is gone."""
    raylet = os.getppid()
    flags = dict(argument.removeprefix("--").partition("=")[::2] for argument in arguments)
    if "runtime-env-agent-port" not in flags:
        for name in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
            _tell(flags, name, _NONE)
        while os.getppid() == raylet:
            select.select([], [], [], _LOOK_S)
        return
    with socket.create_server((flags["node-ip-address"], 0)) as listener:
        port = str(listener.getsockname()[1])
        _tell(flags, "runtime_env_agent_port", port)
        while not select.select([listener], [], [], _LOOK_S)[0]:
            if os.getppid() != raylet:
                return
    own = [f"--runtime-env-agent-port={port}" if "-agent-port=" in each else each for each in arguments]
    os.execv(sys.executable, [sys.executable, agent, *own])  # the raylet asks again until the agent listens


def _tell(flags: dict[str, str], name: str, port: str) -> None:
    """Write a port where the raylet looks for it, as Ray's own agents do."""
    path = Path(flags["session-dir"]) / f"{name}_{flags['node-id']}"
    new = path.with_suffix(".new")
    new.write_text(port)
    new.rename(path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
