"""The connections of an ingress to the replicas: one stream of messages from each, opened again when it is lost."""

import asyncio
import contextvars
import logging
from collections import Counter, deque
from collections.abc import Coroutine
from functools import partial
from typing import Any

from crossdock.cluster.dispatch.attempt import Attempt, ReplicaConnection
from crossdock.cluster.dispatch.engine_client import EngineClient, RemoteMethod
from crossdock.cluster.dispatch.loop_clock import TICK_S, LoopClock
from crossdock.cluster.dispatch.loops import raise_if_ended
from crossdock.cluster.dispatch.losses import Loss, Losses
from crossdock.router.actions import Detach, Fail, ReplicaBroken, ReplicaDead, ReplicaLost, Timeouts
from crossdock.router.fleet import Fleet
from crossdock.workers.report.profile import SchedulingProfile

logger = logging.getLogger("ray.serve")

_DEAD_PEERS = 64  # remembered for replicas that were out of reach when those died
MOST_UNREAD = 1 << 18  # values of deltas that clients leave unread, all requests together: about 100 MiB
READS_S = 8.0  # between two notices to a replica that its stream is read; see `channel.MOST_SILENCE_S`
_MOST_PROBES = 300  # of a replica that was lost and has left, until Ray knows that its process has ended


class SlowReader(RuntimeError):
    """A client reads its tokens so slowly that too many wait, so its request was ended."""


class ReplicaConnections:
    """The connections to the replicas that take new requests. Belongs to one event loop."""

    def __init__(self, fleet: Fleet, timeouts: Timeouts, clock: LoopClock) -> None:
        """`fleet` is the router of this ingress; only replicas with an open stream are in it."""
        self._fleet = fleet
        self._timeouts = timeouts
        self._clock = clock
        self._members: dict[str, tuple[EngineClient, SchedulingProfile]] = {}  # as Serve lists them
        self._connections: dict[str, ReplicaConnection] = {}
        self._dead: deque[bytes] = deque(maxlen=_DEAD_PEERS)  # peers whose KV transfers are over for good
        self._background: set[asyncio.Task[Any]] = set()
        self.losses = Losses(self.spawn)
        self._following: set[ReplicaConnection] = set()  # connections whose stream is read, also of leaving replicas
        self._watching: asyncio.Task[None] | None = None  # for silent replicas

    def __getitem__(self, name: str) -> ReplicaConnection:
        return self._connections[name]

    def opened(self) -> list[ReplicaConnection]:
        """Return the connections whose stream has begun."""
        return [connection for connection in self._connections.values() if connection.is_open]

    def names(self) -> list[str]:
        """Return the names of the replicas that Serve lists."""
        return [*self._members]

    async def wait_until_one_is_open(self, seconds: float, weights: str = "") -> None:
        """Wait while there are replicas, but none with an open stream. In an upgrade all may be new; after a broken
        network all may be about to be connected again. `weights`: only replicas with these count; empty: all."""
        end = self._clock.now() + seconds

        def counts(profile: SchedulingProfile) -> bool:
            return weights in ("", profile.weights)

        while any(counts(profile) for _, profile in self._members.values()):
            connections = self._connections.values()
            if any(each.is_open and not each.is_leaving and counts(each.profile) for each in connections):
                return
            if self._clock.now() >= end:
                return
            await asyncio.sleep(0.02)

    # -- members -----------------------------------------------------------------------------------------------------

    def join(self, name: str, client: EngineClient, profile: SchedulingProfile) -> None:
        """Connect to a replica that is up. `profile`: its advertised profile."""
        if name not in self._members:
            self._members[name] = client, profile
            self._open(name)
        if self._watching is None or self._watching.done():
            self._watching = self.spawn(self._watch_for_silence())

    def leave(self, name: str) -> None:
        """Give a replica no new requests. Its running ones go on for as long as it lives."""
        client, profile = self._members.pop(name, (None, None))
        connection = self._connections.pop(name, None)
        if connection is None and client is not None and profile is not None and profile.peer not in self._dead:
            self.spawn(self._confirm_death(client, profile))  # it was lost: its process may have ended, or not yet
        if connection is not None:
            self._fleet.leave(name)
            connection.is_leaving = True
            self._close_if_done(connection)

    async def close(self) -> None:
        """Leave every replica; the requests of this ingress are aborted there."""
        connections = list(self._connections.values())
        self._members.clear()
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(connection.client.close() for connection in connections), return_exceptions=True)

    # -- attempts ----------------------------------------------------------------------------------------------------

    def attach(self, attempt: Attempt, name: str) -> ReplicaConnection:
        """Have the events of a replica reach an attempt."""
        connection = attempt.connections[name] = self._connections[name]
        connection.attempts[attempt.life.submission.id] = attempt
        return connection

    def detach(self, attempt: Attempt, name: str, is_running: bool) -> None:
        """Disconnect an attempt from a replica; abort the attempt there if it may be running.

        The abort may overtake the submission: the replica remembers it.
        """
        connection = attempt.connections.pop(name)
        request_id = attempt.life.submission.id
        submitting = attempt.submitting.pop(name, None)
        if submitting is not None:
            submitting.cancel()
        connection.attempts.pop(request_id, None)
        if is_running and not connection.is_dead:
            if not connection.aborting:
                self.spawn(_abort(connection))
            connection.aborting.append((request_id, attempt.number))
        self._close_if_done(connection)

    def ask(self, attempt: Attempt, name: str) -> None:
        """Ask a replica how far it is with an attempt; the answer will be an event of the attempt."""
        connection = attempt.connections[name]
        if not connection.asking:
            self.spawn(_ask(connection))
        connection.asking.append(attempt)

    def check(self) -> None:
        """Raise the error that has ended the watch for silence: no deadline of a request would pass any more."""
        raise_if_ended([self._watching])

    async def call(self, connection: ReplicaConnection, method: RemoteMethod, *arguments: Any) -> Any:
        """Call a method of a replica, however long it takes. ReplicaLost: its stream has ended meanwhile."""
        calling = self.spawn(connection.client.call(method, *arguments))
        following = connection.following
        assert following is not None
        await asyncio.wait([calling, following], return_when=asyncio.FIRST_COMPLETED)
        if calling.done():
            return calling.result()
        calling.cancel()
        raise ReplicaLost(f"replica {connection.name} was lost during {method}")

    def wake(self) -> None:
        """Have every attempt look again whether its request is to go on."""
        for connection in self._following:
            for attempt in connection.attempts.values():
                attempt.events.put_nowait(lambda now: [])

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
        connection.heard_at = self._clock.now()
        connection.following = self.spawn(self._follow(connection))
        self._following.add(connection)

    def _close_if_done(self, connection: ReplicaConnection) -> None:
        """Close the stream of a leaving replica: it counts as a running request and would hold up the drain."""
        if connection.is_leaving and not connection.attempts and connection.is_open:
            self.spawn(connection.client.close())

    async def _follow(self, connection: ReplicaConnection) -> None:
        """Pass every message of a replica's stream to the router and to the attempts, until the stream ends."""
        name = connection.name
        loss = ReplicaLost(f"replica {name} ended its stream")
        try:
            async for message in connection.client.messages():
                now = self._clock.now()
                connection.hear(now)
                if not connection.is_open:
                    self._opened(connection)
                if message.peer:
                    self._note_peer(connection, message.peer)
                if message.live is not None:
                    self._fleet.hear(name, message.live, now)
                for changes in message.pages:
                    self._fleet.hear_pages(name, changes)
                for delta in message.deltas:
                    attempt = connection.attempts.get(delta.request_id)
                    if attempt is not None:
                        attempt.add(name, delta, now)
        except asyncio.CancelledError:
            if not connection.is_silent:
                raise
            loss = ReplicaLost(f"replica {name} has been silent for {self._timeouts.silence_s:.3g} s")
        except ReplicaLost as known:
            loss = type(known)(f"replica {name} is lost: {known}")
        except Exception as cause:
            kind = ReplicaBroken if isinstance(cause, ConnectionError) else ReplicaLost
            loss = kind(f"replica {name} is lost: {type(cause).__name__}")
            loss.__cause__ = cause
        finally:
            self._lost(connection, loss)

    def _note_peer(self, connection: ReplicaConnection, peer: bytes) -> None:
        """Note where other replicas reach the pages of a replica from now on."""
        connection.note_peer(peer)
        if connection.name in self._members:
            client, _ = self._members[connection.name]
            self._members[connection.name] = client, connection.profile

    async def _watch_for_silence(self) -> None:
        """Keep the clock going, check the deadlines of requests, give up the stream of every replica that has been
        silent for too long, and let all replicas know that this ingress lives.

        A timer for each request would be set again with each of its tokens: a tenth of the ingress's work.
        Only time on the clock counts: this process may have been stopped, or busy, and the messages may be here.
        """
        notified_at = self._clock.now()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock.now()
            if now - notified_at > READS_S:
                notified_at = now
                for connection in self._following:
                    if connection.is_open:
                        connection.client.still_reads()
            for connection in [*self._following]:
                for attempt in connection.attempts.values():
                    attempt.check_deadline(now)
                if now - connection.heard_at > self._timeouts.silence_s and connection.following is not None:
                    connection.give_up()
            self._end_slowest_readers()

    def _end_slowest_readers(self) -> None:
        """End requests whose clients do not read, as long as too much waits for all clients together.

        The owner for which most waits loses a request, the one for which most waits.
        """
        attempts = [attempt for connection in self._following for attempt in connection.attempts.values()]
        waiting = Counter[str]()
        slowest: dict[str, list[Attempt]] = {}  # by owner
        for attempt in sorted({id(each): each for each in attempts}.values(), key=lambda each: each.num_unread):
            owner = attempt.life.submission.key_owner
            waiting[owner] += attempt.num_unread
            slowest.setdefault(owner, []).append(attempt)
        while waiting.total() > MOST_UNREAD:
            owner = max(waiting, key=waiting.__getitem__)
            attempt = slowest[owner].pop()
            waiting[owner] -= attempt.num_unread
            for action in attempt.life.close():
                assert isinstance(action, Detach)
                self.detach(attempt, action.replica, action.is_running)
            attempt.clear()
            attempt.events.put_nowait(lambda now: [Fail(SlowReader("its client read too slowly"))])

    def _opened(self, connection: ReplicaConnection) -> None:
        connection.open()
        self.losses.joined(connection.profile.start_s)
        for peer in self._dead:
            self.spawn(connection.client.call("peer_dead", peer))
        if self._connections.get(connection.name) is connection:  # else it has left already
            self._fleet.join(connection.name, connection.profile, self._clock.now())
        self._close_if_done(connection)

    def _lost(self, connection: ReplicaConnection, loss: ReplicaLost) -> None:
        name = connection.name
        was_open = connection.is_open
        loss.of(name)
        connection.end(is_dead=isinstance(loss, ReplicaDead))
        self._following.discard(connection)
        for attempt in connection.attempts.values():
            attempt.events.put_nowait(partial(attempt.life.lost, name, attempt.number, loss))
        if self._connections.get(name) is connection:
            del self._connections[name]
            self._fleet.leave(name)
        if connection.is_dead:
            self._report_death(connection.profile)
        if name in self._members:
            logger.warning("%s", loss)
            if was_open:  # else it is tried again, and was lost before
                reason = str(loss).removeprefix(f"replica {name} ").removeprefix("is lost: ")
                told = Loss(name, connection.profile.role, reason, len(connection.attempts))
                self.losses.lost(told, is_last=not self.opened())
            self.spawn(self._rejoin(name))

    def _report_death(self, profile: SchedulingProfile) -> None:
        """Notify every replica that a process has ended. It may hold pages for that writer on behalf of a request that
        was aborted before, which no other message would free."""
        peer = profile.peer
        if peer and peer not in self._dead:
            self._dead.append(peer)
            for connection in self.opened():
                self.spawn(connection.client.call("peer_dead", peer))

    async def _confirm_death(self, client: EngineClient, profile: SchedulingProfile) -> None:
        """Report the death of a lost replica that Serve lists no more, once that is known.

        Serve removes a member before its process has ended: until then that process may write to others' pages.
        """
        for _ in range(_MOST_PROBES):
            if await client.is_dead():
                self._report_death(profile)
                return
            await asyncio.sleep(self._timeouts.rejoin_s)
        logger.warning("a replica was lost and has left, but it is unknown whether its process has ended")

    async def _rejoin(self, name: str) -> None:
        """Connect again after a while: until Serve removes the member, it may only be out of reach."""
        await asyncio.sleep(self._timeouts.rejoin_s)
        if name in self._members and name not in self._connections:
            self._open(name)


async def _abort(connection: ReplicaConnection) -> None:
    """Abort, with one call, all attempts that ended in one turn of the event loop: a request may have a thousand."""
    await connection.client.call("abort", connection.take_aborting())


async def _ask(connection: ReplicaConnection) -> None:
    """Ask, with one call, about all attempts whose deadlines passed in one turn of the event loop."""
    name, attempts = connection.name, connection.take_asking()
    asked = [(attempt.life.submission.id, attempt.number) for attempt in attempts]
    try:
        answers = await connection.client.call("progress", asked)
    except ReplicaBroken as broken:
        loss: ReplicaLost = type(broken)(f"replica {name} is lost: {broken}").of(name)
    except Exception as error:
        loss = lost_by(error, name, "does not report what became of the request")
    else:
        for attempt, numbers in zip(attempts, answers, strict=True):
            attempt.events.put_nowait(partial(attempt.life.progress, name, attempt.number, numbers))
        return
    for attempt in attempts:
        attempt.events.put_nowait(partial(attempt.life.lost, name, attempt.number, loss))


def lost_by(error: Exception, replica: str, what: str) -> ReplicaLost:
    """Return the loss of a replica of which an error tells `what` it did not do."""
    loss = ReplicaLost(f"replica {replica} {what}: {error}")
    loss.__cause__ = error
    return loss
