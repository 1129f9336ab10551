"""Suspects wait for their turns on an event loop, and one that leaves takes none."""

import asyncio

from crossdock.cluster.dispatch.suspect_turns import SuspectTurns
from crossdock.router.turn_queue import TurnQueue


async def test_suspect_that_leaves_while_it_waits_takes_no_turn() -> None:
    turns, order = SuspectTurns(TurnQueue(60.0)), list[str]()

    async def one(name: str) -> None:
        await turns.enter(name)
        order.append(name)

    await turns.enter("first")
    left, stays = asyncio.create_task(one("left")), asyncio.create_task(one("stays"))
    await asyncio.sleep(0)
    left.cancel()
    turns.leave("first")
    await stays
    turns.leave("stays")
    await asyncio.wait_for(turns.enter("next"), 240)
    assert order == ["stays"]


async def test_suspect_that_leaves_in_the_moment_of_its_turn_passes_the_turn_on() -> None:
    """The turn begins, and before the task has run again, its client leaves."""
    turns = SuspectTurns(TurnQueue(60.0))
    await turns.enter("first")
    left, stays = asyncio.create_task(turns.enter("left")), asyncio.create_task(turns.enter("stays"))
    await asyncio.sleep(0)
    turns.leave("first")
    assert turns.queue.holder == "left"
    left.cancel()
    await asyncio.wait_for(stays, 240)
    assert turns.queue.holder == "stays"
    assert left.cancelled()
