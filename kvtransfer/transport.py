"""What moves bytes: one-sided writes of pages, each followed by a message, and messages alone.

A transport belongs to one thread, which makes progress by calling `poll`; only `wake` may be called from others. It
knows pages and bytes, not requests. Two exist: tcp.py, which needs nothing, and nixl.py, which is fast.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgpack

from crossdock.kvtransfer.layout import LayerShape, PoolSpec, Shard
from crossdock.kvtransfer.plan import ByteRange

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Memory:
    """A pool as the transports see it. It must stay where it is until the transport is closed and every peer that
    knew it is gone: NIXL cannot revoke what it has registered (facts/nixl.md)."""

    address: int
    nbytes: int
    cuda_device: int | None = None  # None: ordinary memory

    @classmethod
    def of(cls, buffer: bytearray | memoryview) -> "Memory":
        """Of anything writable and contiguous with the buffer protocol; the caller keeps it alive."""
        view = memoryview(buffer).cast("B")
        return cls(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes)


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank's dock, as another may reach it. `name` is unique to a process: a restarted one has another."""

    name: str
    transport: str
    address: bytes  # the transport's own
    spec: PoolSpec

    def pack(self) -> bytes:
        spec = self.spec
        layers = [(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in spec.layers]
        shards = [(shard.first_layer, shard.heads) for shard in spec.shards]
        pool = [spec.model, spec.dtype, spec.itemsize, spec.page_size, layers, shards, spec.rank, spec.num_pages]
        data: bytes = msgpack.packb([_VERSION, self.name, self.transport, self.address, pool])
        return data

    @classmethod
    def unpack(cls, blob: bytes) -> "Peer":
        """ValueError if `blob` is not what `pack` makes."""
        try:
            version, name, transport, address, pool = msgpack.unpackb(blob, use_list=False)
            if version != _VERSION:
                raise ValueError(f"version {version} of another release; this is {_VERSION}")
            model, dtype, itemsize, page_size, layers, shards, rank, num_pages = pool
            spec = PoolSpec(
                model,
                dtype,
                itemsize,
                page_size,
                tuple(LayerShape(*layer) for layer in layers),
                tuple(Shard(first_layer, heads) for first_layer, heads in shards),
                rank,
                num_pages,
            )
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise ValueError(f"not a dock's blob: {error}") from error
        return cls(name, transport, address, spec)


class TransportUnavailable(Exception):
    """This transport cannot be used here; the message says why."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message of `peer`: one that was sent alone, or one whose pages are now in place."""

    peer: str
    message: bytes


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The pages are in place at the target, and its message is with it or right behind."""

    write: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    write: int
    detail: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection with `peer` is broken. Its open writes have failed, or will with the next poll."""

    peer: str
    detail: str


TransportEvent: TypeAlias = Received | WriteDone | WriteFailed | PeerLost


class Transport(Protocol):
    """See the module. Whatever fails after `open` is told by `poll`, never raised by `write` or `send`."""

    kind: str
    """Both ends must be of one kind."""
    lost_is_fence: bool
    """Whether, after PeerLost, nothing of that peer's writes can still change our pool."""
    busy_seconds: float
    """How long a poll may block while something is awaited; infinity where arrivals wake it."""
    idle_seconds: float
    """The same, while nothing is awaited."""

    def open(self, name: str, memory: Memory) -> bytes:
        """Makes `memory` writable for those who get the address that this returns."""

    def connect(self, peer: Peer, page_bytes: int, num_pages: int, ranges: Sequence[ByteRange]) -> None:
        """Prepares to write `ranges` of our pages (`num_pages` of `page_bytes`) into `peer`'s. Does not wait."""

    def write(self, peer: str, source_pages: Sequence[int], target_pages: Sequence[int], message: bytes) -> int:
        """Begins to write pages, one to one, and delivers `message` when they are in place. Returns the write's
        number for WriteDone or WriteFailed, one of which comes, if ever it ends. Fails if `peer` is not connected."""

    def send(self, peer: str, message: bytes) -> None:
        """Delivers `message`, unless the peer is lost or not connected. One sender's messages and the messages of its
        completed writes keep their order."""

    def poll(self, seconds: float) -> list[TransportEvent]:
        """Makes progress and returns what happened; waits up to `seconds` if nothing did."""

    def wake(self) -> None:
        """Ends a waiting poll. From any thread."""

    def disconnect(self, peer: str) -> None:
        """Forgets `peer`; open writes to it fail."""

    def close(self) -> None: ...


def host_view(memory: Memory) -> memoryview:
    """The bytes of ordinary memory; ValueError for a GPU's."""
    if memory.cuda_device is not None:
        raise ValueError("this transport reads and writes ordinary memory only, not a GPU's")
    array: Any = (ctypes.c_char * memory.nbytes).from_address(memory.address)
    return memoryview(array).cast("B")
