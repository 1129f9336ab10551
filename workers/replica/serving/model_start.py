"""The start of a replica whose steps a model computes: load the model, alone or with other ranks, and measure steps."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.weights.checkpoint import resolve_tokenizer
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.engine_loader import engine_of_ranks, load_engine
from crossdock.workers.replica.ranks.rank_loader import driver_of, failure_of, position_of, why_failed
from crossdock.workers.replica.ranks.rank_network import LOOPBACK
from crossdock.workers.replica.ranks.rank_socket import WorkerGroupAddress
from crossdock.workers.replica.ranks.step_deadline import StepDeadline
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.replica.serving.machine import describe_machine
from crossdock.workers.replica.serving.rank import Rank
from crossdock.workers.replica.serving.started import Started
from crossdock.workers.report.profile import SchedulingProfile

logger = logging.getLogger("ray.serve")

_LAST_WORDS_S = 1.0  # for a rank that fails to report why, before the view of the other ranks is taken for the reason


class ModelStart:
    """Starts the engine of a replica, with all its ranks, and watches these until the replica ends."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._ranks: list[Any] = []
        self._experts: Sequence[str] = ()  # a line about each way in which ranks could divide them
        self._watching: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Future[str] | None = asyncio.get_running_loop().create_future()  # why it failed

    async def run(self, reached: Callable[[str], None]) -> Started:
        """Load the model and measure its steps. `reached` is told the end of each phase."""
        spec = self._spec
        engine, profile = await (
            self._load(spec, reached) if spec.num_ranks == 1 else self._load_worker_group(spec, reached)
        )
        reached("steps")
        await asyncio.to_thread(check_adapters, engine, spec.lora_modules)
        folder = await asyncio.to_thread(spec.model.folder)
        checkpoint = engine.model.checkpoint or await asyncio.to_thread(fingerprint, folder)
        machine = await asyncio.to_thread(describe_machine, engine.model, engine.executor.runner.graphs_text)
        machine["experts"] = list(self._experts)
        self._starting = None
        return Started(engine, profile, checkpoint, machine, folder, self._ranks)

    async def _load(self, spec: ReplicaSpec, reached: Callable[[str], None]) -> tuple[Engine, SchedulingProfile]:
        event_loop = asyncio.get_running_loop()
        seconds = spec.rank_timeout_s

        def hung() -> None:
            event_loop.call_soon_threadsafe(self._lost, f"its GPU hangs: no step has ended for {seconds:g} s")

        deadline = partial(StepDeadline, seconds, hung)
        engine = await asyncio.to_thread(load_engine, spec, partial(reached, "weights"), deadline)
        reached("kernels")
        return engine, await asyncio.to_thread(warm_up, engine)

    async def _load_worker_group(
        self, spec: ReplicaSpec, reached: Callable[[str], None]
    ) -> tuple[Engine, SchedulingProfile]:
        """Start the other ranks in the other bundles of this replica's placement group, and load with them."""
        event_loop = asyncio.get_running_loop()
        failed = self._starting
        assert failed is not None

        def on_lost(why: str) -> None:
            event_loop.call_soon_threadsafe(self._lost, why)

        folder = await asyncio.to_thread(spec.model.folder)
        tokenizer = await asyncio.to_thread(resolve_tokenizer, spec.tokenizer, folder)
        worker_group = WorkerGroup(spec, worker_group_host(), on_lost)
        loaded: asyncio.Future[tuple[Engine, SchedulingProfile]] = event_loop.create_future()

        def load() -> None:
            try:
                engine = engine_of_ranks(worker_group.load(), worker_group, tokenizer)
                reached("kernels")
                ready = engine, warm_up(engine)
            except Exception as error:  # mostly because another rank failed, which reports why
                why = f"{worker_group.position}: {why_failed(error)}"
                logger.exception("%s failed", worker_group.position)
                event_loop.call_soon_threadsafe(event_loop.call_later, _LAST_WORDS_S, self._lost, why)
            else:
                event_loop.call_soon_threadsafe(loaded.set_result, ready)

        self._start_followers(spec, worker_group.address)
        threading.Thread(target=load, name="load", daemon=True).start()
        either: list[asyncio.Future[Any]] = [loaded, failed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            self._end_followers()
            raise failure_of(failed.result())
        self._experts = worker_group.experts
        return loaded.result()

    def _start_followers(self, spec: ReplicaSpec, address: WorkerGroupAddress) -> None:
        group = ray.util.get_current_placement_group()
        followers = (rank for rank in range(spec.num_ranks) if rank != driver_of(spec))
        for bundle, rank in enumerate(followers, 1):  # the driver has bundle 0
            resources = group.bundle_specs[bundle]
            actor = (
                ray.remote(Rank)
                .options(
                    num_cpus=int(resources.get("CPU", 0)),
                    num_gpus=resources.get("GPU", 0),
                    max_concurrency=2,  # it runs until it ends, and holds new weights meanwhile
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
                )
                .remote()
            )
            self._ranks.append(actor)
            watching = asyncio.create_task(self._watch(position_of(spec, rank), actor.run.remote(spec, rank, address)))
            self._watching.add(watching)

    async def _watch(self, position: RankPosition, running: Any) -> None:
        """Wait for the end of a follower, which is the end of the replica: no follower is asked to end."""
        try:
            await running
            why = "it has ended without an error"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        # The rank's own report comes by its connection.
        await asyncio.sleep(_LAST_WORDS_S)
        self._lost(f"{position}: {why}")

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


def check_adapters(engine: Engine, folders: Mapping[str, str]) -> None:
    """Check that the adapters of the start fit the model. ValueError: one does not; the message names it.

    A folder that is gone does not end a replica that starts again later: requests for this adapter get the reason.
    """
    for name, path in folders.items():
        folder = Path(path).expanduser().absolute()
        assert engine.adapters is not None, "settings with adapters have enable_lora"
        if not folder.is_dir():
            logger.warning("adapter %r cannot be served: its folder %s is gone", name, folder)
            continue
        try:
            engine.adapters.check(folder)
        except ValueError as error:
            raise ValueError(f"model.lora_modules: {name!r} cannot be served: {error}") from None


def worker_group_host() -> str:
    """Return the driver's address for its followers: the node's own, or loopback if all ranks are on this node."""
    table = ray.util.placement_group_table(ray.util.get_current_placement_group())
    is_on_one_node = len(set(table["bundles_to_node_id"].values())) == 1
    return LOOPBACK if is_on_one_node else str(ray.util.get_node_ip_address())
