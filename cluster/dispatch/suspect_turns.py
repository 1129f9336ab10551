"""Suspect requests are tried one at a time, so that one that ends replicas does not take the others with it."""

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True)
class SuspectTurns:
    """The turns of the suspect requests of one ingress. Belongs to one event loop."""

    longest_s: float  # of one turn
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _holder: str | None = None
    _timer: asyncio.TimerHandle | None = None

    async def enter(self, request_id: str) -> None:
        """Wait for the turn of this request. The turn ends with `leave`, or by itself after `longest_s`."""
        await self._turn.acquire()
        self._holder = request_id
        self._timer = asyncio.get_running_loop().call_later(self.longest_s, self.leave, request_id)

    def leave(self, request_id: str) -> None:
        """End the turn of this request, if it is its turn: it has a token, or has ended."""
        if self._holder != request_id:
            return
        assert self._timer is not None
        self._timer.cancel()
        self._holder = self._timer = None
        self._turn.release()
