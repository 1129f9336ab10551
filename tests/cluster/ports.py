"""Ports for servers under test."""

import socket


def free_port() -> int:
    """Return a port on which no process listened a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
