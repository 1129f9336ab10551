"""How many lines of batches are in flight: as many as replicas compute, and a few that wait for their first token."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from copy import copy
from typing import cast

from crossdock.cluster.dispatch.dispatcher import DeltaReader, ModelCard, TokenSource
from crossdock.workers.schedule.request import TokenDelta
from crossdock.workers.schedule.submission import Submission

_AHEAD_S = 0.5  # of work that waits at replicas: a line that ends has a successor there
_LEAST = 4  # lines that wait for each replica, however slow it is
_MOST = 1024  # lines in flight of one ingress: their bodies and answers are in its memory
_RATES = 64  # newest first tokens that tell how fast lines are taken


class Pace:
    """Lets lines begin so that the fleet always has some to choose from, and clients find no long queue before them.

    It is the source of tokens for lines: the first token of a request tells that a replica computes the line.
    """

    def __init__(self, source: TokenSource, num_replicas: Callable[[], int]) -> None:
        self._source = source
        self._num_replicas = num_replicas
        self._waiting: set[str] = set()  # requests without a token
        self._num_entered = 0  # lines in flight
        self._first_tokens = deque[float](maxlen=_RATES)  # when they came, seconds
        self._changed = asyncio.Event()

    def of(self, source: TokenSource) -> "Pace":
        """Return this pace as the source of another model's tokens: lines of all models wait in one queue."""
        other = copy(self)
        other._source = source
        return other

    @property
    def model(self) -> ModelCard:
        return self._source.model

    @property
    def most_waiting(self) -> int:
        """Return how many lines may wait: what the fleet began lately in `_AHEAD_S`, but a few for each replica."""
        times = self._first_tokens
        seconds = times[-1] - times[0] if len(times) > 1 else 0.0
        recent = _AHEAD_S * len(times) / seconds if seconds else 0.0
        return max(int(recent), _LEAST * max(self._num_replicas(), 1))

    async def enter(self) -> None:
        """Wait until another line may begin."""
        while self._num_entered >= _MOST or len(self._waiting) >= self.most_waiting:
            self._changed.clear()
            await self._changed.wait()
        self._num_entered += 1

    def leave(self) -> None:
        """Note that a line that has entered is over."""
        self._num_entered -= 1
        self._changed.set()

    def begin(self, request_id: str) -> None:
        """Note that a line waits for its first token."""
        self._waiting.add(request_id)

    def end(self, request_id: str) -> None:
        """Note that the line of a request is over."""
        self._waiting.discard(request_id)
        self.leave()

    async def generate(self, submission: Submission, reader: DeltaReader | None = None) -> AsyncIterator[TokenDelta]:
        """Yield the deltas of the source. `reader`: as its own."""
        deltas = self._source.generate(submission, reader)
        async with aclosing(cast("aclosing[AsyncIterator[TokenDelta]]", deltas)):  # type: ignore[type-var]
            async for delta in deltas:
                if delta.token_ids and submission.request_id in self._waiting:
                    self._waiting.discard(submission.request_id)
                    self._first_tokens.append(asyncio.get_running_loop().time())
                    self._changed.set()
                yield delta
