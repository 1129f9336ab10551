"""Suspect requests wait for their turns on an event loop: see `TurnQueue`."""

import asyncio
from dataclasses import dataclass, field

from crossdock.router.turn_queue import TurnQueue


@dataclass(slots=True)
class SuspectTurns:
    """The turns of the suspect requests of one ingress. Belongs to one event loop."""

    queue: TurnQueue
    _entering: dict[str, asyncio.Future[None]] = field(default_factory=dict)  # by waiting request
    _timer: asyncio.TimerHandle | None = None

    async def enter(self, request_id: str) -> None:
        """Wait for the turn of this request. The turn ends with `leave`, or by itself after a while."""
        loop = asyncio.get_running_loop()
        self._entering[request_id] = begun = loop.create_future()
        self.queue.enter(request_id, loop.time())
        self._begin()
        try:
            await begun
        except asyncio.CancelledError:
            self._entering.pop(request_id, None)
            self.leave(request_id)  # its turn may have begun in this moment
            raise

    def leave(self, request_id: str) -> None:
        """End the turn of this request, if it is its turn: it has a token, or has ended."""
        if self.queue.leave(request_id):
            self._begin()

    def _begin(self) -> None:
        """Begin the next turn, if it is time, and look again when it ends by itself."""
        loop = asyncio.get_running_loop()
        begun = self.queue.begin(loop.time())
        if self._timer is not None and (begun is not None or self.queue.holder is None):
            self._timer.cancel()
            self._timer = None
        if begun is not None:
            self._timer = loop.call_at(self.queue.ends_at, self._begin)
            waiting = self._entering.pop(begun)
            if not waiting.done():  # else it is cancelled in this moment, and leaves
                waiting.set_result(None)
