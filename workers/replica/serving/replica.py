"""A replica under Ray: a Serve deployment around one engine. No torch, unless a model computes its steps.

Of several ranks, the Serve replica is the driver and the others are actors in its placement group. They live and die
together: Serve starts, heals and ends the replica alone.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError

from crossdock.kvtransfer.transport import TransportUnavailable
from crossdock.workers.model.text_files import text_answer
from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.engine.chunk_log import chunk_logger
from crossdock.workers.replica.engine.engine import OtherWeights
from crossdock.workers.replica.serving.controls import Controls
from crossdock.workers.replica.serving.engine_thread import EngineThread
from crossdock.workers.replica.serving.fault import end_if_marked
from crossdock.workers.replica.serving.interpreter import prepare_interpreter, process_age, wait_quietly
from crossdock.workers.replica.serving.kv_events import open_publisher
from crossdock.workers.replica.serving.notices import leave_notice, remove_notice
from crossdock.workers.replica.serving.outlet import Outlet
from crossdock.workers.replica.serving.own_node import bind_serve_to_own_node
from crossdock.workers.replica.serving.readers import Superseded
from crossdock.workers.replica.serving.started import Started, start_emulated
from crossdock.workers.replica.transfer.handover import connect
from crossdock.workers.schedule.policies.pace import promises_beyond
from crossdock.workers.schedule.request.submission import Overloaded, Submission

logger = logging.getLogger("ray.serve")

_NOTICE_S = 60.0  # after the start, until the notice about it is removed: the command has read it
_GRAMMARS_AFTER_S = 2.0
"""Seconds after the start until the tokenizer is read for grammars, unless a request needs it before. It holds the
interpreter for a second, in which Serve and the ingresses would wait for their answers."""


class Replica:
    """One engine. Its constructor loads the model; Serve routes to it once that is done."""

    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        self._ages: dict[str, float] = {}  # s of this process when each phase of its start ended
        self._role = spec.role
        _log_where_serve_does(with_chunks=spec.engine.log_chunks)
        self._reached("process")
        bind_serve_to_own_node()
        self._fault_token_ids = spec.engine.fault_token_ids
        if self._fault_token_ids:
            logger.warning("fault_token_ids is set, for a test: a marked prompt ends this replica")
        self._start, started = await _started(spec, self._reached)
        engine = started.engine
        self._followers = started.followers
        weights = spec.weights_of(started.checkpoint)
        of_pages = "any weights" if spec.mixes_weights else weights
        self.engine_thread = thread = _start_thread(started, of_pages, spec)
        await asyncio.to_thread(prepare_interpreter)
        outlet = Outlet(thread, ray.util.get_node_ip_address(), self._submit)
        await outlet.open()
        # Remote calls: Serve finds the methods here, under the names that `ReplicaClient` calls.
        self.messages = outlet.messages
        self.abort = thread.abort
        self.progress = thread.progress
        self.assign_role = thread.assign_role
        self.peer_dead = thread.peer_dead
        controls = self._controls = Controls(thread, spec.num_ranks, started.folder, started.checkpoint)
        self.pause = controls.pause
        self.resume = controls.resume
        self.reset_cache = controls.reset_cache
        self.check_adapter = controls.check_adapter
        self.num_ranks = controls.num_ranks
        self.call_weights = controls.call_weights
        self.put_weights = controls.put_weights
        self.catch_up = controls.catch_up
        self.checksums = controls.checksums
        self.may_sleep = controls.may_sleep
        self.given_up = controls.given_up
        self.sleep = controls.sleep
        self.wake_up = controls.wake_up
        self.timelines = thread.find_timelines
        self.live_requests = thread.live_requests
        self.metrics_text = thread.metrics_text
        compatibility = engine.pool_spec(of_pages).compatibility
        for name, least in promises_beyond(started.profile.cost, engine.config.slo_classes).items():
            text = (
                "the promise of class %s is beyond this machine: a token takes at least %.0f ms; prompts get half of it"
            )
            logger.warning(text, name, 1000 * least)
        self._reached("ready")
        context = serve.get_replica_context()
        ages = {phase: round(age, 2) for phase, age in sorted(self._ages.items(), key=lambda item: item[1])}
        logger.info("started: %s", ", ".join(f"{phase} after {age:.1f} s" for phase, age in ages.items()))
        thread.metrics.started(ages)
        self._machine = started.machine | {"start_s": ages}
        if thread.kv_events is not None:
            self._machine["kv_events"] = thread.kv_events.addresses
        update = {"role": spec.role, "compatibility": compatibility, "weights": weights, **thread.addresses}
        update["dtype"] = started.machine["dtype"] if spec.emulated is None else ""
        self.profile = started.profile.model_copy(update=update | {"start_s": ages["ready"]})
        forget = partial(remove_notice, context.app_name, "start", context.replica_id.unique_id)
        asyncio.get_running_loop().call_later(_NOTICE_S, forget)
        asyncio.get_running_loop().call_later(_GRAMMARS_AFTER_S, engine.grammars.warm_up)

    def _reached(self, phase: str) -> None:
        self._ages[phase] = process_age()
        logger.info("start: %s after %.1f s", phase, self._ages[phase])
        context = serve.get_replica_context()
        content = {"pool": context.deployment, "role": self._role, "ages": dict(self._ages), "log": log_file()}
        leave_notice(context.app_name, "start", context.replica_id.unique_id, content)

    # -- submissions, and remote calls that add to the engine thread's own -------------------------------------------

    async def _submit(self, ingress: str, submission: Submission) -> int | Exception:
        """Call `EngineThread.submit`, and return the reason where the request is refused."""
        end_if_marked(submission.prompt_token_ids, self._fault_token_ids)
        try:
            return await self.engine_thread.submit(ingress, submission)
        except (Overloaded, ValueError, Superseded, OtherWeights) as refusal:
            return refusal

    async def watched(self, seen: Mapping[str, int], owner: str | None) -> dict[str, Any]:
        """Return `EngineThread.watched`, with the pool, the profile and the machine of this replica."""
        profile = self.profile.model_dump(exclude={"peer"}, mode="json")
        pool = serve.get_replica_context().deployment
        return {"pool": pool, "profile": profile, "machine": self._machine, **self.engine_thread.watched(seen, owner)}

    async def read_objects(self, tensors: list[Any]) -> str:
        """Read new weights from Ray's object store, each rank from its node's: a mapping of checkpoint names to arrays,
        as the only element. ValueError as `read`, and where a rank is lost."""
        held = [follower.hold.remote(tensors[0]) for follower in self._followers]
        found = await tensors[0]
        try:
            await asyncio.gather(*held)
        except RayActorError as error:
            raise ValueError(f"a rank is lost: {error}") from None
        return await self._controls.read_arrays(found)

    # -- calls of Serve ----------------------------------------------------------------------------------------------

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the static part of what this replica advertises; Serve hands it to every router."""
        return self.profile.model_dump()

    def check_health(self) -> None:
        """End the process where a thread of the engine has ended: Serve starts another replica."""
        if not self.engine_thread.is_alive:
            logger.error("a thread of the engine has ended: this replica cannot serve")
            os._exit(1)
        self.engine_thread.tell_of_stuck_tiers()


async def _started(spec: ReplicaSpec, reached: Callable[[str], None]) -> tuple[object, Started]:
    """Start the engine. Returns its start too, which watches the ranks as long as it is kept."""
    if spec.emulated is not None:
        return None, start_emulated(spec, spec.emulated)
    wait_quietly(spec.num_threads)
    from crossdock.workers.replica.serving.model_start import ModelStart  # imports torch
    from crossdock.workers.replica.serving.text_start import start_text_encoder

    reached("libraries")
    folder = await asyncio.to_thread(spec.model.folder)
    if text_answer(folder) is not None:
        return None, await asyncio.to_thread(start_text_encoder, spec, reached)
    start = ModelStart(spec)
    return start, await start.run(reached)


def _start_thread(started: Started, of_pages: str, spec: ReplicaSpec) -> EngineThread:
    """Start the thread of an engine, with transfers where the cluster has any.

    `of_pages` names what KV pages are computed with.
    """
    engine = started.engine
    kv_events = open_publisher(engine.config)
    if spec.transfer is None or not started.profile.generates:  # else a replica without pages
        return EngineThread(engine, kv_events=kv_events)
    transfer = spec.transfer.model_copy(update={"host": spec.transfer.host or ray.util.get_node_ip_address()})
    arguments = spec.role, transfer
    try:
        return EngineThread(engine, partial(connect, engine, of_pages, *arguments), kv_events)
    except TransportUnavailable as unavailable:
        if spec.role != "mixed":
            raise
        logger.warning("no prefix is fetched from another replica, or sent to one: %s", unavailable)
        return EngineThread(engine, kv_events=kv_events)


def log_file() -> str:
    """Return the path of this replica's log on its node; empty: it has none."""
    for handler in logger.handlers:
        file = getattr(handler, "target", handler)  # Serve may collect lines before it writes them
        if isinstance(file, logging.FileHandler):
            return file.baseFilename
    return ""


def _log_where_serve_does(*, with_chunks: bool) -> None:
    """Have our loggers write where Serve writes this replica's log, in the form Serve's is set to."""
    ours = logging.getLogger("crossdock")
    for handler in logger.handlers:
        ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    if with_chunks:
        chunk_logger.setLevel(logging.DEBUG)
