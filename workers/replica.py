"""The Ray side of a replica: a Serve deployment around one engine. An ingress opens one stream and submits by calls."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from crossdock.workers.checkpoint import fingerprint, resolve_model
from crossdock.workers.engine import Engine, EngineConfig, warm_up
from crossdock.workers.handover import TransferConfig, connect, pool_spec
from crossdock.workers.live import Message
from crossdock.workers.loop import EngineLoop, request_logger
from crossdock.workers.model import load_model
from crossdock.workers.profile import Role
from crossdock.workers.request import Overloaded, Submission

logger = logging.getLogger("ray.serve")

HEARTBEAT_S = 1.0


class Replica:
    """One engine. Its constructor loads the model; Serve routes to it once that is done."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        model: str | None,
        dtype: str,
        max_model_len: int | None,
        engine: EngineConfig,
        num_threads: int,
        role: Role = "mixed",
        transfer: TransferConfig | None = None,
    ) -> None:
        """`transfer`: how KV pages travel; None where no replica is kept for prompts or tokens alone."""
        path = await asyncio.to_thread(resolve_model, model)
        loaded = await asyncio.to_thread(load_engine, path, dtype, max_model_len, engine, num_threads)
        profile = await asyncio.to_thread(warm_up, loaded)
        name = await asyncio.to_thread(fingerprint, path)
        peer = b""
        if transfer is None:
            self.loop = EngineLoop(loaded)
        else:
            self.loop = EngineLoop(loaded, partial(connect, loaded, name, role, transfer))
            assert self.loop.handover is not None
            peer = self.loop.handover.dock.blob
        compatibility = pool_spec(loaded, name).compatibility
        self.profile = profile.model_copy(update={"role": role, "peer": peer, "compatibility": compatibility})
        for handler in logger.handlers:  # its lines go where Serve writes this replica's log, in the form it is set to
            request_logger.addHandler(handler)
        request_logger.setLevel(logging.INFO)
        request_logger.propagate = False

    async def messages(self, ingress: str) -> AsyncIterator[Message]:
        """All tokens this replica produces for `ingress`, one message per step, with what it says of itself meanwhile;
        one without tokens where a second brings none. The first is empty: from then on `submit` may name `ingress`.
        When the reader goes away its requests are aborted."""
        channel = self.loop.channel(ingress)
        try:
            yield Message()
            async for message in channel.messages(HEARTBEAT_S):
                yield message
        finally:
            await self.loop.close_channel(ingress, channel)

    async def submit(self, ingress: str, submission: Submission) -> int | ValueError | Overloaded:
        """See `EngineLoop.submit`; or why the request is refused. Returned, not raised: Serve would write each with its
        traceback to the log, and most refusals come when there is the least time for it."""
        try:
            return await self.loop.submit(ingress, submission)
        except Overloaded as refusal:
            return refusal
        except ValueError as refusal:
            return ValueError(str(refusal))  # plain: a library's own subclass may not survive the journey

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Frees everything these requests hold before the next step begins."""
        await self.loop.abort(request_ids)

    async def close(self, ingress: str) -> None:
        """Ends the stream of an ingress that leaves; what runs for it is aborted."""
        channel = self.loop.channels.get(ingress)
        if channel is not None:
            channel.close()

    async def progress(self, request_id: str) -> int | None:
        """See `EngineLoop.progress`."""
        return self.loop.progress(request_id)

    async def peer_dead(self, peer: bytes) -> None:
        """The process of another replica, named by what it advertised, has ended."""
        await self.loop.peer_dead(peer)

    async def timelines(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        """What became of all that the client's request `request_id` led to here; see `Timelines.find`."""
        return self.loop.timelines.find(request_id, tenant, self.loop.engine.clock())

    async def live_requests(self, tenant: str | None) -> list[dict[str, Any]]:
        """The requests in flight here; see `Timelines.live`."""
        return self.loop.timelines.live(tenant, self.loop.engine.clock())

    async def metrics_text(self) -> str:
        return self.loop.metrics.text()

    def record_replica_metadata(self) -> dict[str, Any]:
        """The static part of what this replica advertises; Serve hands it to every router."""
        return self.profile.model_dump()

    def check_health(self) -> None:
        if not self.loop.is_alive:
            logger.error("the engine thread has ended: this replica cannot serve")
            os._exit(1)


def load_engine(path: Path, dtype: str, max_model_len: int | None, config: EngineConfig, num_threads: int) -> Engine:
    """The engine of a replica, not warm yet. `dtype` "auto" is the checkpoint's; ValueError names what cannot be."""
    torch.set_num_threads(num_threads)  # Ray sets OMP_NUM_THREADS by its own accounting
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(path, None if dtype == "auto" else getattr(torch, dtype), max_model_len, device)
    return Engine(loaded, config, path)
