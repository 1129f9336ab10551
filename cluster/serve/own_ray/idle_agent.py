"""Stands for one of the two Python agents that Ray's raylet starts, and waits for, before it begins: run by path.

It says at once what ports there are. The agent for metrics and the dashboard never comes: its ports are -1, as where
Ray is installed without them. Runtime environments of variables alone, as replicas have, are made here. For any other
one Ray's own agent starts in this process. This takes 20 ms with the standard library; the agents import for seconds.
"""

import json
import os
import select
import socket
import sys
from contextlib import suppress
from pathlib import Path

_LOOK_S = 1.0  # between two looks whether the raylet is there
_PATIENCE_S = 10.0  # for one request of the raylet
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
        is_enough = True
        while is_enough and os.getppid() == raylet:
            if select.select([listener], [], [], _LOOK_S)[0]:
                connection, _ = listener.accept()
                # The raylet would end with this process. It asks again; what a stranger sends is no request.
                with connection, suppress(OSError, ValueError, LookupError):
                    is_enough = _answered(connection)
    if os.getppid() == raylet:
        own = [f"--runtime-env-agent-port={port}" if "-agent-port=" in each else each for each in arguments]
        os.execv(sys.executable, [sys.executable, agent, *own])  # the raylet asks again until the agent listens


def _answered(connection: socket.socket) -> bool:
    """Answer a request of the raylet. Return False, and give no answer, where that needs Ray's own agent."""
    connection.settimeout(_PATIENCE_S)
    with connection.makefile("rwb") as stream:
        path = stream.readline().split()[1]
        length = 0
        while line := stream.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        reply = b""  # of protobuf: all is well
        if path == b"/get_or_create_runtime_env":
            wanted = json.loads(_first_text(stream.read(length)))
            if not isinstance(wanted, dict) or wanted.keys() != {"env_vars"}:
                return False
            context = {"command_prefix": [], "py_executable": sys.executable, "java_jars": []}
            reply = _field(3, json.dumps(context | wanted).encode())
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(reply)}\r\nConnection: close\r\n\r\n"
        stream.write(head.encode() + reply)
    return True


def _first_text(message: bytes) -> bytes:
    """Return field 1 of a protobuf message, which is a text and stands first."""
    length = 0
    at = 1
    shift = 0
    while True:
        length |= (message[at] & 0x7F) << shift
        at = at + 1
        shift = shift + 7
        if message[at - 1] < 0x80:
            return message[at : at + length]


def _field(number: int, text: bytes) -> bytes:
    """Return a text as a field of a protobuf message."""
    length = len(text)
    size = bytearray()
    while length >= 0x80:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([number << 3 | 2, *size, length]) + text


def _tell(flags: dict[str, str], name: str, port: str) -> None:
    """Write a port into the file from which the raylet reads it, as Ray's own agents do."""
    path = Path(flags["session-dir"]) / f"{name}_{flags['node-id']}"
    new = path.with_suffix(".new")
    new.write_text(port)
    new.rename(path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
