"""Make bytes of what a replica and an ingress send to each other: frames of a length and MessagePack.

A replica sends messages. An ingress sends submissions, and an empty frame as a sign of life.
"""

import struct
from typing import Any, NamedTuple

import numpy as np
from msgspec import msgpack

from crossdock.workers.report.advertise import Message
from crossdock.workers.schedule.request.submission import Submission

LENGTH = struct.Struct(">I")  # bytes of the frame that follow
TICKET_BYTES = 32
SIGN_OF_LIFE = LENGTH.pack(0)


class StreamAddress(NamedTuple):
    """The address at which one ingress, once, reads a replica's messages. `ticket`: its first bytes there."""

    host: str
    port: int
    ticket: bytes


def frame(message: Message) -> bytes:
    return _framed(message)


def submission_frame(number: int, submission: Submission) -> bytes:
    """Return a submission as a frame. `number`: which `Answer` is to it."""
    return _framed((number, submission))


def read_frame(content: bytes) -> Message:
    """Return the message of a frame without its length. Raises msgspec.DecodeError for other bytes."""
    return _messages.decode(content)


def read_submission(content: bytes) -> tuple[int, Submission]:
    """Return the number and the submission of a frame without its length. Raises msgspec.DecodeError, or ValueError."""
    return _submissions.decode(content)


def _framed(value: Any) -> bytes:
    content = _encoder.encode(value)
    return LENGTH.pack(len(content)) + content


def _of_array(value: Any) -> Any:
    """Return a tensor of an item as plain data: dtype, shape, bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    raise NotImplementedError(f"{type(value).__name__} has no form in MessagePack")


def _to_array(kind: Any, value: Any) -> Any:
    dtype, shape, content = value
    return np.frombuffer(content, dtype).reshape(shape)


_encoder = msgpack.Encoder(enc_hook=_of_array)
_messages = msgpack.Decoder(Message)
_submissions = msgpack.Decoder(tuple[int, Submission], dec_hook=_to_array)
