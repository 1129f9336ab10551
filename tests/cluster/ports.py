"""Ports for servers of tests, and servers of a handler."""

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


@contextmanager
def server_of(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve by a handler, and yield the server's URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
