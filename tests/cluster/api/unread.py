"""Clients that read nothing of their answers."""

import json
import socket

_BODY = json.dumps({"prompt": "Hi", "stream": True, "max_tokens": 100}).encode()
STREAM = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
"""A request for a stream."""


def unread(port: int, request: bytes) -> socket.socket:
    """Send a request on a connection with a small window, of which nothing is read."""
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.connect(("127.0.0.1", port))
    wire.settimeout(240)
    wire.sendall(request)
    return wire
