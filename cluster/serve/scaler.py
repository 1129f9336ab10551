"""A deployment of one replica that changes the sizes of pools and the roles of replicas as router/scaling.py decides.

It follows the messages of all replicas, as an ingress does, and asks Serve for the changes.
"""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.experimental import internal_kv
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.handle import DeploymentHandle

from crossdock.cluster.config import DEVICES, ClusterConfig
from crossdock.cluster.dispatch.client import ReplicaClient, follow_members
from crossdock.cluster.dispatch.connections import READS_S
from crossdock.cluster.dispatch.loops import raise_if_ended
from crossdock.router.division import Starts
from crossdock.router.scaling import Bounds, Flip, Resize, Scaling
from crossdock.workers.replica.serving.known_starts import first_guess, known_starts, remember_start
from crossdock.workers.replica.serving.own_node import bind_serve_to_own_node
from crossdock.workers.report.profile import SchedulingProfile

logger = logging.getLogger("ray.serve")

_NUM_DECISIONS = 100  # newest decisions that a client may ask for
_RETRY_S = 1.0  # pause before the messages of a replica that could not be reached are followed again


class Scaler:
    """Applies the decisions of `Scaling` to the application that it is a deployment of.

    The application must run with Serve's external scaler enabled: `crossdock serve` does so; a Serve config file needs
    `external_scaler_enabled: true`.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, models: Sequence[ClusterConfig], engines: dict[str, DeploymentHandle]
    ) -> None:
        """`models`: the configuration of each. `engines`: of their pools."""
        bind_serve_to_own_node()
        self._app = serve.get_replica_context().app_name
        self._interval_s = models[0].scaling.interval_s
        bounds = {
            pool.name: Bounds(pool.role, pool.replicas, pool.most, each.model.name, pool.devices)
            for each in models
            for pool in each.pools
        }
        self._scaling = Scaling(models[0].scaling, bounds)
        self._devices = models[0].scaling.devices
        self._divides = len(models) > 1
        self._decisions: deque[dict[str, Any]] = deque(maxlen=_NUM_DECISIONS)
        self._clients: dict[str, ReplicaClient] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        lazy = {each.model.name: each for each in models if each.starts_on_request}
        self._start_keys = {name: _start_key(each) for name, each in lazy.items()}
        known = await asyncio.to_thread(known_starts)
        learnt = {name: known[key] for name, key in self._start_keys.items() if key in known}
        guesses = {name: await asyncio.to_thread(_guess, each) for name, each in lazy.items() if name not in learnt}
        self._starts = Starts(guesses, learnt)
        self._awake = asyncio.Event()
        self._controller: Any = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        await self._require_enabled()
        name = f"scaler-{uuid.uuid4().hex}"
        for pool, handle in engines.items():
            follow_members({pool: handle}, name, partial(self._join, pool), self._leave)
        self._running = asyncio.create_task(self._run())

    async def __del__(self) -> None:  # Serve awaits it when the replica stops
        self._running.cancel()
        for name in list(self._following):
            self._leave(name)

    def check_health(self) -> None:
        """Raise the error that ended the scaling loop, or a reader of a replica's messages: Serve logs the error and
        replaces this replica."""
        raise_if_ended([self._running, *self._following.values()])

    def start(self, model: str) -> float:
        """Have a replica of a model start: a request waits. Returns the predicted seconds until it is up."""
        now = time.monotonic()
        self._scaling.ask(model, now)
        self._awake.set()
        return self._starts.remaining(model, now)

    def decisions(self) -> list[dict[str, Any]]:
        """Return the newest decisions since this scaler started, oldest first: fields of `Resize` or `Flip`, and with
        them `at` (Unix seconds) and `error` (null: applied)."""
        return list(self._decisions)

    def _join(self, pool: str, name: str, client: ReplicaClient, profile: SchedulingProfile) -> None:
        self._clients[name] = client
        self._scaling.join(name, pool, profile)
        model = self._scaling.pools[pool].model
        if (seconds := self._starts.end(model, time.monotonic())) is not None:
            logger.info("the first replica of %s was up after %.1f s", model, seconds)
            remember_start(self._start_keys[model], self._starts.learnt[model])
        self._following[name] = asyncio.create_task(self._follow(name, client))

    def _leave(self, name: str) -> None:
        """Close the stream of a replica's messages: an open stream would hold up the replica's drain."""
        self._scaling.leave(name)
        self._following.pop(name).cancel()
        del self._clients[name]

    async def _follow(self, name: str, client: ReplicaClient) -> None:
        try:
            while True:
                try:
                    notified_at = time.monotonic()
                    async for message in client.messages():
                        if time.monotonic() - notified_at > READS_S:
                            notified_at = time.monotonic()
                            client.still_reads()
                        if message.live is not None:
                            self._scaling.hear(name, message.live, time.monotonic())
                except Exception as error:  # of any kind: Serve reports when the replica is gone for good
                    logger.info("replica %s cannot be reached: %s", name, error)
                self._scaling.lose(name)
                await asyncio.sleep(_RETRY_S)
        finally:
            await client.close()

    async def _run(self) -> None:
        self._scaling.targets.update(await self._sizes())
        await self._end_unasked()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._awake.wait()
            self._awake.clear()
            if self._divides:
                has = ray.cluster_resources() if self._devices is None else self._devices  # nodes come and go
                self._scaling.room = {name: has.get(name, 0.0) for name in DEVICES}
            for action in self._scaling.decide(time.monotonic()):
                decision = {"at": time.time(), **asdict(action), "error": None}
                self._decisions.append(decision)
                try:
                    await self._apply(action)
                except Exception as error:  # e.g. the replica has just died, which the next decision takes into account
                    logger.error("%s could not be applied: %s", action, error)
                    decision["error"] = str(error) or type(error).__name__
                    if isinstance(action, Resize):
                        self._scaling.undo(action)

    async def _require_enabled(self) -> None:
        """Raise ValueError where Serve would refuse every change: a start that fails says so, a log does not."""
        details = await self._controller.get_serve_instance_details.remote()
        if not details["applications"][self._app]["external_scaler_enabled"]:
            raise ValueError(
                f"external_scaler_enabled must be true for the application {self._app!r}, whose pools may grow or "
                f"change roles: serve.run(…, external_scaler_enabled=True), or the same beside `name` in a Serve "
                f"config file"
            )

    async def _end_unasked(self) -> None:
        """End the replicas that Serve starts of models that no request has asked for. A scaler that follows a lost one
        ends none: requests may have asked for them."""
        details = await self._controller.get_serve_instance_details.remote()
        deployed_at = details["applications"][self._app]["last_deployed_time_s"]
        if internal_kv._internal_kv_put(f"crossdock-scaler-{self._app}-{deployed_at}", b"", overwrite=False):
            return
        for pool, bounds in self._scaling.pools.items():
            if bounds.model in self._start_keys:
                self._scaling.targets[pool] = 0
                await self._controller.update_deployment_replicas.remote(DeploymentID(pool, self._app), 0)

    async def _sizes(self) -> dict[str, int]:
        """Return how many replicas each pool should have now, as Serve was last told: this may be a restarted scaler,
        and some replicas may be about to start."""
        details = await self._controller.get_serve_instance_details.remote()
        deployments = details["applications"][self._app]["deployments"]
        return {pool: deployments[pool]["target_num_replicas"] for pool in self._scaling.pools if pool in deployments}

    async def _apply(self, action: Resize | Flip) -> None:
        logger.warning("%s", action)
        if isinstance(action, Flip):
            await self._clients[action.replica].call("assign_role", action.role)
        else:
            deployment = DeploymentID(action.pool, self._app)
            await self._controller.update_deployment_replicas.remote(deployment, action.replicas)
            if action.replicas_before == 0:
                self._starts.begin(self._scaling.pools[action.pool].model, time.monotonic())


def _start_key(config: ClusterConfig) -> str:
    """Return the name under which the start of a model is kept: what its seconds depend on."""
    return ", ".join(
        f"{pool.checkpoint or config.model.path} {pool.num_ranks} {pool.emulated}" for pool in config.pools
    )


def _guess(config: ClusterConfig) -> float:
    folder = None if config.is_emulated else config.model.folder(needs_weights=False)
    return first_guess(folder)
