"""The Ray side of a replica: a Serve deployment around one engine. An ingress opens one stream and submits by calls."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch

from crossdock.workers.checkpoint import resolve_model
from crossdock.workers.engine import Engine, EngineConfig, warm_up
from crossdock.workers.loop import EngineLoop
from crossdock.workers.metrics import EngineMetrics
from crossdock.workers.model import load_model
from crossdock.workers.request import Submission, TokenDelta

logger = logging.getLogger("ray.serve")


class Replica:
    """One engine. Its constructor loads the model; Serve routes to it once that is done."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: str | None, dtype: str, max_model_len: int | None, engine: EngineConfig, num_threads: int
    ) -> None:
        loaded = await asyncio.to_thread(load_engine, model, dtype, max_model_len, engine, num_threads)
        self.profile = await asyncio.to_thread(warm_up, loaded)
        self.loop = EngineLoop(loaded, EngineMetrics())

    async def tokens(self, ingress: str) -> AsyncIterator[list[TokenDelta]]:
        """All tokens this replica produces for `ingress`, one message per step. The first message is empty: from
        then on `submit` may name `ingress`. When the reader goes away its requests are aborted."""
        channel = self.loop.channel(ingress)
        try:
            yield []
            async for deltas in channel.messages():
                yield deltas
        finally:
            await self.loop.close_channel(ingress, channel)

    async def submit(self, ingress: str, submission: Submission) -> None:
        """ValueError, naming the field, for a request that cannot be served."""
        await self.loop.submit(ingress, submission)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Frees everything these requests hold before the next step begins."""
        await self.loop.abort(request_ids)

    async def close(self, ingress: str) -> None:
        """Ends the stream of an ingress that leaves; what runs for it is aborted."""
        channel = self.loop.channels.get(ingress)
        if channel is not None:
            channel.close()

    async def metrics_text(self) -> str:
        return self.loop.metrics.text()

    def record_replica_metadata(self) -> dict[str, Any]:
        """The static part of what this replica advertises; Serve hands it to every router."""
        return self.profile.model_dump()

    def check_health(self) -> None:
        if not self.loop.is_alive:
            logger.error("the engine thread has ended: this replica cannot serve")
            os._exit(1)


def load_engine(
    model: str | None, dtype: str, max_model_len: int | None, config: EngineConfig, num_threads: int
) -> Engine:
    """The engine of a replica, not warm yet. `dtype` "auto" is the checkpoint's; ValueError names what cannot be."""
    torch.set_num_threads(num_threads)  # Ray sets OMP_NUM_THREADS by its own accounting
    path: Path = resolve_model(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(path, None if dtype == "auto" else getattr(torch, dtype), max_model_len, device)
    return Engine(loaded, config, path)
