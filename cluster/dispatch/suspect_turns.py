"""Suspect requests are tried one at a time: a request that ends replicas must not take other requests with it."""

import asyncio
from dataclasses import dataclass, field

MOST_WAIT_S = 10.0
"""Seconds in which every suspect gets its turn.

Many requests are suspect at once where a replica with a long queue dies: then turns are short, and a few suspects are
tried beside each other."""

_LEAST_TURN_S = 0.1


@dataclass(slots=True)
class SuspectTurns:
    """The turns of the suspect requests of one ingress. Belongs to one event loop."""

    longest_s: float  # of one turn
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: list[float] = field(default_factory=list)  # since when, the first to get a turn first
    _holder: str | None = None
    _timer: asyncio.TimerHandle | None = None

    async def enter(self, request_id: str) -> None:
        """Wait for the turn of this request. The turn ends with `leave`, or by itself after a while."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._waiting.append(began)
        try:
            await self._turn.acquire()
        finally:
            self._waiting.remove(began)
        oldest = loop.time() - self._waiting[0] if self._waiting else 0.0
        seconds = turn_seconds(self.longest_s, len(self._waiting), oldest)
        self._holder = request_id
        self._timer = loop.call_later(seconds, self.leave, request_id)

    def leave(self, request_id: str) -> None:
        """End the turn of this request, if it is its turn: it has a token, or has ended."""
        if self._holder != request_id:
            return
        assert self._timer is not None
        self._timer.cancel()
        self._holder = self._timer = None
        self._turn.release()


def turn_seconds(longest: float, num_waiting: int, oldest: float) -> float:
    """Return how long a turn may last while others wait, the oldest for `oldest` seconds."""
    if not num_waiting:
        return longest
    return min(longest, max(_LEAST_TURN_S, (MOST_WAIT_S - oldest) / num_waiting))
