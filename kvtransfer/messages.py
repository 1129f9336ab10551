"""Messages between the two ends of a transfer. Every message comes from another process, and is checked."""

from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta

from crossdock.kvtransfer.records import Count, GroupPages, OfEpoch

MAX_BYTES = 1 << 20
"""Bytes of one message, at most. A grant of 128k tokens has 40 KB for each group of layers without a window; NIXL was
measured with 256 KiB (benchmarks/records/nixl.md)."""
_Id: TypeAlias = Annotated[str, Meta(min_length=1, max_length=512)]
_PageHash: TypeAlias = Annotated[bytes, Meta(min_length=1, max_length=64)]
MAX_PAUSE_S = 86_400.0
_Pause: TypeAlias = Annotated[float, Meta(ge=0.0, le=MAX_PAUSE_S)]  # seconds


class _Message(OfEpoch, frozen=True):
    """A message about one epoch of one request, whose id another process has chosen."""

    request: _Id


class Hello(_Message, frozen=True):
    """Source to target: this request's pages will be sent, once this rank has pages for the request."""


class Offer(_Message, frozen=True):
    """Source to target: this rank has pages for the whole prompt, and will compute it; grant pages for it.

    It may come before the target expects the request, hence the number of source ranks. Where the target has asked for
    a prefix, `num_tokens` are the prefix's tokens that are here; 0: the source computes the prompt."""

    num_sources: Count
    num_tokens: Count = 0


class AskPrefix(_Message, frozen=True):
    """Target to source: send the pages of this prefix that are here, to the ranks whose blobs are `peers`.

    `hashes` name the prefix, page by page, from its first page on. The source computes nothing."""

    peers: tuple[bytes, ...]
    hashes: tuple[_PageHash, ...]


class Grant(_Message, frozen=True):
    """Target to source: the first `first_page` pages are here; write the others to those of `groups`, in order.

    `groups` has the pages of every group of layers. A group with a window begins where tokens to come can see. The
    recurrent state goes to `state_pages`, in order, once it is final."""

    first_page: Count
    groups: tuple[GroupPages, ...]
    state_pages: tuple[Count, ...] = ()

    @property
    def end(self) -> int:
        """The number after the last page that every group has."""
        return min((group.end for group in self.groups), default=0)


class Wait(_Message, frozen=True):
    """Either way: the sender of this message will send nothing for about `seconds`, which is no failure."""

    seconds: _Pause
    is_from_source: bool


class Abort(_Message, frozen=True):
    """Target to source: stop writing, and report when you have stopped.

    `blob` is the target's. A source that was never asked to ship this request needs it to answer."""

    blob: bytes


class Stopped(_Message, frozen=True):
    """Source to target: no write of this epoch is open, and none will begin.

    Where `is_clean` is False, a write ended in an error, and part of its data may still be on the way."""

    is_clean: bool


class Checksum(NamedTuple):
    """The CRC-32 of the bytes of a write, and the target's pages of the recurrent state that are among them."""

    crc32: Count
    state_pages: tuple[Count, ...] = ()


class Pages(_Message, frozen=True, omit_defaults=True):
    """Source to target, with the data: pages `first_page` to `first_page + num_pages` of the request are in place.

    They are in place in every group of layers, as far as the target has granted them.
    `sequence` counts a source's writes from 0, without gaps. `num_tokens` is how many tokens all pages up to and
    including these hold. The last message of a source has a `result`. The partial page and the end of the recurrent
    state travel only with the last message. Where that is too small for both, messages without pages bring parts of
    the state before. `checksum` is of the bytes that were written; None: the source computes none.
    """

    sequence: Count
    first_page: Count
    num_pages: Count
    num_tokens: Count
    source_rank: Count
    num_sources: Count
    result: bytes | None = None
    checksum: Checksum | None = None


TransferMessage: TypeAlias = Hello | Offer | AskPrefix | Grant | Wait | Abort | Stopped | Pages
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TransferMessage)


class MalformedMessage(Exception):
    """The bytes are no message of this protocol. The receiver drops and counts them."""


def encode(message: TransferMessage) -> bytes:
    """Return the message as bytes.

    Raises:
        ValueError: the bytes are more than `MAX_BYTES`, which only a huge `result` reaches.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_BYTES:
        raise ValueError(f"a {type(message).__name__} message of {len(data)} bytes; at most {MAX_BYTES} can be sent")
    return data


def decode(data: bytes) -> TransferMessage:
    """Return the message that `encode` made the bytes from.

    Raises:
        MalformedMessage: the bytes are no message, or a field is out of range; the text names the field.
    """
    if len(data) > MAX_BYTES:
        raise MalformedMessage(f"{len(data)} bytes")
    try:
        message: TransferMessage = _decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error
    return message
