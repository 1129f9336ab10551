"""What the two ends of a transfer say to each other, and how it is written: msgpack, checked field by field.

Everything that arrives comes from another process, which may be older, broken or not ours: `decode` either returns a
message whose every field is in range or raises MalformedMessage. It never builds objects that the bytes name.
"""

from dataclasses import dataclass, fields
from typing import TypeAlias, get_type_hints

import msgpack

MAX_BYTES = 1 << 20
"""Of one message. A grant of 128k tokens is 40 KB; NIXL was seen to carry 256 KiB (facts: notifications)."""
_MAX_INT = 1 << 40
_MAX_ID = 512  # characters of a request id
_MAX_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Hello:
    """Source to target: I am about to send this request's pages; tell me where they go."""

    request: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Target to source: I have the first `first_page` pages; write the others to `pages`, in order."""

    request: str
    epoch: int
    first_page: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Either way: nothing will come from me for about `seconds`, and that is no failure."""

    request: str
    epoch: int
    seconds: float
    is_from_source: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """Target to source: write no more of this, and say when you have stopped.

    `blob` is the target's, for a source that was not told of the transfer and so knows no way to answer."""

    request: str
    epoch: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class Stopped:
    """Source to target: no write of this is open, and none will begin. If not `is_clean`, one ended in an error, and
    some of it may still be on its way."""

    request: str
    epoch: int
    is_clean: bool


@dataclass(frozen=True, slots=True)
class Pages:
    """Source to target, with the data: pages `first_page` to `first_page + num_pages` of the request are in place.

    `sequence` counts a source's writes from 0, without gaps. `num_tokens` is how many tokens all pages up to and with
    these hold. The last one has a `state`; a partial page travels only with it.
    """

    request: str
    epoch: int
    sequence: int
    first_page: int
    num_pages: int
    num_tokens: int
    source_rank: int
    num_sources: int
    state: bytes | None = None


Message: TypeAlias = Hello | Grant | Wait | Abort | Stopped | Pages
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Hello, Grant, Wait, Abort, Stopped, Pages)}
_HINTS = {kind: [(field.name, get_type_hints(kind)[field.name]) for field in fields(kind)] for kind in _KINDS.values()}


class MalformedMessage(Exception):
    """Not a message of ours. Whoever sent it, the sensible answer is to drop it and count."""


def encode(message: Message) -> bytes:
    """The message as bytes. ValueError if these are more than MAX_BYTES: only a huge `state` gets there."""
    values = [getattr(message, name) for name, _ in _HINTS[type(message)]]
    data: bytes = msgpack.packb([type(message).__name__, *values])
    if len(data) > MAX_BYTES:
        raise ValueError(f"a {type(message).__name__} message of {len(data)} bytes; at most {MAX_BYTES} can be sent")
    return data


def decode(data: bytes) -> Message:
    if len(data) > MAX_BYTES:
        raise MalformedMessage(f"{len(data)} bytes")
    try:
        parts = msgpack.unpackb(data, use_list=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise MalformedMessage(f"not msgpack: {error}") from error
    if not isinstance(parts, tuple) or not parts or not isinstance(parts[0], str) or parts[0] not in _KINDS:
        raise MalformedMessage("of no known kind")
    kind = _KINDS[parts[0]]
    hints = _HINTS[kind]
    if len(parts) != len(hints) + 1:
        raise MalformedMessage(f"{kind.__name__} with {len(parts) - 1} fields")
    for (name, hint), value in zip(hints, parts[1:], strict=True):
        if not _fits(hint, value):
            raise MalformedMessage(f"{kind.__name__}.{name}")
    return kind(*parts[1:])


def _fits(hint: object, value: object) -> bool:
    # `type(x) is`, not isinstance: True is an int to Python and would pass for page 1.
    if hint is int:
        return type(value) is int and 0 <= value < _MAX_INT
    if hint is bool:
        return type(value) is bool
    if hint is str:
        return type(value) is str and 0 < len(value) <= _MAX_ID
    if hint is float:
        return type(value) is float and 0.0 <= value <= _MAX_SECONDS
    if hint == tuple[int, ...]:
        return type(value) is tuple and all(type(page) is int and 0 <= page < _MAX_INT for page in value)
    if hint is bytes:
        return type(value) is bytes
    return value is None or type(value) is bytes
