"""Pages of emulated pools: messages travel over another transport, after the seconds that the bytes would take."""

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from crossdock.kvtransfer.plan import GroupRanges, PageCopies, bytes_by_group
from crossdock.kvtransfer.transport import Memory, Peer, Transport, TransportEvent, WriteDone, WriteFailed


class _Write(NamedTuple):
    """A write whose bytes are on their way."""

    number: int
    peer: str
    arrives: float
    message: bytes


class EmulatedTransport:
    """One link out of this pool, which sends one write at a time. `messages` carries all messages, and no page."""

    def __init__(self, messages: Transport, bytes_per_second: float) -> None:
        self.kind = messages.kind
        self.lost_is_fence = messages.lost_is_fence
        self.busy_seconds = messages.busy_seconds
        self.idle_seconds = messages.idle_seconds
        self._messages = messages
        self._rate = bytes_per_second
        self._page_bytes: dict[str, tuple[int, ...]] = {}  # of each group of layers, by peer
        self._travelling: deque[_Write] = deque()
        self._sent: dict[int, int] = {}  # numbers of writes, by their number at `messages`
        self._num_writes = 0
        self._free = 0.0  # when the link is

    def open(self, name: str, memory: Memory) -> bytes:
        return self._messages.open(name, memory)

    def connect(self, peer: Peer, page_bytes: int, num_pages: int, ranges: GroupRanges) -> None:
        self._page_bytes[peer.name] = bytes_by_group(ranges)
        self._messages.connect(peer, page_bytes, num_pages, ranges)

    def write(self, peer: str, copies: Sequence[PageCopies], message: bytes) -> int:
        """Deliver `message` when the link has had time for the pages, behind the writes before."""
        sizes = self._page_bytes.get(peer, ())
        num_bytes = sum(len(copy.source_pages) * sizes[copy.group] for copy in copies) if sizes else 0
        self._num_writes += 1
        self._free = max(self._free, time.monotonic()) + num_bytes / self._rate
        self._travelling.append(_Write(self._num_writes, peer, self._free, message))
        return self._num_writes

    def send(self, peer: str, message: bytes) -> None:
        self._messages.send(peer, message)

    def poll(self, seconds: float) -> list[TransportEvent]:
        """Wait for events of the messages, or for the bytes of the next write to have travelled."""
        self._deliver()
        if self._travelling:
            seconds = min(seconds, max(self._travelling[0].arrives - time.monotonic(), 0.0))
        events = [self._numbered(event) for event in self._messages.poll(seconds)]
        self._deliver()
        return events

    def wake(self) -> None:
        self._messages.wake()

    def disconnect(self, peer: str, *, is_idle: bool = False) -> None:
        self._page_bytes.pop(peer, None)
        self._messages.disconnect(peer, is_idle=is_idle)  # a write that travels fails when it is delivered

    def close(self) -> None:
        self._messages.close()

    def _deliver(self) -> None:
        while self._travelling and self._travelling[0].arrives <= time.monotonic():
            write = self._travelling.popleft()
            self._sent[self._messages.write(write.peer, (), write.message)] = write.number

    def _numbered(self, event: TransportEvent) -> TransportEvent:
        match event:
            case WriteDone(write):
                return WriteDone(self._sent.pop(write))
            case WriteFailed(write, detail):
                return WriteFailed(self._sent.pop(write), detail)
            case _:
                return event
