"""The interface that moves bytes: one-sided writes of pages, each followed by a message, and messages alone.

A transport belongs to one thread, which makes progress by calling `poll`; only `wake` may be called from others. A
transport knows pages and bytes, not requests. Two exist: tcp.py, which needs nothing, and nixl.py, which is fast.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec
from msgspec import Raw, Struct

from crossdock.kvtransfer.layout import PoolSpec
from crossdock.kvtransfer.plan import GroupRanges, PageCopies

_VERSION = 4


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a pool, which stays in place until the transport is closed and no peer writes to it any more: NIXL
    cannot revoke access to registered memory (benchmarks/records/nixl.md)."""

    address: int
    nbytes: int
    cuda_device: int | None = None  # None: ordinary memory
    bytes_per_second: float | None = None  # of an emulated pool, which is counted and not there

    @classmethod
    def of(cls, buffer: bytearray | memoryview) -> "Memory":
        """Return the memory of any writable, contiguous buffer, which the caller keeps alive."""
        view = memoryview(buffer).cast("B")
        return cls(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes)


@dataclass(frozen=True, slots=True)
class Peer:
    """How another process reaches the dock of one rank. `name` is unique to a process: a restart has another name."""

    name: str
    transport: str
    address: bytes  # in the transport's own format
    spec: PoolSpec

    def pack(self) -> bytes:
        """Return the peer as a blob."""
        return _encoder.encode(_Blob(_VERSION, Raw(_encoder.encode(self))))

    @classmethod
    def unpack(cls, blob: bytes) -> "Peer":
        """Return the peer that `pack` made the blob from.

        Raises:
            ValueError: `blob` is of no dock, or of another version.
        """
        try:
            version, peer = msgspec.structs.astuple(_blob_decoder.decode(blob))
            if version != _VERSION:
                raise ValueError(f"version {version} of another release; this is {_VERSION}")
            return _peer_decoder.decode(peer)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a dock's blob: {error}") from error


class _Blob(Struct, frozen=True, array_like=True):
    """A peer, after the version of its form, which every release reads. Another release's blob may have more."""

    version: int
    peer: Raw


_encoder = msgspec.msgpack.Encoder()
_blob_decoder = msgspec.msgpack.Decoder(_Blob)
_peer_decoder = msgspec.msgpack.Decoder(Peer)


class TransportUnavailable(Exception):
    """This transport cannot be used on this machine; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message of `peer`: one that was sent alone, or one whose pages are now in place."""

    peer: str
    message: bytes


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The pages of a write are in place at the target, and its message is there or follows at once."""

    write: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A write has ended after an unknown part of its data."""

    write: int
    detail: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection with `peer` is broken. Its open writes have failed, or will with the next poll."""

    peer: str
    detail: str


TransportEvent: TypeAlias = Received | WriteDone | WriteFailed | PeerLost


class Transport(Protocol):
    """A way to move pages. `poll` reports whatever fails after `open`; `write` and `send` never raise."""

    kind: str
    """The name of the transport. Both ends must use the same one."""
    lost_is_fence: bool
    """Whether, after PeerLost, no write of that peer can change this pool any more."""
    busy_seconds: float
    """How long a poll may block while a transfer is under way; infinity if arrivals wake the poll."""
    idle_seconds: float
    """How long a poll may block while no transfer is under way."""

    def open(self, name: str, memory: Memory) -> bytes:
        """Make `memory` writable for every process that gets the returned address."""

    def connect(self, peer: Peer, page_bytes: int, num_pages: int, ranges: GroupRanges) -> None:
        """Prepare writes of `ranges` of this pool's pages (`num_pages` of `page_bytes`) into those of `peer`. Does not
        block."""

    def write(self, peer: str, copies: Sequence[PageCopies], message: bytes) -> int:
        """Begin to write pages, one to one, and deliver `message` when they are in place. Return the write's number.

        `poll` reports the end as WriteDone or WriteFailed with that number. The write fails if `peer` is not
        connected."""

    def send(self, peer: str, message: bytes) -> None:
        """Deliver `message`, unless the peer is lost or not connected. A sender's messages, and the messages of its
        completed writes, keep their order."""

    def poll(self, seconds: float) -> list[TransportEvent]:
        """Make progress and return what happened. Wait up to `seconds` if nothing did."""

    def wake(self) -> None:
        """End a waiting poll. May be called from any thread."""

    def disconnect(self, peer: str, *, is_idle: bool = False) -> None:
        """Forget `peer`. Open writes to it fail. `is_idle`: no transfer with it is under way, so nothing that it sends
        later can be part of one."""

    def close(self) -> None: ...


def host_view(memory: Memory) -> memoryview:
    """Return the bytes of ordinary memory.

    Raises:
        ValueError: this is the memory of a GPU.
    """
    if memory.cuda_device is not None:
        raise ValueError("only ordinary memory can be read and written here, not a GPU's")
    array: Any = (ctypes.c_char * memory.nbytes).from_address(memory.address)
    return memoryview(array).cast("B")
