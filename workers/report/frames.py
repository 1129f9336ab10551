"""A replica's messages to an ingress as bytes: each a frame of a length and MessagePack."""

import struct
from typing import NamedTuple

from msgspec import msgpack

from crossdock.workers.report.advertise import Message

LENGTH = struct.Struct(">I")  # bytes of the frame that follow
TICKET_BYTES = 32
SIGN_OF_LIFE = b"\0"  # the only bytes that an ingress sends after its ticket

_decoder = msgpack.Decoder(Message)
_encoder = msgpack.Encoder()


class StreamAddress(NamedTuple):
    """The address at which one ingress, once, reads a replica's messages. `ticket`: its first bytes there."""

    host: str
    port: int
    ticket: bytes


def frame(message: Message) -> bytes:
    """Return a message as a frame."""
    content = _encoder.encode(message)
    return LENGTH.pack(len(content)) + content


def read_frame(content: bytes) -> Message:
    """Return the message of a frame without its length. Raises msgspec.DecodeError for other bytes."""
    return _decoder.decode(content)
