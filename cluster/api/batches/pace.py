"""How many lines of batches are in flight: as many as replicas compute, and a few that wait for their first token."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from copy import copy
from typing import cast

from crossdock.cluster.dispatch.dispatcher import DeltaReader, ModelCard, TokenSource
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Submission
from crossdock.workers.schedule.shares import Shares

_AHEAD_S = 0.5  # of work that waits at replicas: a line that ends has a successor there
_LEAST = 4  # lines that wait for each replica, however slow it is
_MOST = 2048  # lines in flight of one ingress; one API key has half of them at most
_RATES = 64  # newest first tokens that tell how fast lines are taken


class Pace:
    """Lets lines begin so that the fleet always has some to choose from, and clients find no long queue before them.

    It is the source of tokens for lines: the first token of a request tells that a replica computes the line. Owners
    of lines take turns.
    """

    def __init__(self, source: TokenSource, num_replicas: Callable[[], int]) -> None:
        self._source = source
        self._num_replicas = num_replicas
        self._owners: dict[str, str] = {}  # of the lines in flight, by request
        self._waiting: set[str] = set()  # requests without a token
        self._num_waiting: Counter[str] = Counter()  # … of each owner
        self._shares = Shares(_MOST)  # of the lines in flight
        self._queues: dict[str, deque[tuple[str, asyncio.Future[None]]]] = {}  # lines to begin, by owner in turn
        self._first_tokens = deque[float](maxlen=_RATES)  # when they came, seconds

    def of(self, source: TokenSource) -> "Pace":
        """Return this pace as the source of another model's tokens: lines of all models wait in one queue."""
        other = copy(self)
        other._source = source
        return other

    @property
    def model(self) -> ModelCard:
        return self._source.model

    @property
    def num_entered(self) -> int:
        """Return how many lines are in flight."""
        return len(self._owners)

    @property
    def most_waiting(self) -> int:
        """Return how many lines may wait: what the fleet began lately in `_AHEAD_S`, but a few for each replica."""
        times = self._first_tokens
        seconds = times[-1] - times[0] if len(times) > 1 else 0.0
        recent = _AHEAD_S * len(times) / seconds if seconds else 0.0
        return max(int(recent), _LEAST * max(self._num_replicas(), 1))

    async def enter(self, owner: str, request_id: str) -> None:
        """Wait until a line may begin. Its request then counts as one that waits for its first token."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = request_id, place
        self._queues.setdefault(owner, deque()).append(entry)
        self._admit()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # the place was given in the same turn of the loop
                self.leave(request_id)
            elif entry in (queue := self._queues.get(owner, deque())):
                queue.remove(entry)
                if not queue:
                    del self._queues[owner]
            raise

    def leave(self, request_id: str) -> None:
        """Note that the line of a request is over."""
        self._shares.release(self._owners[request_id], 1)
        self._taken(request_id)
        del self._owners[request_id]
        self._admit()

    def _taken(self, request_id: str) -> None:
        """Count a request no longer as one that waits for its first token."""
        if request_id in self._waiting:
            self._waiting.discard(request_id)
            self._num_waiting -= Counter({self._owners[request_id]: 1})  # an owner without any is not kept

    def _admit(self) -> None:
        """Let lines begin. A place goes to the owner with the fewest lines that wait; equal ones take turns."""
        while len(self._waiting) < self.most_waiting:
            able = [owner for owner in self._queues if self._shares.room(owner) > 0]
            if not able:
                return
            owner = min(able, key=lambda owner: self._num_waiting[owner])
            queue = self._queues.pop(owner)
            request_id, place = queue.popleft()
            if queue:
                self._queues[owner] = queue  # as the last
            if place.cancelled():
                continue
            self._owners[request_id] = owner
            self._waiting.add(request_id)
            self._num_waiting[owner] += 1
            self._shares.take(owner, 1)
            place.set_result(None)

    async def generate(self, submission: Submission, reader: DeltaReader | None = None) -> AsyncIterator[TokenDelta]:
        """Yield the deltas of the source. `reader`: as its own."""
        deltas = self._source.generate(submission, reader)
        async with aclosing(cast("aclosing[AsyncIterator[TokenDelta]]", deltas)):  # type: ignore[type-var]
            async for delta in deltas:
                if delta.token_ids and submission.request_id in self._waiting:
                    self._taken(submission.request_id)
                    self._first_tokens.append(asyncio.get_running_loop().time())
                    self._admit()
                yield delta
