"""The calls of operators to a replica: an update, and a replica that catches up with others after a restart."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from crossdock.workers.replica.serving.controls import Controls
from crossdock.workers.schedule.request.weight_version import WeightVersion

OLD, NEW = WeightVersion(20, "id-old", "20", "old"), WeightVersion(21, "id-new", "21", "new")


class Weights:
    """The weights of a replica: notes which folder is read and which one is put in place."""

    def __init__(self) -> None:
        self.read = ""
        self.placed: list[str] = []
        self.are_given_up = self.are_kept = False

    @property
    def is_read(self) -> bool:
        return bool(self.read)

    def call(self, method: str, argument: Mapping[str, Any]) -> str:
        if method == "read":
            self.read = argument["folder"]
        return f"id-{argument['folder']}" if method == "read" else ""

    def put(self) -> None:
        self.placed.append(self.read)
        self.read, self.are_given_up = "", False


def replica() -> tuple[Controls, Weights]:
    """Return a replica that has just restarted, and its weights. Its thread computes no steps."""
    weights = Weights()
    scheduler = SimpleNamespace(weights=WeightVersion(0, "", "", ""), is_paused=True, pause=lambda is_paused: None)
    scheduler.change_weights = lambda version: setattr(scheduler, "weights", version)
    engine = SimpleNamespace(scheduler=scheduler, executor=SimpleNamespace(model=None, new_weights=weights))

    async def call(work: Any) -> None:
        await asyncio.sleep(0)  # others have their turn, as while the thread works
        work()

    nothing = lambda *_: None  # noqa: E731
    publisher = SimpleNamespace(renew=nothing)
    thread: Any = SimpleNamespace(
        engine=engine, call=call, finish_steps=nothing, end_all=nothing, publisher=publisher, handovers=[]
    )
    return Controls(thread, 1, Path("start"), "id-start"), weights


async def update(controls: Controls, weights: WeightVersion) -> bool:
    await controls.call_weights("start", {})
    await controls.call_weights("read", {"folder": weights.folder})
    return await controls.put_weights(tuple(weights), "end")  # type: ignore[arg-type]


async def test_update_that_meets_a_catch_up_puts_its_own_weights_in_place() -> None:
    controls, weights = replica()
    _, is_put = await asyncio.gather(controls.catch_up(tuple(OLD)), update(controls, NEW))  # type: ignore[arg-type]
    assert (weights.placed, is_put) == (["old", "new"], True)


async def test_replica_catches_up_with_nothing_while_an_update_has_its_weights_read() -> None:
    controls, weights = replica()
    await controls.call_weights("start", {})
    await controls.call_weights("read", {"folder": "new"})
    await controls.catch_up(tuple(OLD))  # type: ignore[arg-type]
    assert await controls.put_weights(tuple(NEW), "end")  # type: ignore[arg-type]
    assert weights.placed == ["new"]


async def test_replica_that_came_up_after_the_weights_were_read_keeps_its_own() -> None:
    controls, weights = replica()
    weights.read = "old"  # by a catch-up
    assert not await controls.put_weights(tuple(NEW), "end")  # type: ignore[arg-type]
    await controls.call_weights("read", {"folder": "other"})
    assert not await controls.put_weights(tuple(NEW), "end")  # type: ignore[arg-type]
    assert weights.placed == []


async def test_weights_of_an_update_are_put_in_place_by_the_update_alone_while_a_replica_sleeps() -> None:
    controls, weights = replica()
    weights.are_given_up = True
    await controls.call_weights("start", {})
    await controls.call_weights("read", {"folder": "new"})
    await controls.wake_up(["kv_cache"])
    assert weights.placed == []
    assert await controls.put_weights(tuple(NEW), "end")  # type: ignore[arg-type]
    assert (weights.placed, await controls.given_up()) == (["new"], [])


async def test_update_whose_weights_are_read_over_as_a_replica_wakes_is_told_that_they_are_lost() -> None:
    """Also where the replica then sleeps on, because its own files are others."""
    controls, weights = replica()
    for checkpoint in ("start", "changed"):
        weights.are_given_up = True
        await controls.call_weights("start", {})
        await controls.call_weights("read", {"folder": "new"})
        if checkpoint == "changed":
            weights.call = lambda method, argument: setattr(weights, "read", "changed") or "id-changed"  # type: ignore
        with suppress(ValueError):
            await controls.wake_up([])
        assert not await controls.put_weights(tuple(NEW), "end")  # type: ignore[arg-type]
    assert weights.placed == ["start"]
    assert "weights" in await controls.given_up()
