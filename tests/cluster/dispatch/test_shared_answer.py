"""One costly answer for all who ask within a short time."""

import asyncio

import pytest

from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.shared_answer import SharedAnswer


async def test_answer_is_asked_for_once_at_a_time_and_holds_for_a_while() -> None:
    asked = 0
    gate = asyncio.Event()

    async def ask() -> int:
        nonlocal asked
        asked += 1
        await gate.wait()
        return asked

    shared = SharedAnswer(ask, asyncio.create_task, 3600.0)
    waiting = [asyncio.create_task(shared.get()) for _ in range(100)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()  # its client has left; the others wait on
    gate.set()
    assert await asyncio.gather(*waiting[1:]) == [1] * 99
    assert await shared.get() == 1
    shared.holds_s = 0.0
    assert await shared.get() == 2


async def test_error_reaches_all_who_asked_and_the_next_ask_again() -> None:
    errors = [RuntimeError("a"), RuntimeError("b")]

    async def ask() -> int:
        raise errors.pop()

    shared = SharedAnswer(ask, asyncio.create_task, 0.0)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            await shared.get()
    assert not errors


@pytest.mark.parametrize(("hold_s", "scrapes_in_all"), [(3600.0, 1), (0.0, 3)])
async def test_many_scrapes_at_once_ask_every_ingress_once(hold_s: float, scrapes_in_all: int) -> None:
    scrapes = 0

    async def texts() -> dict[str, str]:
        nonlocal scrapes
        scrapes += 1
        await asyncio.sleep(0.01)
        return {}

    dispatcher = Dispatcher("tiny", None, texts, metrics_hold_s=hold_s)
    await asyncio.gather(*(dispatcher.metrics_text() for _ in range(50)))
    assert scrapes == 1
    for _ in range(2):
        await dispatcher.metrics_text()
    assert scrapes == scrapes_in_all
    await dispatcher.close()
