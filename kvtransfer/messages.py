"""Messages between the two ends of a transfer, and how they are written: msgpack, checked field by field.

Every message comes from another process, which may be older, broken or foreign. `decode` either returns a message whose
fields are all in range, or raises MalformedMessage. It never builds objects that the bytes name.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import msgpack

MAX_BYTES = 1 << 20
"""Bytes of one message, at most. A grant of 128k tokens has 40 KB for each group of layers without a window; NIXL was
measured with 256 KiB (docs/nixl.md)."""
_MAX_INT = 1 << 40
_MAX_ID = 512  # characters of a request id
_MAX_SECONDS = 86_400.0


class GroupPages(NamedTuple):
    """A request's pages of one group of layers, from page number `first` on. Page i holds tokens [i·size, (i+1)·size).

    Those before `first` are not needed: the group's window has passed them."""

    first: int
    pages: tuple[int, ...]

    @property
    def end(self) -> int:
        """The number after the last page's."""
        return self.first + len(self.pages)


@dataclass(frozen=True, slots=True)
class Hello:
    """Source to target: this request's pages will be sent, once this rank has pages for it."""

    request: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Source to target: this rank has pages for the whole prompt, and will compute it; grant pages for it.

    It may come before the target expects the request, hence the number of source ranks."""

    request: str
    epoch: int
    num_sources: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Target to source: the first `first_page` pages are here; write the others to those of `groups`, in order.

    `groups` has the pages of every group of layers. A group with a window begins where tokens to come can see. The
    recurrent state goes to `state_pages`, in order, once it is final."""

    request: str
    epoch: int
    first_page: int
    groups: tuple[GroupPages, ...]
    state_pages: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The number after the last page that every group has."""
        return min((group.end for group in self.groups), default=0)


@dataclass(frozen=True, slots=True)
class Wait:
    """Either way: the sender of this message will send nothing for about `seconds`, which is no failure."""

    request: str
    epoch: int
    seconds: float
    is_from_source: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """Target to source: stop writing, and report when you have stopped.

    `blob` is the target's. A source that was never asked to ship this request needs it to answer."""

    request: str
    epoch: int
    blob: bytes


@dataclass(frozen=True, slots=True)
class Stopped:
    """Source to target: no write of this epoch is open, and none will begin.

    If not `is_clean`, a write ended in an error, and part of its data may still be on the way."""

    request: str
    epoch: int
    is_clean: bool


@dataclass(frozen=True, slots=True)
class Pages:
    """Source to target, with the data: pages `first_page` to `first_page + num_pages` of the request are in place.

    They are in place in every group of layers, as far as the target has granted them.
    `sequence` counts a source's writes from 0, without gaps. `num_tokens` is how many tokens all pages up to and
    including these hold. The last message of a source has a `result`. A partial page travels only with that one, and so
    does the end of the recurrent state. Where a write is too small for both, messages of no pages bring parts of the
    state before.
    """

    request: str
    epoch: int
    sequence: int
    first_page: int
    num_pages: int
    num_tokens: int
    source_rank: int
    num_sources: int
    result: bytes | None = None


TransferMessage: TypeAlias = Hello | Offer | Grant | Wait | Abort | Stopped | Pages
_KINDS: dict[str, type[TransferMessage]] = {
    kind.__name__: kind for kind in (Hello, Offer, Grant, Wait, Abort, Stopped, Pages)
}
_HINTS = {kind: [(field.name, get_type_hints(kind)[field.name]) for field in fields(kind)] for kind in _KINDS.values()}


class MalformedMessage(Exception):
    """The bytes are no message of this protocol. The receiver drops and counts them."""


def encode(message: TransferMessage) -> bytes:
    """Return the message as bytes.

    Raises:
        ValueError: these are more than `MAX_BYTES`, which only a huge `result` reaches.
    """
    values = [getattr(message, name) for name, _ in _HINTS[type(message)]]
    data: bytes = msgpack.packb([type(message).__name__, *values])
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
        parts = msgpack.unpackb(data, use_list=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise MalformedMessage(f"not msgpack: {error}") from error
    if not isinstance(parts, tuple) or not parts or not isinstance(parts[0], str) or parts[0] not in _KINDS:
        raise MalformedMessage("unknown kind")
    kind = _KINDS[parts[0]]
    hints = _HINTS[kind]
    if len(parts) != len(hints) + 1:
        raise MalformedMessage(f"{kind.__name__} with {len(parts) - 1} fields")
    for (name, hint), value in zip(hints, parts[1:], strict=True):
        if not _fits(hint, value):
            raise MalformedMessage(f"{kind.__name__}.{name}")
    return kind(*[_read(hint, value) for (_, hint), value in zip(hints, parts[1:], strict=True)])


def _read(hint: object, value: Any) -> Any:
    """Return a value that fits as the type `hint`."""
    return tuple(GroupPages(*group) for group in value) if hint == tuple[GroupPages, ...] else value


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
    if hint == tuple[GroupPages, ...]:
        return type(value) is tuple and all(
            type(group) is tuple and len(group) == 2 and _fits(int, group[0]) and _fits(tuple[int, ...], group[1])
            for group in value
        )
    if hint is bytes:
        return type(value) is bytes
    return value is None or type(value) is bytes
