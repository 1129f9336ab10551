"""Messages between a caller and its sandbox: settings, then questions, each with one answer."""

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgpack

INTERRUPT = "interrupt"  # sent instead of a question: the caller needs no answer to the last one
_LONE_SURROGATES = "surrogatepass"  # a client's JSON may hold them


def write_message(stream: BinaryIO, message: Any) -> None:
    """Write one message: its length in eight bytes, then msgpack."""
    body = pack(message)
    stream.write(struct.pack("<Q", len(body)))
    stream.write(body)
    stream.flush()


def read_message(stream: BinaryIO) -> Any | None:
    """Return the next message; None at the end of the stream. From a stream without buffer, no further byte is read."""
    header = _read(stream, 8)
    body = None if header is None else _read(stream, struct.unpack("<Q", header)[0])
    return None if body is None else unpack(body)


def questions(stream: BinaryIO) -> Iterator[Any]:
    """Yield each question until the stream ends, without interrupts that came after their answer."""
    while (message := read_message(stream)) is not None:
        if message != INTERRUPT:
            yield message


def pack(message: Any) -> bytes:
    """Return the message as msgpack."""
    body: bytes = msgpack.packb(message, unicode_errors=_LONE_SURROGATES)
    return body


def unpack(body: bytes) -> Any:
    """Return the message that `pack` was given; tuples come back as lists."""
    return msgpack.unpackb(body, unicode_errors=_LONE_SURROGATES)


def _read(stream: BinaryIO, size: int) -> bytes | None:
    """Read exactly `size` bytes; None where the stream ends before. A stream without buffer gives bytes in parts."""
    parts, left = list[bytes](), size
    while left and (part := stream.read(left)):
        parts.append(part)
        left -= len(part)
    return None if left else b"".join(parts)
