"""Ports for servers under test."""

import socket


def free_port() -> int:
    """One that nobody listened on a moment ago."""
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        port: int = it.getsockname()[1]
    return port
