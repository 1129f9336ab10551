"""The connections of an ingress to the replicas: one stream of messages from each, opened again when it is lost."""

import asyncio
import contextlib
import contextvars
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from crossdock.router.fleet import Fleet
from crossdock.router.request_life import Action, ReplicaLost, RequestLife, Timeouts
from crossdock.workers.report.advertise import Message
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.request import Submission

logger = logging.getLogger("ray.serve")

_DEAD_PEERS = 64  # remembered for replicas that were out of reach when those died

RemoteMethod: TypeAlias = Literal[
    "abort",
    "assign_role",
    "live_requests",
    "metrics_text",
    "peer_dead",
    "progress",
    "timelines",
    "watched",
]
"""The methods of `Replica` that are called with plain data and return plain data."""


class ReplicaDead(ReplicaLost):
    """The process of a replica is known to have ended: it does not write to any memory any more."""


class EngineClient(Protocol):
    """One replica: behind a Serve handle, or in this process."""

    def messages(self) -> AsyncIterator[Message]:
        """Open the stream of this ingress and yield what the replica sends. From its first message on, the replica
        accepts submissions."""
        ...

    async def submit(self, submission: Submission) -> int:
        """Submit a request. Returns the number of the last live profile that does not include it.

        Raises:
            ValueError: the request can never be served; the message names the field.
            Overloaded: its class's promise cannot be kept.
        """
        ...

    async def close(self) -> None:
        """End the stream of this ingress; its requests are aborted."""
        ...

    async def call(self, method: RemoteMethod, *arguments: Any) -> Any:
        """Call a method of the replica."""
        ...


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt at a request: the replicas that work on it, and the events that have not been handled."""

    life: RequestLife
    events: "asyncio.Queue[Callable[[float], list[Action]]]" = field(default_factory=asyncio.Queue)
    connections: "dict[str, ReplicaConnection]" = field(default_factory=dict)  # that are not detached, by name
    submitting: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by replica
    aborting: set[asyncio.Task[Any]] = field(default_factory=set)

    async def next_actions(self) -> list[Action]:
        """Wait for the next event, or for the deadline of the request, and return what follows."""
        if self.events.empty():
            try:
                async with asyncio.timeout(self.life.deadline - time.monotonic()):
                    event = await self.events.get()
            except TimeoutError:
                return self.life.tick(time.monotonic())
        else:
            event = self.events.get_nowait()
        return event(time.monotonic())


@dataclass(slots=True, eq=False)
class ReplicaConnection:
    """The stream of messages from one replica, and the attempts whose tokens come over it."""

    name: str
    client: EngineClient
    profile: SchedulingProfile
    attempts: dict[str, Attempt] = field(default_factory=dict)  # by request
    is_open: bool = False
    is_leaving: bool = False  # the replica takes no new requests


class ReplicaConnections:
    """The connections to the replicas that take new requests. Belongs to one event loop."""

    def __init__(self, fleet: Fleet, timeouts: Timeouts) -> None:
        """`fleet` is the router of this ingress; only replicas with an open stream are in it."""
        self._fleet = fleet
        self._timeouts = timeouts
        self._members: dict[str, tuple[EngineClient, SchedulingProfile]] = {}  # as Serve lists them
        self._connections: dict[str, ReplicaConnection] = {}
        self._dead: deque[bytes] = deque(maxlen=_DEAD_PEERS)  # whose KV transfers are over for good
        self._background: set[asyncio.Task[Any]] = set()

    def __getitem__(self, name: str) -> ReplicaConnection:
        return self._connections[name]

    def opened(self) -> list[ReplicaConnection]:
        """Return the connections whose stream has begun."""
        return [connection for connection in self._connections.values() if connection.is_open]

    async def wait_until_one_is_open(self, seconds: float) -> None:
        """Wait while there are replicas, none with an open stream: in an upgrade all may be new."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._connections and not self.opened():
                    await asyncio.sleep(0.02)

    # -- members -----------------------------------------------------------------------------------------------------

    def join(self, name: str, client: EngineClient, profile: SchedulingProfile) -> None:
        """Connect to a replica that is up. `profile`: what it advertises."""
        if name not in self._members:
            self._members[name] = client, profile
            self._open(name)

    def leave(self, name: str) -> None:
        """Give a replica no new requests. Its running ones go on for as long as it lives."""
        _, profile = self._members.pop(name, (None, None))
        connection = self._connections.pop(name, None)
        if connection is None and profile is not None:  # it was lost, and Serve has given it up too
            self._report_death(profile.peer)
        if connection is not None:
            self._fleet.leave(name)
            connection.is_leaving = True
            self._close_if_done(connection)

    async def close(self) -> None:
        """Leave every replica; the requests of this ingress are aborted there."""
        connections = list(self._connections.values())
        self._members.clear()
        await asyncio.gather(*(connection.client.close() for connection in connections), return_exceptions=True)

    # -- attempts ----------------------------------------------------------------------------------------------------

    def attach(self, attempt: Attempt, name: str) -> ReplicaConnection:
        """Have the events of a replica reach an attempt."""
        connection = attempt.connections[name] = self._connections[name]
        connection.attempts[attempt.life.submission.id] = attempt
        return connection

    def detach(self, attempt: Attempt, name: str, is_running: bool) -> None:
        """End what connects an attempt with a replica; abort the request there if it may be running."""
        connection, request_id = attempt.connections.pop(name), attempt.life.submission.id
        submitting = attempt.submitting.pop(name, None)
        if submitting is not None:
            submitting.cancel()
        connection.attempts.pop(request_id, None)
        if is_running and connection.is_open:
            attempt.aborting.add(self.spawn(connection.client.call("abort", [request_id])))
        self._close_if_done(connection)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` outside the HTTP request that needs it: Serve would cancel its calls when that client leaves."""
        task = contextvars.Context().run(asyncio.get_running_loop().create_task, work)
        self._background.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("a background call to a replica failed: %s", task.exception())

    # -- streams -----------------------------------------------------------------------------------------------------

    def _open(self, name: str) -> None:
        connection = self._connections[name] = ReplicaConnection(name, *self._members[name])
        self.spawn(self._follow(connection))

    def _close_if_done(self, connection: ReplicaConnection) -> None:
        """Close the stream of a leaving replica: it counts as a running request and would hold up the drain."""
        if connection.is_leaving and not connection.attempts and connection.is_open:
            self.spawn(connection.client.close())

    async def _follow(self, connection: ReplicaConnection) -> None:
        """Pass every message of a replica's stream to the router and to the attempts, until the stream ends."""
        name = connection.name
        loss = ReplicaLost(f"replica {name} ended its stream")
        stream = connection.client.messages()
        try:
            while True:
                async with asyncio.timeout(self._timeouts.silence_s):
                    message = await anext(stream)
                if not connection.is_open:
                    self._opened(connection)
                if message.live is not None:
                    self._fleet.hear(name, message.live, time.monotonic())
                for changes in message.pages:
                    self._fleet.hear_pages(name, changes)
                for delta in message.deltas:
                    attempt = connection.attempts.get(delta.request_id)
                    if attempt is not None:
                        attempt.events.put_nowait(partial(attempt.life.tokens, name, delta))
        except StopAsyncIteration:
            pass
        except TimeoutError:
            loss = ReplicaLost(f"replica {name} has been silent for {self._timeouts.silence_s:.0f} s")
        except ReplicaLost as known:
            loss = known
        except Exception as cause:
            loss = ReplicaLost(f"replica {name} is lost: {type(cause).__name__}")
            loss.__cause__ = cause
        finally:
            self._lost(connection, loss)

    def _opened(self, connection: ReplicaConnection) -> None:
        connection.is_open = True
        for peer in self._dead:
            self.spawn(connection.client.call("peer_dead", peer))
        if self._connections.get(connection.name) is connection:  # else it has left already
            self._fleet.join(connection.name, connection.profile, time.monotonic())

    def _lost(self, connection: ReplicaConnection, loss: ReplicaLost) -> None:
        name, connection.is_open = connection.name, False
        for attempt in connection.attempts.values():
            attempt.events.put_nowait(partial(attempt.life.lost, name, attempt.life.attempt, loss))
        if self._connections.get(name) is connection:
            del self._connections[name]
            self._fleet.leave(name)
        if isinstance(loss, ReplicaDead):
            self._report_death(connection.profile.peer)
        if name in self._members:
            logger.warning("%s", loss)
            self.spawn(self._rejoin(name))

    def _report_death(self, peer: bytes) -> None:
        """Notify every replica that a process has ended. It may hold pages for that writer on behalf of a request that
        was aborted before, which no other message would free."""
        if peer and peer not in self._dead:
            self._dead.append(peer)
            for connection in self.opened():
                self.spawn(connection.client.call("peer_dead", peer))

    async def _rejoin(self, name: str) -> None:
        """Connect again after a while: until Serve removes the member, it may only be out of reach."""
        await asyncio.sleep(self._timeouts.rejoin_s)
        if name in self._members and name not in self._connections:
            self._open(name)
