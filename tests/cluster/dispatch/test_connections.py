"""Connections to replicas in this process: opened, lost, opened again, and closed when a replica leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from crossdock.cluster.dispatch.connections import ReplicaDead
from crossdock.cluster.dispatch.dispatcher import Dispatcher, ReplicaLost
from crossdock.workers.report.advertise import Message
from crossdock.workers.schedule.request import TokenDelta
from tests.cluster.dispatch.in_process import InProcess, ready, tokens


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_replica_that_has_just_joined_is_waited_for() -> None:
    """In an upgrade the last old one may leave before a new one has sent its first message."""

    async def main() -> None:
        old, new, dispatcher = InProcess(), InProcess(), Dispatcher("tiny")
        dispatcher.join("old", old, old.profile)
        await ready(dispatcher)
        dispatcher.leave("old")
        dispatcher.join("new", new, new.profile)
        assert not dispatcher.ready()
        assert len(await tokens(dispatcher, "between the two")) == 20
        await dispatcher.close()
        await old.engine_thread.close()
        await new.engine_thread.close()

    asyncio.run(main())


class Mortal(InProcess):
    """A replica that can die of an error, and remembers which deaths it was notified of."""

    def __init__(self, peer: bytes) -> None:
        super().__init__()
        self.profile = self.profile.model_copy(update={"peer": peer})
        self.deaths: list[bytes] = []
        self.error: Exception = ReplicaDead("its process has ended")

    async def peer_dead(self, peer: bytes) -> None:
        self.deaths.append(peer)

    async def messages(self) -> AsyncIterator[Message]:
        async for message in super().messages():
            if self.is_killed:
                raise self.error
            yield message

    def die(self) -> None:
        """Fail the stream now, with a message that no request waits for."""
        self.is_killed = True
        self.engine_thread.channels["test"].put([TokenDelta("no request", [])])


def test_death_of_a_replica_is_reported_to_all_others() -> None:
    """Also to those that have no request with it: they may hold pages from it for one that was aborted. Also to one
    that was out of reach at that moment. A lost replica counts as dead once Serve has given it up."""

    async def main() -> None:
        dispatcher, clients = Dispatcher("tiny"), [Mortal(b"%d" % number) for number in range(4)]
        for number, client in enumerate(clients[:3]):
            dispatcher.join(f"{number}", client, client.profile)
        await ready(dispatcher, 3)
        clients[0].die()
        await until(lambda: all(client.deaths == [b"0"] for client in clients[1:3]))
        dispatcher.join("3", clients[3], clients[3].profile)
        await until(lambda: clients[3].deaths == [b"0"])
        num_up = len(dispatcher.fleet)
        clients[1].error = ConnectionError("out of reach")
        clients[1].die()
        await until(lambda: len(dispatcher.fleet) == num_up - 1)
        assert clients[3].deaths == [b"0"]
        dispatcher.leave("1")
        await until(lambda: clients[3].deaths == [b"0", b"1"])
        for client in clients:
            await client.engine_thread.close()

    asyncio.run(main())


def test_lost_replica_that_is_still_a_member_is_connected_again() -> None:
    async def main() -> None:
        client, dispatcher = InProcess(), Dispatcher("tiny")
        dispatcher.join("one", client, client.profile)
        await ready(dispatcher)
        client.is_killed = True
        with pytest.raises(ReplicaLost):
            await tokens(dispatcher, "lost")
        client.is_killed = False
        assert not dispatcher.ready()
        await ready(dispatcher)
        assert len(await tokens(dispatcher, "again")) == 20
        await client.engine_thread.close()

    asyncio.run(main())


def test_replica_that_leaves_finishes_its_streams_and_is_disconnected() -> None:
    async def main() -> None:
        client, dispatcher = InProcess(), Dispatcher("tiny")
        dispatcher.join("one", client, client.profile)
        await ready(dispatcher)
        running = asyncio.create_task(tokens(dispatcher, "running", 100))
        await asyncio.sleep(0.02)
        dispatcher.leave("one")
        with pytest.raises(ReplicaLost):
            await tokens(dispatcher, "new")
        assert len(await running) == 100
        await asyncio.sleep(0.05)
        assert not client.engine_thread.channels  # its stream is closed and does not hold up its drain
        await client.engine_thread.close()

    asyncio.run(main())
