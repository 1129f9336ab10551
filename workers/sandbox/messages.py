"""Messages between a caller and its sandbox."""

import struct
from typing import Any, BinaryIO

import msgpack

_LONE_SURROGATES = "surrogatepass"  # a client's JSON may hold them


def write_message(stream: BinaryIO, message: Any) -> None:
    """Write one message: its length in eight bytes, then msgpack."""
    body = pack(message)
    stream.write(struct.pack("<Q", len(body)))
    stream.write(body)
    stream.flush()


def read_message(stream: BinaryIO) -> Any | None:
    """Return the next message; None at the end of the stream."""
    header = stream.read(8)
    if len(header) < 8:
        return None
    size = struct.unpack("<Q", header)[0]
    body = stream.read(size)
    return unpack(body) if len(body) == size else None


def pack(message: Any) -> bytes:
    """Return the message as msgpack."""
    body: bytes = msgpack.packb(message, unicode_errors=_LONE_SURROGATES)
    return body


def unpack(body: bytes) -> Any:
    """Return the message that `pack` was given; tuples come back as lists."""
    return msgpack.unpackb(body, unicode_errors=_LONE_SURROGATES)
