"""The start of a replica with several ranks: the end of any of them ends the start, or the replica, with the reason."""

import asyncio
import logging
from typing import Any

import pytest

from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.replica.serving import model_start
from crossdock.workers.replica.serving.model_start import ModelStart

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
