"""An ingress keeps nothing of requests that ended, nor of replicas that left."""

import asyncio
from contextlib import aclosing
from itertools import count

import pytest

from crossdock.cluster.dispatch.dispatcher import Dispatcher, ReplicaLost
from crossdock.workers.schedule.request.submission import Overloaded, SamplingParams, Submission
from tests.cluster.dispatch.in_process import IN_TURN, InProcess, Refusing, ready, serving, tokens
from tests.sizes import growing, sizes
from tests.waiting import until

BOUNDED = ((".prefixes._holders", 2_000_000),)
_numbers = count()


async def come_work_and_leave(dispatcher: Dispatcher, killed: InProcess, *others: InProcess) -> None:
    """Have requests end in every way that there is, on replicas that come and go."""
    killed.is_killed = False
    for replica in (killed, *others):
        dispatcher.join(f"replica {next(_numbers)}", replica, killed.profile)
    await ready(dispatcher, 4)
    names = [name for name in dispatcher.fleet.table.by_name if name != "stays"]
    await asyncio.gather(*(tokens(dispatcher, f"done {next(_numbers)}") for _ in range(8)))
    for number in range(4):
        params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        work = Submission(f"left {next(_numbers)}", [3 + number] * 40, params)
        async with aclosing(dispatcher.generate(work)) as stream:  # type: ignore[type-var]
            async for delta in stream:
                if delta.token_ids:
                    break
    long = [asyncio.create_task(tokens(dispatcher, f"moved {next(_numbers)}", 100)) for _ in range(6)]
    await asyncio.sleep(0.05)
    killed.is_killed = True
    for name in names:
        dispatcher.leave(name)
    await asyncio.gather(*long)


async def test_requests_that_ended_and_replicas_that_left_leave_nothing() -> None:
    stays, *come = InProcess(), InProcess(), InProcess(), Refusing(1.0)
    async with serving(Dispatcher("tiny", IN_TURN), stays=stays) as dispatcher:
        await come_work_and_leave(dispatcher, *come)
        await settled(dispatcher)
        before = sizes(dispatcher)
        for _ in range(2):
            await come_work_and_leave(dispatcher, *come)
            await settled(dispatcher)
        after = {path: size for path, size in sizes(dispatcher).items() if ".client." not in path}
    grown = growing(before, after)
    for ending, most in BOUNDED:
        for path in [path for path in grown if path.endswith(ending)]:
            assert grown.pop(path)[1] <= most
    assert not grown


async def test_refused_requests_leave_nothing() -> None:
    async with serving(Dispatcher("tiny", IN_TURN), only=Refusing(1.0)) as dispatcher:
        found = []
        for _ in range(20):
            with pytest.raises((Overloaded, ReplicaLost)):
                await tokens(dispatcher, f"refused {next(_numbers)}")
            await settled(dispatcher)
            found.append(sizes(dispatcher))
        grown = [each for each in map(growing, found, found[1:]) if each]
        assert len(grown) < 4, grown  # the first report of a replica makes what all have; what a refusal leaves, all do


async def settled(dispatcher: Dispatcher) -> None:
    """Wait until calls in the background have ended, but for the watch and the streams of the replicas that are up."""
    connections = dispatcher._connections
    await until(lambda: len(connections._background) <= 1 + len(connections._connections))
