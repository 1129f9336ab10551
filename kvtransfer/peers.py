"""The other docks that one dock knows: how to reach each, which are connected, and which are dead."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from crossdock.kvtransfer.fence import RecentNames
from crossdock.kvtransfer.layout import PoolSpec, check_compatible
from crossdock.kvtransfer.plan import plan_writes
from crossdock.kvtransfer.transport import Peer, Transport

_MAX_PEERS = 512
"""Peers known without a transfer under way. Most that leave say nothing, and each may hold descriptors of all pages."""


class Peers:
    """The peers of one dock. Belongs to the dock's thread, but for `unpack`."""

    def __init__(self, transport: Transport, spec: PoolSpec) -> None:
        self._transport = transport
        self._spec = spec
        self._known: OrderedDict[str, Peer] = OrderedDict()  # the one used longest ago first
        self._connected: set[str] = set()
        self._dead = RecentNames()

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def spec_of(self, name: str) -> PoolSpec | None:
        """Return the description of a peer's pool; None: the peer is not known, or is dead."""
        peer = self._known.get(name)
        return None if peer is None else peer.spec

    def unpack(self, blobs: Sequence[bytes]) -> list[Peer]:
        """Return the peers that the blobs describe. May be called from any thread.

        Raises:
            IncompatiblePools: the pools cannot exchange pages; the message shows both.
            ValueError: there is no blob, or one is of another transport, or of no dock.
        """
        if not blobs:
            raise ValueError("no blobs: at least one rank is needed")
        peers = [_unpack(blob) for blob in blobs]
        for peer in peers:
            if peer.transport != self._transport.kind:
                raise ValueError(f"{peer.name} uses {peer.transport}, this dock {self._transport.kind}")
            check_compatible(self._spec, peer.spec)
        return peers

    def meet(self, peers: Iterable[Peer], busy: Callable[[], set[str]]) -> None:
        """Note how to reach peers. Beyond a number, forget those that were used longest ago. `busy` returns the names
        of the peers of all transfers under way, which are never forgotten."""
        names = set()
        for peer in peers:
            self._known[peer.name] = peer
            self._known.move_to_end(peer.name)
            names.add(peer.name)
        if len(self._known) > _MAX_PEERS:
            names |= busy()
            idle = [name for name in self._known if name not in names]
            for name in idle[: len(self._known) - _MAX_PEERS]:
                del self._known[name]
                self.disconnect(name, is_idle=True)

    def introduce(self, name: str, blob: bytes, busy: Callable[[], set[str]]) -> None:
        """Note how to answer a peer that knows this dock, though no call has named it.

        Raises:
            IncompatiblePools: the pools cannot exchange pages.
            ValueError: the blob is of no dock, of another one than `name`, or of another transport.
        """
        (peer,) = self.unpack([blob])
        if peer.name != name:
            raise ValueError(f"{name} sent the blob of {peer.name}")
        self.meet([peer], busy)

    def connect(self, name: str) -> None:
        """Connect to a peer, unless that has happened. A peer known to be dead stays unconnected: the transport drops
        messages to it, and fails writes."""
        peer = self._known.get(name)
        if peer and name not in self._connected:
            ranges = plan_writes(self._spec, peer.spec)
            self._transport.connect(peer, self._spec.page_bytes, self._spec.num_pages, ranges)
            self._connected.add(name)

    def disconnect(self, name: str, *, is_idle: bool) -> None:
        """Close the connection to a peer. `is_idle`: no transfer with it is under way."""
        self._transport.disconnect(name, is_idle=is_idle)
        self._connected.discard(name)

    def note_death(self, name: str) -> None:
        self._dead.add(name)

    def bury(self, names: Iterable[str]) -> list[str]:
        """Return the names of peers that are known to be dead, and forget how to reach these peers."""
        dead = [name for name in names if name in self._dead]
        for name in dead:
            self._known.pop(name, None)
        return dead


_unpack = lru_cache(maxsize=256)(Peer.unpack)  # a replica meets the same few peers again and again
