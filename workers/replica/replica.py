"""The Ray side of a replica: a Serve deployment around one engine. An ingress opens one stream and submits by calls.

Of several ranks, the Serve replica is the driver and the others are actors in its placement group. They live and die
together: Serve starts, heals and ends the replica alone.
"""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from crossdock.workers.model.checkpoint import fingerprint, resolve_model
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.load import load_model
from crossdock.workers.replica.config import EngineConfig, TransferConfig
from crossdock.workers.replica.docks import RankDock
from crossdock.workers.replica.engine import Engine, warm_up
from crossdock.workers.replica.engine_thread import EngineThread
from crossdock.workers.replica.handover import connect
from crossdock.workers.replica.ranks import Address, Gang, GangSpec, RankFailed, follow
from crossdock.workers.report.advertise import Message
from crossdock.workers.report.profile import Role, SchedulingProfile
from crossdock.workers.schedule.request import InvalidField, Overloaded, Submission

logger = logging.getLogger("ray.serve")

HEARTBEAT_S = 1.0
_LAST_WORDS_S = 1.0  # for a rank that fails to say why, before what the others see of it is taken for the reason


class Rank:
    """A follower in a process of its own, which it ends with."""

    def run(self, spec: GangSpec, rank: int, address: Address) -> None:
        follow(spec, rank, address, RankDock)


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
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        rank_timeout_s: float = 60.0,
    ) -> None:
        """`num_threads`: of each rank. `transfer`: how KV pages travel; None where no replica is kept for prompts or
        tokens alone. `rank_timeout_s`: a rank that takes longer for its part of a step counts as hung."""
        ours = logging.getLogger("crossdock")
        for handler in logger.handlers:  # these go where Serve writes this replica's log, in the form it is set to
            ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        ours.propagate = False
        self._ranks: list[Any] = []
        self._watching: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Future[str] | None = asyncio.get_running_loop().create_future()  # why it failed
        path = await asyncio.to_thread(resolve_model, model)
        if tensor_parallel_size * pipeline_parallel_size == 1:
            loaded = await asyncio.to_thread(load_engine, path, dtype, max_model_len, engine, num_threads)
            profile = await asyncio.to_thread(warm_up, loaded)
        else:
            spec = GangSpec(
                model,
                dtype,
                max_model_len,
                engine.page_size,
                engine.budget,
                num_threads,
                tensor_parallel_size,
                pipeline_parallel_size,
                rank_timeout_s,
                attention_backend=engine.attention_backend,
                kv_cache_dtype=engine.kv_cache_dtype,
            )
            loaded, profile = await self._load_gang(spec, path, engine)
        name = await asyncio.to_thread(fingerprint, path)
        peer = b""
        if transfer is None:
            self.loop = EngineThread(loaded)
        else:
            transfer = transfer.model_copy(update={"host": transfer.host or ray.util.get_node_ip_address()})
            self.loop = EngineThread(loaded, partial(connect, loaded, name, role, transfer))
            assert self.loop.handover is not None
            peer = self.loop.handover.dock.blob
        self._starting = None
        compatibility = loaded.pool_spec(name).compatibility
        self.profile = profile.model_copy(update={"role": role, "peer": peer, "compatibility": compatibility})

    # -- ranks -------------------------------------------------------------------------------------------------------

    async def _load_gang(self, spec: GangSpec, path: Path, config: EngineConfig) -> tuple[Engine, SchedulingProfile]:
        """Starts the other ranks in the other bundles of this replica's placement group, and loads with them."""
        event_loop, failed = asyncio.get_running_loop(), self._starting
        assert failed is not None

        def on_lost(why: str) -> None:
            event_loop.call_soon_threadsafe(self._lost, why)

        gang = Gang(spec, ray.util.get_node_ip_address(), on_lost)
        loaded: asyncio.Future[tuple[Engine, SchedulingProfile]] = event_loop.create_future()

        def load() -> None:
            try:
                engine = Engine(gang.load(), config, path, gang=gang)
                ready = engine, warm_up(engine)
            except Exception as error:  # mostly because another rank failed, which says why
                why = f"{gang.place}: {type(error).__name__}: {error}"
                logger.exception("%s failed", gang.place)
                event_loop.call_soon_threadsafe(event_loop.call_later, _LAST_WORDS_S, self._lost, why)
            else:
                event_loop.call_soon_threadsafe(loaded.set_result, ready)

        self._place(spec, gang.address)
        threading.Thread(target=load, name="load", daemon=True).start()
        either: list[asyncio.Future[Any]] = [loaded, failed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            self._end_ranks()
            raise RankFailed(failed.result())
        return loaded.result()

    def _place(self, spec: GangSpec, address: Address) -> None:
        group = ray.util.get_current_placement_group()
        followers = (rank for rank in range(spec.size) if rank != spec.driver)
        for bundle, rank in enumerate(followers, 1):  # this one has bundle 0
            resources = group.bundle_specs[bundle]
            actor = (
                ray.remote(Rank)
                .options(
                    num_cpus=int(resources.get("CPU", 0)),
                    num_gpus=resources.get("GPU", 0),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
                )
                .remote()
            )
            self._ranks.append(actor)
            watching = asyncio.create_task(self._watch(spec.place(rank), actor.run.remote(spec, rank, address)))
            self._watching.add(watching)

    async def _watch(self, place: RankPosition, running: Any) -> None:
        """Until the follower ends, which it never does alone."""
        try:
            await running
        except Exception as error:
            await asyncio.sleep(_LAST_WORDS_S)  # its own words come by another way
            self._lost(f"{place}: {type(error).__name__}: {error}")

    def _lost(self, why: str) -> None:
        """A rank is gone: so is the replica. While it starts, its constructor says so; later the process ends on the
        spot, which its readers see at once and Serve heals."""
        if self._starting is not None:
            if not self._starting.done():
                self._starting.set_result(why)
            return
        logger.error("this replica ends: %s", why)
        for handler in logger.handlers:
            handler.flush()
        self._end_ranks()
        os._exit(1)

    def _end_ranks(self) -> None:
        for actor in self._ranks:
            ray.kill(actor)

    # -- what an ingress calls ---------------------------------------------------------------------------------------

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
        """See `EngineThread.submit`; or why the request is refused. Returned, not raised: Serve would write each with its
        traceback to the log, and most refusals come when there is the least time for it."""
        try:
            return await self.loop.submit(ingress, submission)
        except (Overloaded, InvalidField) as refusal:
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
        """See `EngineThread.progress`."""
        return self.loop.progress(request_id)

    async def keep_for(self, role: Role) -> None:
        """Changes this replica's role, without a restart; see `EngineThread.keep_for`."""
        await self.loop.keep_for(role)

    async def peer_dead(self, peer: bytes) -> None:
        """The process of another replica, named by what it advertised, has ended."""
        await self.loop.peer_dead(peer)

    async def timelines(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        """What became of all that the client's request `request_id` led to here; see `Timelines.find`."""
        return self.loop.timelines.find(request_id, tenant, self.loop.engine.clock())

    async def live_requests(self, tenant: str | None) -> list[dict[str, Any]]:
        """The requests in flight here; see `Timelines.live`."""
        return self.loop.timelines.live(tenant, self.loop.engine.clock())

    async def watched(self, seen: Mapping[str, int], tenant: str | None) -> dict[str, Any]:
        """How it does now, and its newest steps; see `EngineThread.watched`."""
        profile = self.profile.model_dump(exclude={"peer"}, mode="json")
        return {"pool": serve.get_replica_context().deployment, "profile": profile, **self.loop.watched(seen, tenant)}

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
    loaded = load_model(
        path,
        None if dtype == "auto" else getattr(torch, dtype),
        max_model_len,
        device,
        kv_bytes=config.budget.known(device) or 0,
        attention_backend=config.attention_backend,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    return Engine(loaded, config, path)
