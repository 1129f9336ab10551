"""The messages between the ranks of a replica: each field's type and range is checked before a rank acts on one.

The driver sends steps and the calls of its dock to every follower. A follower reports its start and its dock's events.
"""

from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta, Raw
from pydantic import BaseModel

from crossdock.kvtransfer.calls import DockCall
from crossdock.kvtransfer.events import Event
from crossdock.kvtransfer.records import Count, Record
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.ranks.pool_layout import HeldLayers


class MalformedRankMessage(ValueError):
    """Bytes that are no message of this direction, or a field of the wrong type or out of range."""


# -- driver to followers ---------------------------------------------------------------------------------------------


class AllocatePool(Record, frozen=True):
    """Allocate the KV pool, and slots for pages in the host's memory."""

    num_pages: Count
    num_slots: Count


class RecordSteps(Record, frozen=True):
    """Record steps of up to so many sequences and tokens as CUDA graphs, where the device has graphs."""

    max_num_seqs: Count
    max_num_batched_tokens: Count
    most_drafts: Count


class CopyPages(Record, frozen=True):
    """Copy pages to slots in the host's memory, or back, before the steps that follow."""

    pages: tuple[Count, ...]
    slots: tuple[Count, ...]
    is_out: bool  # from the pool


PageName: TypeAlias = Annotated[bytes, Meta(min_length=17, max_length=17)]
"""The name of a page's files; see `page_format.name_of`."""


class OpenFiles(Record, frozen=True):
    """Open the folder of this rank's parts of pages, once the pool is allocated.

    `fingerprint`: of what the bytes of all ranks' parts depend on."""

    fingerprint: bytes


class WritePart(Record, frozen=True):
    """Write this rank's part of a page to its file, and report `FilesCalled`.

    `after`: messages that are handled first, all but calls of files: their copies fill the slots."""

    page: PageName
    slots: tuple[Count, ...]
    after: Count


class LoadPart(Record, frozen=True):
    """Fill pages with this rank's part of a page from its file, by way of slots, and report `FilesCalled`.

    `after`: messages that are handled first, all but calls of files: they use what the pages held before."""

    page: PageName
    slots: tuple[Count, ...]
    pages: tuple[Count, ...]
    after: Count


class LookForParts(Record, frozen=True):
    """Look which parts have come to this rank's folder and which have gone, and report `FilesCalled`."""


class ExpectParts(Record, frozen=True):
    """Note which parts will be loaded next, in this order, and report `FilesCalled`. Parts that were noted before are
    forgotten."""

    pages: tuple[PageName, ...]


FileCall: TypeAlias = WritePart | LoadPart | LookForParts | ExpectParts
"""A call of a rank's files. It is made beside the other messages, not behind them."""


class RunStep(Record, frozen=True):
    """Compute this rank's part of a step; `inputs` is a step that `StepSender` packed."""

    inputs: bytes


class LoadAdapter(Record, frozen=True):
    """Load this rank's part of an adapter, beside steps, and report `AdapterLoaded`."""

    name: str
    path: str
    fingerprint: str


class DropAdapter(Record, frozen=True):
    """Forget an adapter: no step to come reads it."""

    fingerprint: str


WeightMethod: TypeAlias = Literal["start", "join", "receive", "read", "check", "leave"]


class CallWeights(Record, frozen=True):
    """Call a method of the rank's new weights beside steps, and report `WeightsCalled`. `argument`: as JSON."""

    method: WeightMethod
    argument: str


class PutWeights(Record, frozen=True):
    """Compute with the weights that were read from the next step on."""


class OpenDock(Record, frozen=True):
    """Open the KV pool to transfers."""

    by_rank: tuple[HeldLayers, ...]  # the layers each rank holds
    model: str  # names the weights
    role: str
    transfer: TransferConfig


class CloseDock(Record, frozen=True):
    """Close the dock, whose transfers have ended: the memory of the pool is about to move."""


MemoryChange: TypeAlias = Literal[
    "give pages", "take pages", "give weights", "keep weights", "take weights", "forget steps", "record steps"
]


class ChangeMemory(Record, frozen=True):
    """Give the memory of the KV pool back or take the memory again, or give back that of weights until `PutWeights`.

    On a GPU also: have the host keep the weights until they are taken, and forget recorded steps until they are
    recorded again.
    """

    what: MemoryChange


class EndRank(Record, frozen=True):
    """End, after everything before this message is done."""


OrderedMessage: TypeAlias = (
    AllocatePool
    | CopyPages
    | OpenFiles
    | RecordSteps
    | RunStep
    | LoadAdapter
    | DropAdapter
    | CallWeights
    | PutWeights
    | OpenDock
    | CloseDock
    | ChangeMemory
    | EndRank
    | DockCall
)
"""A message that is handled in order with the steps."""

DriverMessage: TypeAlias = OrderedMessage | FileCall

# -- follower to driver ----------------------------------------------------------------------------------------------


class JoinWorkerGroup(Record, frozen=True):
    """The first message of a follower."""

    rank: Count


class PhaseEnded(Record, frozen=True):
    """A phase of the rank's start has ended; `text` is for the log."""

    text: str


class RankReady(Record, frozen=True):
    """The rank has loaded its part of the model, and has memory for `num_pages` pages."""

    held: HeldLayers
    num_pages: Count
    page_bytes: Count


class DockOpened(Record, frozen=True):
    """The rank's dock is open; `blob` is what the other side needs to reach it."""

    blob: bytes


class AdapterLoaded(Record, frozen=True):
    """The rank has loaded its part of an adapter, or could not, for the reason `failure`."""

    fingerprint: str
    failure: str


class WeightsCalled(Record, frozen=True):
    """The call to the rank's new weights has ended with checksums by name, or failed, for the reason `failure`."""

    failure: str
    checksums: dict[str, str]


class FilesCalled(Record, frozen=True):
    """The call of the rank's files has ended, or failed, for the reason `failure`."""

    failure: str
    is_done: bool  # the part is stored, or its pages are filled
    came: tuple[PageName, ...]
    gone: tuple[PageName, ...]


class RankFailure(Record, frozen=True):
    """The rank ends because of an error."""

    reason: str
    traceback: str


class _DockEvent(Record, frozen=True):
    """An event of the rank's dock: the name of its kind, and its fields as msgpack."""

    kind: str
    fields: Raw


FollowerMessage: TypeAlias = (
    JoinWorkerGroup
    | PhaseEnded
    | RankReady
    | DockOpened
    | AdapterLoaded
    | WeightsCalled
    | FilesCalled
    | RankFailure
    | Event
)

# -- bytes -----------------------------------------------------------------------------------------------------------


def _built(kind: type[Any], value: Any) -> Any:
    """Return the configuration of type `kind` that was sent as a map."""
    assert issubclass(kind, BaseModel)
    return kind.model_validate(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=BaseModel.model_dump)
_driver_decoder = msgspec.msgpack.Decoder(DriverMessage, dec_hook=_built)
_follower_decoder = msgspec.msgpack.Decoder(
    JoinWorkerGroup
    | PhaseEnded
    | RankReady
    | DockOpened
    | AdapterLoaded
    | WeightsCalled
    | FilesCalled
    | RankFailure
    | _DockEvent
)
_event_decoders = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(Event)}


def encode(message: DriverMessage | FollowerMessage) -> bytes:
    if isinstance(message, Record):
        return _encoder.encode(message)
    return _encoder.encode(_DockEvent(type(message).__name__, Raw(_encoder.encode(message))))


def decode_driver_message(data: bytes) -> DriverMessage:
    """Return a message of the driver. MalformedRankMessage: the bytes are no such message."""
    try:
        message: DriverMessage = _driver_decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise MalformedRankMessage(str(error)) from error
    return message


def decode_follower_message(data: bytes) -> FollowerMessage:
    """Return a message of a follower. MalformedRankMessage: the bytes are no such message."""
    try:
        found: Any = _follower_decoder.decode(data)
        message: FollowerMessage = (
            _event_decoders[found.kind].decode(found.fields) if isinstance(found, _DockEvent) else found
        )
    except KeyError as unknown:
        raise MalformedRankMessage(f"an event of unknown kind {unknown}") from None
    except (ValueError, RecursionError) as error:
        raise MalformedRankMessage(str(error)) from error
    return message
