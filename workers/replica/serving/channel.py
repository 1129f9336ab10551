"""The queue between the engine's thread and one ingress: everything not yet fetched, merged into one message."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from crossdock.workers.report.advertise import Message
from crossdock.workers.report.live_profile import LiveProfile, PageChanges
from crossdock.workers.schedule.request.request import TokenDelta

MOST_SILENCE_S = 30.0
"""Seconds after which a reader that gives no sign of life loses its requests.

The connection of a reader that was killed ends at once; that of a stopped reader stays open. A living ingress gives a
sign every 8 s; one that is stopped for less than this goes on with its streams.
"""

_MOST_PAGES = 100_000  # page hashes queued for a reader that is behind
_MOST_DELTAS = 250_000  # queued: about 100 MB, or a minute of 100 steps a second with 40 streams


@dataclass(slots=True)
class Channel:
    """The messages one reader has not fetched yet. All deltas of a step arrive together, with a new live profile."""

    heard_at: float = field(default_factory=time.monotonic)  # when its reader last gave a sign of life
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _message: Message = field(default_factory=Message)
    _live: LiveProfile | None = None  # the last one
    _closed: bool = False

    @property
    def is_silent(self) -> bool:
        """Return whether the reader has given no sign of life for `MOST_SILENCE_S`."""
        return time.monotonic() - self.heard_at > MOST_SILENCE_S

    def hear(self) -> None:
        """Note a sign of life of the reader."""
        self.heard_at = time.monotonic()

    def put(
        self, deltas: Sequence[TokenDelta] = (), live: LiveProfile | None = None, pages: Sequence[PageChanges] = ()
    ) -> bool:
        """Queue the deltas of a step, a new live profile and changes of the prefix index.

        Returns False where the reader is too far behind: the channel is closed, and its queue is gone.
        """
        if len(self._message.deltas) + len(deltas) > _MOST_DELTAS:
            self._message = Message()
            self.close()
            return False
        self._message.deltas.extend(deltas)
        if live is not None:
            self._live = self._message.live = live
        if pages:
            behind = [*self._message.pages, *pages]
            while sum(len(changes.added) + len(changes.evicted) for changes in behind) > _MOST_PAGES:
                del behind[0]  # the reader sees by the numbers that one is missing
            self._message.pages = behind
        self._ready.set()
        return True

    def tell_peer(self, peer: bytes) -> None:
        """Queue the address at which other replicas reach this one's pages from now on."""
        self._message.peer = peer
        self._ready.set()

    def close(self) -> None:
        """End `messages` after the deltas that are queued."""
        self._closed = True
        self._ready.set()

    async def messages(self, heartbeat_s: float | None = None) -> AsyncIterator[Message]:
        """Yield one message per step, or one per several steps where the reader is slower than the engine.

        After `heartbeat_s` without news, yields the last live profile again: the reader knows that the replica lives.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s):  # Python 3.11's wait_for may swallow a cancellation
                    await self._ready.wait()
            is_quiet = not self._ready.is_set()
            self._ready.clear()
            message = self._message
            self._message = Message()
            if is_quiet:
                message.live = self._live
            if not self._closed or message.deltas:
                yield message
            if self._closed:
                return
