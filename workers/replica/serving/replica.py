"""A replica under Ray: a Serve deployment around one engine.

Of several ranks, the Serve replica is the driver and the others are actors in its placement group. They live and die
together: Serve starts, heals and ends the replica alone.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from crossdock.kvtransfer.transport import TransportUnavailable
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.weights.checkpoint import resolve_model, resolve_tokenizer
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.chunk_log import chunk_logger
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.engine_loader import load_engine
from crossdock.workers.replica.ranks.gang import Gang
from crossdock.workers.replica.ranks.rank_loader import driver_of, failure_of, position_of, why_failed
from crossdock.workers.replica.ranks.rank_network import LOOPBACK
from crossdock.workers.replica.ranks.rank_socket import GangAddress
from crossdock.workers.replica.serving.engine_thread import EngineThread
from crossdock.workers.replica.serving.fault import end_if_marked
from crossdock.workers.replica.serving.follower import follow
from crossdock.workers.replica.serving.interpreter import prepare_interpreter
from crossdock.workers.replica.serving.machine import describe_machine, process_age
from crossdock.workers.replica.serving.outlet import Outlet
from crossdock.workers.replica.serving.own_node import bind_serve_to_own_node
from crossdock.workers.replica.serving.readers import Superseded
from crossdock.workers.replica.transfer.handover import connect
from crossdock.workers.replica.transfer.landing import open_landing
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.submission import InvalidField, Overloaded, Submission

logger = logging.getLogger("ray.serve")

_LAST_WORDS_S = 1.0  # for a rank that fails to report why, before the view of the other ranks is taken for the reason


class Rank:
    """A follower in a process of its own. Both end together."""

    def run(self, spec: ReplicaSpec, rank: int, address: GangAddress) -> None:
        """Follow, on the addresses of the node that this process is on."""
        node = ray.util.get_node_ip_address()
        host = LOOPBACK if address.host == LOOPBACK else node
        follow(spec, rank, address, host, (spec.transfer and spec.transfer.host) or node)


class Replica:
    """One engine. Its constructor loads the model; Serve routes to it once that is done."""

    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        self._ages = {"libraries imported": process_age()}  # s of this process when each phase of its start ended
        _log_where_serve_does(with_chunks=spec.engine.log_chunks)
        bind_serve_to_own_node()
        self._fault_token_ids = spec.engine.fault_token_ids
        if self._fault_token_ids:
            logger.warning("fault_token_ids is set, for a test: a marked prompt ends this replica")
        self._ranks: list[Any] = []
        self._watching: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Future[str] | None = asyncio.get_running_loop().create_future()  # why it failed
        engine, profile = await (self._load(spec) if spec.num_ranks == 1 else self._load_gang(spec))
        self._ages["steps measured"] = process_age()
        name = await asyncio.to_thread(lambda: fingerprint(resolve_model(spec.model.path)))
        weights = spec.weights_of(name)
        of_pages = "any weights" if spec.mixes_weights else weights
        self.engine_thread = thread = _start(engine, name, of_pages, spec)
        self._starting = None
        await asyncio.to_thread(prepare_interpreter)
        outlet = Outlet(thread, ray.util.get_node_ip_address())
        await outlet.open()
        # Remote calls: Serve finds the methods here, under the names that `ReplicaClient` calls.
        self.messages = outlet.messages
        self.abort, self.progress = thread.abort, thread.progress
        self.assign_role, self.peer_dead = thread.assign_role, thread.peer_dead
        self.timelines, self.live_requests = thread.find_timelines, thread.live_requests
        self.metrics_text = thread.metrics_text
        compatibility = engine.pool_spec(of_pages).compatibility
        machine = await asyncio.to_thread(describe_machine, engine.model, engine.pipeline.runner.graphs_text)
        self._ages["ready"] = process_age()
        ages = {phase: round(age, 2) for phase, age in sorted(self._ages.items(), key=lambda item: item[1])}
        logger.info("started: %s", ", ".join(f"{phase} after {age:.1f} s" for phase, age in ages.items()))
        self._machine = machine | {"start_s": ages}
        update = {"role": spec.role, "compatibility": compatibility, "weights": weights, **thread.addresses}
        self.profile = profile.model_copy(update=update)

    # -- remote calls that add to the engine thread's own ------------------------------------------------------------

    async def submit(self, ingress: str, submissions: Sequence[Submission]) -> list[int | ValueError | RuntimeError]:
        """Call `EngineThread.submit` for each, and return the reason where a request is refused.

        Serve would log each raised refusal with its traceback. Most refusals come under load, when there is least time
        for logs.
        """
        return await asyncio.gather(*(self._submit(ingress, submission) for submission in submissions))

    async def _submit(self, ingress: str, submission: Submission) -> int | ValueError | RuntimeError:
        end_if_marked(submission.prompt_token_ids, self._fault_token_ids)
        try:
            return await self.engine_thread.submit(ingress, submission)
        except (Overloaded, InvalidField, Superseded) as refusal:
            return refusal
        except ValueError as refusal:
            return ValueError(str(refusal))  # plain: a library's own subclass may not survive the journey

    async def watched(self, seen: Mapping[str, int], tenant: str | None) -> dict[str, Any]:
        """Return `EngineThread.watched`, with the pool, the profile and the machine of this replica."""
        profile = self.profile.model_dump(exclude={"peer", "rows_peer"}, mode="json")
        pool = serve.get_replica_context().deployment
        return {"pool": pool, "profile": profile, "machine": self._machine, **self.engine_thread.watched(seen, tenant)}

    # -- calls of Serve ----------------------------------------------------------------------------------------------

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the static part of what this replica advertises; Serve hands it to every router."""
        return self.profile.model_dump()

    def check_health(self) -> None:
        """End the process where the engine thread has ended: Serve starts another replica."""
        if not self.engine_thread.is_alive:
            logger.error("the engine thread has ended: this replica cannot serve")
            os._exit(1)

    # -- ranks -------------------------------------------------------------------------------------------------------

    async def _load(self, spec: ReplicaSpec) -> tuple[Engine, SchedulingProfile]:
        engine = await asyncio.to_thread(load_engine, spec)
        self._ages["model loaded"] = process_age()
        return engine, await asyncio.to_thread(warm_up, engine)

    async def _load_gang(self, spec: ReplicaSpec) -> tuple[Engine, SchedulingProfile]:
        """Start the other ranks in the other bundles of this replica's placement group, and load with them."""
        event_loop, failed = asyncio.get_running_loop(), self._starting
        assert failed is not None

        def on_lost(why: str) -> None:
            event_loop.call_soon_threadsafe(self._lost, why)

        path = await asyncio.to_thread(resolve_tokenizer, spec.tokenizer, spec.model.path)
        gang = Gang(spec, gang_host(), on_lost)
        loaded: asyncio.Future[tuple[Engine, SchedulingProfile]] = event_loop.create_future()

        def load() -> None:
            try:
                engine = Engine(gang.load(), spec.engine, path, gang=gang)
                ready = engine, warm_up(engine)
            except Exception as error:  # mostly because another rank failed, which reports why
                why = f"{gang.position}: {why_failed(error)}"
                logger.exception("%s failed", gang.position)
                event_loop.call_soon_threadsafe(event_loop.call_later, _LAST_WORDS_S, self._lost, why)
            else:
                event_loop.call_soon_threadsafe(loaded.set_result, ready)

        self._start_followers(spec, gang.address)
        threading.Thread(target=load, name="load", daemon=True).start()
        either: list[asyncio.Future[Any]] = [loaded, failed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            self._end_followers()
            raise failure_of(failed.result())
        return loaded.result()

    def _start_followers(self, spec: ReplicaSpec, address: GangAddress) -> None:
        group = ray.util.get_current_placement_group()
        followers = (rank for rank in range(spec.num_ranks) if rank != driver_of(spec))
        for bundle, rank in enumerate(followers, 1):  # the driver has bundle 0
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
            watching = asyncio.create_task(self._watch(position_of(spec, rank), actor.run.remote(spec, rank, address)))
            self._watching.add(watching)

    async def _watch(self, position: RankPosition, running: Any) -> None:
        """Wait for the end of a follower, which never ends alone."""
        try:
            await running
        except Exception as error:
            await asyncio.sleep(_LAST_WORDS_S)  # the rank's own report comes by its connection
            self._lost(f"{position}: {type(error).__name__}: {error}")

    def _lost(self, why: str) -> None:
        """End the replica: a rank is gone. While it starts, its constructor raises; later the process ends on the spot,
        which its readers see at once and Serve heals."""
        if self._starting is not None:
            if not self._starting.done():
                self._starting.set_result(why)
            return
        logger.error("this replica ends: %s", why)
        for handler in logger.handlers:
            handler.flush()
        self._end_followers()
        os._exit(1)

    def _end_followers(self) -> None:
        for actor in self._ranks:
            ray.kill(actor)


def gang_host() -> str:
    """Return the driver's address for its followers: the node's own, or loopback if all ranks are on this node."""
    table = ray.util.placement_group_table(ray.util.get_current_placement_group())
    is_on_one_node = len(set(table["bundles_to_node_id"].values())) == 1
    return LOOPBACK if is_on_one_node else str(ray.util.get_node_ip_address())


def _start(engine: Engine, name: str, of_pages: str, spec: ReplicaSpec) -> EngineThread:
    """Start the thread of an engine, with transfers where the cluster has any.

    `name` names the checkpoint, whose embeddings of pictures it takes; `of_pages` what KV pages are computed with.
    """
    if spec.transfer is None:
        return EngineThread(engine)
    transfer = spec.transfer.model_copy(update={"host": spec.transfer.host or ray.util.get_node_ip_address()})
    arguments = spec.role, transfer
    rows = [partial(open_landing, engine, name, *arguments)] if engine.scheduler.encoding.arriving.num_pages else []
    try:
        return EngineThread(engine, partial(connect, engine, of_pages, *arguments), *rows)
    except TransportUnavailable as unavailable:
        if spec.role != "mixed" or rows:
            raise
        logger.warning("no prefix is fetched from another replica, or sent to one: %s", unavailable)
        return EngineThread(engine)


def _log_where_serve_does(*, with_chunks: bool) -> None:
    """Have our loggers write where Serve writes this replica's log, in the form Serve's is set to."""
    ours = logging.getLogger("crossdock")
    for handler in logger.handlers:
        ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    if with_chunks:
        chunk_logger.setLevel(logging.DEBUG)
