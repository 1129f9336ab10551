"""Ports for servers of tests."""

import random
import socket

_SERVERS = range(20_000, 32_000)  # above the ports of Ray's workers, below those that the kernel gives to clients


def free_port() -> int:
    """Return a port on which no process listens now. Another run of tests beside this one hardly ever chooses it."""
    choose = random.SystemRandom()  # hypothesis repeats the numbers of the module's own generator
    while True:
        port = choose.choice(_SERVERS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
