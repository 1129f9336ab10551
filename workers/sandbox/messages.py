"""Messages between a caller and its sandbox: settings, then questions, each with one answer."""

import mmap
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, TypeAlias

from msgspec import msgpack

_HEADER = struct.Struct("<Q")  # bytes of the message behind it
INTERRUPT = "interrupt"  # sent instead of a question: the caller needs no answer to the last one
# Types of extensions of msgpack: what holds lone surrogates, as a client's JSON may.
_TEXT = 1
_MAPPING = 2  # pairs of keys and values, since no key may be an extension
_SURROGATES = "surrogatepass"

Packed: TypeAlias = bytes | mmap.mmap
"""A message as msgpack."""


def write_message(stream: BinaryIO, message: Any) -> None:
    """Write one message: its length in eight bytes, then msgpack."""
    write_packed(stream, pack(message))


def write_packed(stream: BinaryIO, packed: Packed) -> None:
    """Write one message that is packed already. A stream without buffer takes bytes in parts."""
    for part in (_HEADER.pack(len(packed)), packed):
        with memoryview(part) as left:
            done = 0
            while done < len(part):
                done += stream.write(left[done:])
    stream.flush()


def read_message(stream: BinaryIO) -> Any | None:
    """Return the next message; None at the end of the stream. From a stream without buffer, no further byte is read."""
    packed = read_packed(stream)
    return None if packed is None else unpack(packed)


def read_packed(stream: BinaryIO, most_bytes: int | None = None) -> Packed | None:
    """Return the next message, still packed; None at the end of the stream, or where the message is too long.

    It has memory of its own: nothing of it stays behind once it is dropped.
    """
    header = bytearray(_HEADER.size)
    if not _fill(stream, header):
        return None
    (size,) = _HEADER.unpack(header)
    if most_bytes is not None and not 0 < size <= most_bytes:
        return None
    body = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return body if _fill(stream, body) else None


def questions(stream: BinaryIO) -> Iterator[Packed]:
    """Yield each question until the stream ends, without interrupts that came after their answer."""
    interrupt = pack(INTERRUPT)
    while (packed := read_packed(stream)) is not None:
        if packed[: len(interrupt) + 1] != interrupt:
            yield packed


def pack(message: Any) -> bytes:
    """Return the message as msgpack. ValueError: it is nested too deeply."""
    try:
        try:
            return msgpack.encode(message)
        except UnicodeEncodeError:
            return msgpack.encode(_encodable(message))
    except RecursionError:
        raise ValueError("the message is nested too deeply") from None


def unpack(body: Packed) -> Any:
    """Return the message that `pack` was given; tuples come back as lists. ValueError: it was given none."""
    try:
        return _decoder.decode(body)
    except RecursionError:
        raise ValueError("the message is nested too deeply") from None


def _encodable(value: Any) -> Any:
    """Return the value with each text that is no UTF-8 as an extension, and each mapping with such a key."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return msgpack.Ext(_TEXT, value.encode("utf-8", _SURROGATES))
    if isinstance(value, Mapping):
        pairs = [(_encodable(key), _encodable(each)) for key, each in value.items()]
        if any(isinstance(key, msgpack.Ext) for key, _ in pairs):
            return msgpack.Ext(_MAPPING, msgpack.encode(pairs))
        return dict(pairs)
    if isinstance(value, list | tuple):
        return [_encodable(each) for each in value]
    return value


def _decoded(kind: int, data: memoryview) -> Any:
    if kind == _TEXT:
        return str(data, "utf-8", _SURROGATES)
    if kind == _MAPPING:
        return dict(_decoder.decode(data))
    raise ValueError(f"extension {kind} of msgpack is not known")


_decoder = msgpack.Decoder(ext_hook=_decoded)


def _fill(stream: BinaryIO, buffer: bytearray | mmap.mmap) -> bool:
    """Read until a buffer is full; False where the stream ends before. A stream without buffer gives bytes in parts."""
    with memoryview(buffer) as left:
        done = 0
        while done < len(buffer) and (count := stream.readinto(left[done:])):  # type: ignore[attr-defined]
            done += count
    return done == len(buffer)
