"""One attempt at a request, its events that have not been handled, and the connections over which they come."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

from crossdock.cluster.dispatch.engine_client import EngineClient
from crossdock.cluster.dispatch.ingress_metrics import RequestWatch
from crossdock.cluster.dispatch.loop_clock import LoopClock
from crossdock.router.actions import Action, Fail
from crossdock.router.request_life import RequestLife
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.request.request import TokenDelta


class DeltaReader(Protocol):
    """Reads deltas in the turn of the event loop in which they come: no task wakes up for them."""

    def is_ready(self) -> bool:
        """Return whether a delta may be read now."""

    def read(self, delta: TokenDelta) -> bool:
        """Read a delta that does not end the request. Return False where the reader wants no more: the delta is then
        the next event."""


Event: TypeAlias = Callable[[float], list[Action]]
"""Takes the time at which it is handled, and returns what to do."""


class Events:
    """A queue for the one task that reads it. asyncio.Queue costs three times as much, for locks of its own."""

    __slots__ = ("_reader", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()
        self._reader: asyncio.Future[None] | None = None  # is done once there is an event

    def empty(self) -> bool:
        return not self._waiting

    def put_nowait(self, event: Event) -> None:
        self._waiting.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Event:
        while not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._waiting.popleft()

    def clear(self) -> None:
        self._waiting.clear()


@dataclass(slots=True, eq=False)
class ReplicaConnection:
    """The stream of messages from one replica, and the attempts whose tokens come over it."""

    name: str
    client: EngineClient
    profile: SchedulingProfile
    attempts: dict[str, "Attempt"] = field(default_factory=dict)  # by request
    aborting: list[tuple[str, int]] = field(default_factory=list)  # (request, attempt), in the next call
    asking: list["Attempt"] = field(default_factory=list)  # in the next call
    heard_at: float = 0.0  # seconds on the ingress's clock
    following: asyncio.Task[None] | None = None  # reads the stream
    is_silent: bool = False  # for too long
    is_dead: bool = False  # its process is known to have ended
    is_open: bool = False
    is_leaving: bool = False  # the replica takes no new requests

    def hear(self, now: float) -> None:
        """Note that a message has come."""
        self.heard_at = now

    def note_peer(self, peer: bytes) -> None:
        """Note where other replicas reach the pages of this one from now on."""
        self.profile = self.profile.model_copy(update={"peer": peer})

    def open(self) -> None:
        """Note that the stream has begun."""
        self.is_open = True

    def give_up(self) -> None:
        """End a stream that is silent for too long."""
        assert self.following is not None
        self.is_silent = True
        self.following.cancel()

    def end(self, *, is_dead: bool) -> None:
        """Note that the stream has ended. `is_dead`: the replica's process has ended too."""
        self.is_open = False
        self.is_dead = is_dead

    def take_aborting(self) -> list[tuple[str, int]]:
        """Return the attempts to abort with one call."""
        attempts = self.aborting
        self.aborting = []
        return attempts

    def take_asking(self) -> list["Attempt"]:
        """Return the attempts to ask about with one call."""
        attempts = self.asking
        self.asking = []
        return attempts


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a request: the replicas that work on it, and the events that have not been handled."""

    life: RequestLife
    clock: LoopClock
    number: int = -1
    events: Events = field(default_factory=Events)
    connections: dict[str, ReplicaConnection] = field(default_factory=dict)  # attached connections, by name
    submitting: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by replica
    _reader: DeltaReader | None = field(default=None, init=False)
    _watch: RequestWatch | None = field(default=None, init=False)  # counts the tokens of the reader
    _is_waiting: bool = field(default=False, init=False)  # in `next_actions`
    _unread: deque[int] = field(default_factory=deque, init=False)  # values of each delta in `events`
    _num_unread: int = field(default=0, init=False)  # the sum of `_unread`

    @property
    def num_unread(self) -> int:
        """Return how many values wait because the client does not read: tokens, and their log-probabilities.

        The next delta's do not count: they may be many, and wait a moment where the client reads, too.
        """
        return self._num_unread - self._unread[0] if self._unread else 0

    def read_with(self, reader: DeltaReader | None, watch: RequestWatch) -> None:
        """Have a reader, if there is one, read deltas that come while all earlier ones have been handled."""
        self._reader = reader
        self._watch = watch

    def add(self, name: str, delta: TokenDelta, now: float) -> None:
        """Have the reader read a replica's delta, or add the delta to the events."""
        reader = self._reader
        if reader is not None and self._is_waiting and self.events.empty() and reader.is_ready():
            assert self._watch is not None
            if self.life.takes(name, delta, now):
                try:
                    if reader.read(delta):
                        self._watch.read(delta)
                    else:
                        self.events.put_nowait(lambda now: [delta])
                except Exception as error:  # of this request alone
                    failure = Fail(error)
                    self.events.put_nowait(lambda now: [failure])
                return
        sampling = self.life.submission.sampling
        each = 0 if delta.logprobs is None else max(sampling.logprobs or 0, len(sampling.logprob_token_ids))
        of_prompt = len(delta.prompt_logprobs or ()) * (1 + (sampling.prompt_logprobs or 0))
        self._unread.append(max(1, len(delta.token_ids) * (1 + each) + of_prompt))
        self._num_unread += self._unread[-1]
        self.events.put_nowait(partial(self._read, name, delta))

    def clear(self) -> None:
        """Forget all events."""
        self.events.clear()
        self._unread.clear()
        self._num_unread = 0

    def _read(self, name: str, delta: TokenDelta, now: float) -> list[Action]:
        self._num_unread -= self._unread.popleft()
        return self.life.tokens(name, delta, now)

    async def next_actions(self) -> list[Action]:
        """Wait for the next event, and return what follows."""
        self._is_waiting = True
        event = await self.events.get()
        self._is_waiting = False
        return event(self.clock.now())

    def check_deadline(self, now: float) -> None:
        """Add an event where the deadline of the request has passed and nothing else has happened."""
        if self.life.deadline <= now and self.events.empty():
            self.events.put_nowait(self.life.tick)
