"""Ports for servers under test."""

import socket


def free_port() -> int:
    """Return a port that no process listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
