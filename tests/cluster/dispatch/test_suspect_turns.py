"""Suspects take turns, and however many there are, the last one does not wait for minutes."""

import asyncio

from crossdock.cluster.dispatch.suspect_turns import MOST_WAIT_S, SuspectTurns, turn_seconds


def test_turns_of_any_number_of_suspects_end_within_the_longest_wait() -> None:
    for number in (2, 5, 20, 64):
        waited = sum_of = 0.0
        for num_waiting in range(number - 1, 0, -1):
            sum_of += turn_seconds(3.0, num_waiting, waited)
            waited = sum_of
        assert sum_of <= MOST_WAIT_S + 1e-9, number


def test_few_suspects_have_whole_turns_and_many_late_ones_short_turns() -> None:
    assert turn_seconds(3.0, 0, 0.0) == 3.0
    assert turn_seconds(3.0, 2, 1.0) == 3.0
    assert turn_seconds(3.0, 100, 30.0) == 0.1


async def test_suspect_that_leaves_while_it_waits_takes_no_turn() -> None:
    turns, order = SuspectTurns(60.0), list[str]()

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
    await asyncio.wait_for(turns.enter("next"), 60)
    assert order == ["stays"]
