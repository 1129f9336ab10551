"""Messages between the ingress and a process of pictures."""

import struct
from typing import Any, BinaryIO

import msgpack

WALL_SECONDS = 20.0  # of one picture, on a busy machine


def write_frame(stream: BinaryIO, message: Any) -> None:
    """Write one message: its length in eight bytes, then msgpack."""
    body: bytes = msgpack.packb(message)
    stream.write(struct.pack("<Q", len(body)))
    stream.write(body)
    stream.flush()


def read_frame(stream: BinaryIO) -> Any | None:
    """Return the next message; None at the end of the stream."""
    header = stream.read(8)
    if len(header) < 8:
        return None
    size = struct.unpack("<Q", header)[0]
    body = stream.read(size)
    return msgpack.unpackb(body, max_bin_len=size) if len(body) == size else None
