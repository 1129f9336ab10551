"""Connections to replicas in this process: opened, lost, opened again, and closed when a replica leaves."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from crossdock.cluster.dispatch import connections
from crossdock.cluster.dispatch.attempt import Events
from crossdock.cluster.dispatch.dispatcher import Dispatcher, ReplicaLost, Timeouts
from crossdock.cluster.dispatch.loop_clock import LoopClock
from crossdock.cluster.dispatch.loops import raise_if_ended
from crossdock.router.actions import ReplicaDead
from crossdock.workers.report.advertise import Message
from crossdock.workers.schedule.request.request import TokenDelta
from tests.cluster.dispatch.in_process import InProcess, ready, serving, tokens
from tests.waiting import until


async def test_events_come_in_order_also_after_a_reader_that_left() -> None:
    events, all_read = Events(), []
    leaving = asyncio.ensure_future(events.get())
    await asyncio.sleep(0)
    leaving.cancel()
    for number in range(3):
        events.put_nowait(lambda now, number=number: [number])  # type: ignore[misc]
    while not events.empty():
        all_read += (await events.get())(0.0)
    assert all_read == [0, 1, 2]
    reading = asyncio.ensure_future(events.get())
    await asyncio.sleep(0)
    assert not reading.done()
    events.put_nowait(lambda now: [])
    assert (await reading)(0.0) == []


async def test_replica_that_has_just_joined_is_waited_for() -> None:
    """In an upgrade the last old one may leave before a new one has sent its first message."""
    old, new = InProcess(), InProcess()
    async with serving(Dispatcher("tiny"), old=old) as dispatcher:
        dispatcher.leave("old")
        dispatcher.join("new", new, new.profile)
        assert not dispatcher.ready()
        assert len(await tokens(dispatcher, "between the two")) == 20


async def test_longest_request_is_what_each_replica_takes() -> None:
    """Replicas with `max_model_len: auto` have memory for unlike contexts."""
    long, short = InProcess(), InProcess()
    async with serving(Dispatcher("tiny"), long=long) as dispatcher:
        most = dispatcher.model.max_model_len
        short.profile = short.profile.model_copy(update={"max_model_len": most - 16})
        dispatcher.join("short", short, short.profile)
        assert dispatcher.model.max_model_len == most - 16
        dispatcher.join("another", InProcess(), long.profile)
        assert dispatcher.model.max_model_len == most - 16
        dispatcher.leave("short")
        assert dispatcher.model.max_model_len == most


async def test_replica_is_notified_again_and_again_that_its_stream_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READS_S", 0.1)
    replica = InProcess()
    async with serving(Dispatcher("m"), r=replica):
        channel = replica.engine_thread.channels["test"]
        for _ in range(2):
            before = channel.heard_at
            await until(lambda: channel.heard_at != before)  # noqa: B023  (awaited at once)


async def test_health_check_tells_that_no_deadline_passes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Dispatcher("m"), r=InProcess()) as dispatcher:
        dispatcher.check()
        monkeypatch.setattr(connections, "READS_S", None)  # the task that watches for silence compares with it
        with pytest.raises(TypeError):
            await until(lambda: dispatcher.check() is not None)


async def test_ingress_learns_where_the_pages_of_a_replica_have_moved() -> None:
    """Those that read from the replica then, and those that come later: Serve tells them the address of its start."""
    replica = InProcess()
    async with serving(Dispatcher("m"), r=replica) as dispatcher:

        def peers() -> list[bytes]:
            return [connection.profile.peer for connection in dispatcher._connections.opened()]

        assert peers() == [replica.profile.peer] != [b"moved"]
        replica.engine_thread.readers.announce(b"moved")
        await until(lambda: peers() == [b"moved"])
        dispatcher.leave("r")
        assert peers() == []
        dispatcher.join("r", replica, replica.profile)
        await until(lambda: peers() == [b"moved"])


async def test_task_that_runs_for_ever_has_ended() -> None:
    async def end(error: Exception | None = None) -> None:
        if error is not None:
            raise error

    running, cancelled = asyncio.create_task(asyncio.sleep(60)), asyncio.create_task(asyncio.sleep(60))
    cancelled.cancel()
    ended, failed = asyncio.create_task(end()), asyncio.create_task(end(OSError("the reason")))
    await asyncio.wait([ended, failed, cancelled])
    raise_if_ended([None, running, cancelled])
    with pytest.raises(OSError, match="the reason"):
        raise_if_ended([running, failed])
    with pytest.raises(RuntimeError, match="has ended"):
        raise_if_ended([running, ended])
    running.cancel()


class Mortal(InProcess):
    """A replica that can die of an error, and remembers which deaths it was notified of."""

    def __init__(self, peer: bytes) -> None:
        super().__init__()
        self.profile = self.profile.model_copy(update={"peer": peer})
        self.deaths: list[bytes] = []
        self.num_probes = 0
        self.has_ended = False
        self.error: Exception = ReplicaDead("its process has ended")

    async def peer_dead(self, peer: bytes) -> None:
        self.deaths.append(peer)

    async def messages(self) -> AsyncIterator[Message]:
        try:
            async for message in super().messages():
                yield message
        except ConnectionError:
            raise self.error from None

    async def is_dead(self) -> bool:
        self.num_probes += 1
        return self.has_ended

    def die(self) -> None:
        """Fail the stream now, with a message that no request waits for."""
        self.is_killed = True
        self.engine_thread.channels["test"].put([TokenDelta("no request", [])])


async def test_death_of_a_replica_is_reported_to_all_others() -> None:
    """Also to those that have no request with it: they may hold pages from it for one that was aborted. Also to one
    that was out of reach at that moment. Of a lost replica that Serve has given up, the process may still write."""
    clients = [Mortal(b"%d" % number) for number in range(4)]
    three = {f"{number}": client for number, client in enumerate(clients[:3])}
    async with serving(Dispatcher("tiny", timeouts=Timeouts(rejoin_s=0.05)), **three) as dispatcher:
        clients[0].die()
        await until(lambda: all(client.deaths == [b"0"] for client in clients[1:3]))
        dispatcher.join("3", clients[3], clients[3].profile)
        await until(lambda: clients[3].deaths == [b"0"])
        num_up = len(dispatcher.fleet)
        clients[1].error = ConnectionError("out of reach")
        clients[1].die()
        await until(lambda: len(dispatcher.fleet) == num_up - 1)
        dispatcher.leave("1")
        await until(lambda: clients[1].num_probes > 2)
        assert clients[3].deaths == [b"0"]
        clients[1].has_ended = True
        await until(lambda: clients[3].deaths == [b"0", b"1"])


async def test_lost_replica_that_is_still_a_member_is_connected_again() -> None:
    client = InProcess()
    async with serving(Dispatcher("tiny", timeouts=Timeouts(answer_s=0.1)), one=client) as dispatcher:
        client.is_killed = True
        with pytest.raises(ReplicaLost):
            await tokens(dispatcher, "lost")
        client.is_killed = False
        assert not dispatcher.ready()
        await ready(dispatcher)
        assert len(await tokens(dispatcher, "again")) == 20


async def test_replica_that_leaves_finishes_its_streams_and_is_disconnected() -> None:
    client = InProcess()
    async with serving(Dispatcher("tiny"), one=client) as dispatcher:
        running = asyncio.create_task(tokens(dispatcher, "running", 100))
        await until(lambda: dispatcher.fleet.num_booked("one") == 1)
        dispatcher.leave("one")
        with pytest.raises(ReplicaLost):
            await tokens(dispatcher, "new")
        assert len(await running) == 100
        await until(lambda: not client.engine_thread.channels)  # its stream is closed and does not hold up its drain


async def test_request_waits_for_a_lost_replica_that_is_connected_again() -> None:
    """Every stream of the ingress broke at once, as after a pause of the network: no request need fail."""
    client = InProcess()
    async with serving(Dispatcher("tiny", timeouts=Timeouts(rejoin_s=0.2, answer_s=30.0)), one=client) as dispatcher:
        wanted = await tokens(dispatcher, "alone")
        client.is_killed = True
        asking = asyncio.create_task(tokens(dispatcher, "lost"))
        await until(lambda: not dispatcher.ready())
        client.is_killed = False
        assert await asking == wanted


class Late(InProcess):
    """A replica whose stream opens late."""

    def __init__(self) -> None:
        super().__init__()
        self.may_open, self.has_ended = asyncio.Event(), asyncio.Event()

    async def messages(self) -> AsyncIterator[Message]:
        await self.may_open.wait()
        async for message in super().messages():
            yield message
        self.has_ended.set()


async def test_replica_that_leaves_before_its_stream_opens_is_disconnected() -> None:
    """An open stream would hold up its drain."""
    client = Late()
    async with serving(Dispatcher("tiny")) as dispatcher:
        dispatcher.join("one", client, client.profile)
        dispatcher.leave("one")
        client.may_open.set()
        await client.has_ended.wait()
        assert not client.engine_thread.channels
        assert not len(dispatcher.fleet)


async def test_silent_replica_is_lost_and_a_pause_of_the_ingress_is_not_its_silence() -> None:
    """The loop stands still for longer than a replica may be silent; streams go on. Then one replica says nothing."""

    class Silent(InProcess):
        is_silent = False

        async def messages(self) -> AsyncIterator[Message]:
            async for message in super().messages():
                while self.is_silent:
                    await asyncio.sleep(0.01)
                yield message

    clients = [Silent(), Silent()]
    async with serving(
        Dispatcher("tiny", timeouts=Timeouts(silence_s=2.5, answer_s=1.5, patience_s=0.5)),
        **dict(zip("ab", clients, strict=True)),
    ) as dispatcher:
        running = asyncio.create_task(tokens(dispatcher, "running", 200))
        await until(lambda: any(dispatcher.fleet.num_booked(name) for name in "ab"))
        time.sleep(4.0)  # every timer of the ingress is overdue, and everything is in its queues
        assert len(await running) == 200
        assert len(dispatcher.fleet) == 2
        assert "crossdock_ingress_placed_again_total 0.0" in dispatcher.metrics.text()
        clients[0].is_silent = True
        await until(lambda: len(dispatcher.fleet) == 1)
        for client in clients:
            client.is_silent = False


def test_clock_of_a_loop_counts_a_pause_as_a_second() -> None:
    readings = iter([5.0, 5.5, 20.5, 20.6])
    clock = LoopClock(lambda: next(readings))
    assert [round(clock.now(), 3) for _ in range(3)] == [5.5, 6.5, 6.6]
