"""The messages between the ranks of a replica: msgpack, each field's type and range checked before a rank acts on one.

The driver sends steps and the calls of its dock to every follower. A follower reports its start and its dock's events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from types import UnionType
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

import msgpack
from pydantic import BaseModel

from crossdock.kvtransfer.events import Event, Figures
from crossdock.kvtransfer.messages import GroupPages
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.ranks.pool_layout import HeldLayers


class MalformedRankMessage(ValueError):
    """Bytes that are no message of this direction, or a field of the wrong type or out of range."""


# -- driver to followers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AllocatePool:
    """Allocate the KV pool."""

    num_pages: int


@dataclass(frozen=True, slots=True)
class RecordSteps:
    """Record steps of up to so many sequences and tokens as CUDA graphs, where the device has them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    most_drafts: int


@dataclass(frozen=True, slots=True)
class RunStep:
    """Compute this rank's part of a step; `inputs` is a step that `StepSender` packed."""

    inputs: bytes


@dataclass(frozen=True, slots=True)
class OpenDock:
    """Open the KV pool to transfers."""

    by_rank: tuple[HeldLayers, ...]  # the layers each rank holds
    model: str  # names the weights
    role: str
    transfer: TransferConfig


@dataclass(frozen=True, slots=True)
class EndRank:
    """End, after everything before this message is done."""


@dataclass(frozen=True, slots=True)
class ShipCall:
    """`Dock.ship`"""

    request: str
    epoch: int
    peers: tuple[bytes, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class ExpectCall:
    """`Dock.expect`"""

    request: str
    epoch: int
    peers: tuple[bytes, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class OfferCall:
    """`Dock.offer`"""

    request: str
    epoch: int


@dataclass(frozen=True, slots=True)
class ChunkCall:
    """`Dock.chunk`"""

    request: str
    groups: tuple[GroupPages, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FinishCall:
    """`Dock.finish`"""

    request: str
    groups: tuple[GroupPages, ...]
    num_tokens: int
    result: bytes
    state_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GrantCall:
    """`Dock.grant`"""

    request: str
    epoch: int
    first_page: int
    groups: tuple[GroupPages, ...]
    state_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CancelShipCall:
    """`Dock.cancel_ship`"""

    request: str
    epoch: int


@dataclass(frozen=True, slots=True)
class CancelExpectCall:
    """`Dock.cancel_expect`"""

    request: str
    epoch: int


@dataclass(frozen=True, slots=True)
class WaitCall:
    """`Dock.wait`"""

    request: str
    epoch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PeerDeadCall:
    """`Dock.peer_dead`"""

    blob: bytes


CancelCall: TypeAlias = CancelShipCall | CancelExpectCall
DockCall: TypeAlias = (
    ShipCall | ExpectCall | OfferCall | ChunkCall | FinishCall | GrantCall | CancelCall | WaitCall | PeerDeadCall
)
DriverMessage: TypeAlias = AllocatePool | RecordSteps | RunStep | OpenDock | EndRank | DockCall

# -- follower to driver ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinGang:
    """The first message of a follower."""

    rank: int


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """A phase of the rank's start has ended; `text` is for the log."""

    text: str


@dataclass(frozen=True, slots=True)
class RankReady:
    """The rank has loaded its part of the model, and has memory for `num_pages` pages."""

    held: HeldLayers
    num_pages: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class DockOpened:
    """The rank's dock is open; `blob` is what the other side needs to reach it."""

    blob: bytes


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The rank ends because of an error."""

    reason: str
    traceback: str


FollowerMessage: TypeAlias = JoinGang | PhaseEnded | RankReady | DockOpened | RankFailure | Event

# -- bytes -----------------------------------------------------------------------------------------------------------


def _kinds(union: Any) -> dict[str, type[Any]]:
    return {kind.__name__: kind for kind in get_args(union)}


_MAX_INT = 1 << 63  # exclusive; page numbers and counts are int64
_FROM_DRIVER, _FROM_FOLLOWER = _kinds(DriverMessage), _kinds(FollowerMessage)
_FIELDS: dict[type, tuple[tuple[str, Any], ...]] = {
    kind: tuple((field.name, get_type_hints(kind)[field.name]) for field in fields(kind))
    for kind in (*_FROM_DRIVER.values(), *_FROM_FOLLOWER.values(), Figures)
} | {GroupPages: tuple(get_type_hints(GroupPages).items())}


def encode(message: DriverMessage | FollowerMessage) -> bytes:
    """Return the message as bytes: its name and its fields, in order."""
    data: bytes = msgpack.packb([type(message).__name__, *_values(message)], default=_plain)
    return data


def decode_driver_message(data: bytes) -> DriverMessage:
    """Return a message of the driver. MalformedRankMessage: the bytes are none."""
    message: DriverMessage = _decode(data, _FROM_DRIVER)
    return message


def decode_follower_message(data: bytes) -> FollowerMessage:
    """Return a message of a follower. MalformedRankMessage: the bytes are none."""
    message: FollowerMessage = _decode(data, _FROM_FOLLOWER)
    return message


def _values(message: object) -> list[Any]:
    return [getattr(message, name) for name, _ in _FIELDS[type(message)]]


def _plain(value: object) -> Any:
    """Return what msgpack can write in the place of `value`."""
    match value:
        case Enum():
            return value.value
        case BaseModel():
            return value.model_dump()
        case _:
            return _values(value)


def _decode(data: bytes, kinds: Mapping[str, type[Any]]) -> Any:
    try:
        parts = msgpack.unpackb(data, use_list=False)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise MalformedRankMessage(f"not msgpack: {error}") from error
    if type(parts) is not tuple or not parts or type(parts[0]) is not str or parts[0] not in kinds:
        raise MalformedRankMessage("a message of no known kind")
    return _built(kinds[parts[0]], parts[1:])


def _built(kind: type[Any], values: Sequence[Any]) -> Any:
    hints = _FIELDS[kind]
    if len(values) != len(hints):
        raise MalformedRankMessage(f"{kind.__name__} with {len(values)} fields")
    return kind(*[_checked(hint, value, kind, name) for (name, hint), value in zip(hints, values, strict=True)])


def _checked(hint: Any, value: Any, kind: type, name: str) -> Any:
    """Return `value` as the type `hint`. `kind` and `name` are the field's, for the message of the error.

    A number is a count, a place, an epoch or seconds: none is negative. The scales in `HeldLayers` are checked by type.
    """
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is hint:  # not isinstance: True is an int to Python
        if (hint is int and not 0 <= value < _MAX_INT) or (hint is float and not value >= 0):  # nan is not
            raise MalformedRankMessage(f"{kind.__name__}.{name} is {value}")
        return value
    if get_origin(hint) is UnionType and type(None) in get_args(hint):  # X | None
        return None if value is None else _checked(get_args(hint)[0], value, kind, name)
    if get_origin(hint) is tuple and type(value) is tuple:
        if hint == HeldLayers:
            return _checked_layers(value, kind, name)
        item = get_args(hint)[0]
        return tuple([_checked(item, part, kind, name) for part in value])
    if hint in _FIELDS and type(value) is tuple:
        return _built(hint, value)
    if isinstance(hint, type) and issubclass(hint, Enum | BaseModel):
        try:
            return hint(value) if issubclass(hint, Enum) else hint.model_validate(value)
        except ValueError as error:
            raise MalformedRankMessage(f"{kind.__name__}.{name}: {error}") from error
    raise MalformedRankMessage(f"{kind.__name__}.{name} is a {type(value).__name__}")


def _checked_layers(rows: Sequence[Any], kind: type, name: str) -> Any:
    if all(type(row) is tuple and all(type(number) is int for number in row) for row in rows):
        return rows
    raise MalformedRankMessage(f"{kind.__name__}.{name} has a row that is not of numbers")
