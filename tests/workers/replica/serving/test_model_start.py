"""The start of a replica with several ranks: the end of any of them ends the start, or the replica, with the reason."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.ranks.step_deadline import StepDeadline
from crossdock.workers.replica.serving import model_start
from crossdock.workers.replica.serving.model_start import ModelStart
from tests.waiting import until

SECOND = RankPosition(1, 2)


async def ends_quietly() -> None:
    await asyncio.sleep(0)


async def fails() -> None:
    raise OSError("no device")


@pytest.mark.parametrize(
    ("running", "reason"), [(ends_quietly, "it has ended without an error"), (fails, "OSError: no device")]
)
@pytest.mark.parametrize("is_started", [False, True])
async def test_rank_that_ends_ends_the_start_or_the_replica_with_the_reason(
    running: Any, reason: str, is_started: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(model_start, "_LAST_WORDS_S", 0.0)
    monkeypatch.setattr(model_start.os, "_exit", exits.append)
    monkeypatch.setattr(model_start.logger, "propagate", True)
    start = ModelStart(None)  # type: ignore[arg-type]
    starting = start._starting
    assert starting is not None
    if is_started:
        start._starting = None
    with caplog.at_level(logging.ERROR, "ray.serve"):
        await start._watch(SECOND, running())
    if is_started:
        assert exits == [1]
        assert f"this replica ends: {SECOND}: {reason}" in caplog.text
        return
    assert not exits
    assert starting.result() == f"{SECOND}: {reason}"


async def test_hung_gpu_of_one_rank_ends_the_replica_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No other rank notices it, and the process goes on to answer health checks."""
    exits: list[int] = []
    given: list[StepDeadline] = []

    def load(_spec: ReplicaSpec, _loaded: object, step_deadline: Callable[[], StepDeadline]) -> None:
        given.append(step_deadline())

    monkeypatch.setattr(model_start.os, "_exit", exits.append)
    monkeypatch.setattr(model_start.logger, "propagate", True)
    monkeypatch.setattr(model_start, "load_engine", load)
    monkeypatch.setattr(model_start, "warm_up", lambda _: None)
    spec = ReplicaSpec(ModelSpec("a"), EngineConfig(), 1, rank_timeout_s=0.05)
    start = ModelStart(spec)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        await start._load(spec, lambda _: None)
        start._starting = None  # it serves
        given[0].begin()  # a step that never ends
        await until(lambda: exits == [1])
    assert "this replica ends: its GPU hangs: no step has ended for 0.05 s" in caplog.text
