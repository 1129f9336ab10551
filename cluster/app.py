"""The Ray Serve application: an ingress that speaks the OpenAI API, and one engine deployment per pool.

`crossdock.cluster.app:build` is the import path for `serve run`, `serve deploy` and RayService manifests.
"""

import asyncio
import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import ray
import uvicorn
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.config import HTTPOptions, ProxyLocation, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from crossdock.cluster import membership
from crossdock.cluster.api import build_api
from crossdock.cluster.config import ClusterConfig, PoolConfig
from crossdock.cluster.dispatch import Dispatcher, ReplicaDead
from crossdock.cluster.pinning import PinningRouter
from crossdock.cluster.text import Text
from crossdock.cluster.tiers import Tiers
from crossdock.workers.checkpoint import resolve_model
from crossdock.workers.live import Message
from crossdock.workers.profile import SchedulingProfile
from crossdock.workers.replica import Replica
from crossdock.workers.request import Overloaded, Submission

logger = logging.getLogger("ray.serve")

APP_NAME = "crossdock"
_NEVER_QUEUE = 1_000_000  # admission is the engine's business; Serve's own limit must not interfere
_MESSAGE = {"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 << 20)}


class ReplicaClient:
    """One replica behind a Serve handle, every call pinned to it."""

    def __init__(self, handle: DeploymentHandle, replica_id: str, ingress: str) -> None:
        self._handle = handle.options(session_id=replica_id)
        self._ingress = ingress

    async def messages(self) -> AsyncIterator[Message]:
        try:
            async for message in self._handle.options(stream=True).messages.remote(self._ingress):
                yield message
        except ActorDiedError as error:
            raise ReplicaDead("its process has ended") from error

    async def submit(self, submission: Submission) -> int:
        answer: int | ValueError | Overloaded = await self._handle.submit.remote(self._ingress, submission)
        if isinstance(answer, int):
            return answer
        raise answer

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._handle.abort.remote(request_ids)

    async def close(self) -> None:
        await self._handle.close.remote(self._ingress)

    async def progress(self, request_id: str) -> int | None:
        num_steps: int | None = await self._handle.progress.remote(request_id)
        return num_steps

    async def peer_dead(self, peer: bytes) -> None:
        await self._handle.peer_dead.remote(peer)

    async def timelines(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._handle.timelines.remote(request_id, tenant)
        return found

    async def live_requests(self, tenant: str | None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._handle.live_requests.remote(tenant)
        return found

    async def metrics_text(self) -> str:
        text: str = await self._handle.metrics_text.remote()
        return text


class Ingress:
    """HTTP in, tokens out: one dispatcher over all pools, and the OpenAI API in front of it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ClusterConfig, engines: dict[str, DeploymentHandle]
    ) -> None:
        path = resolve_model(config.model.path)
        self.dispatcher = Dispatcher(config.model.name, config.router, self._all_ingress_metrics)
        self._name = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._server: uvicorn.Server | None = None
        context = serve.get_replica_context()
        self._every_ingress = serve.get_deployment_handle(context.deployment, context.app_name)
        self._every_ingress._init()
        text = await asyncio.to_thread(Text.load, path)
        tiers = Tiers(config.engine.slo_classes, config.engine.default_slo_class)
        self._api = build_api(self.dispatcher, text, config.http, tiers)
        if config.http.direct:
            self._server = await _listen(self._api, config.http.host, config.http.port)
        self._members: dict[str, set[str]] = {}  # by deployment
        for deployment, handle in engines.items():
            membership.subscribe(deployment, partial(self._on_members, deployment, handle))
            handle._init()  # a handle hears of its replicas only from its first use on; this is that, without a call

    def __serve_build_asgi_app__(self) -> Any:
        return self._api

    async def __del__(self) -> None:  # Serve awaits it when the replica stops
        if self._server is not None:
            self._server.should_exit = True
        await self.dispatcher.close()

    async def ingress_metrics(self) -> tuple[str, str]:
        """This ingress's name and what its clients experienced: its part of a scrape that another one answers."""
        return self._name, self.dispatcher.metrics.text()

    async def _all_ingress_metrics(self) -> dict[str, str]:
        texts = await self._every_ingress.broadcast("ingress_metrics").results_async()
        return dict([await self.ingress_metrics(), *texts])

    def _on_members(self, deployment: str, handle: DeploymentHandle, members: membership.Members) -> None:
        self._loop.call_soon_threadsafe(self._update, deployment, handle, members)

    def _update(self, deployment: str, handle: DeploymentHandle, members: membership.Members) -> None:
        for replica_id, advertised in members.items():
            self.dispatcher.join(
                replica_id, ReplicaClient(handle, replica_id, self._name), SchedulingProfile(**advertised)
            )
        for replica_id in self._members.get(deployment, set()) - set(members):
            self.dispatcher.leave(replica_id)
        self._members[deployment] = set(members)


async def _listen(api: Any, host: str, port: int) -> uvicorn.Server:
    """Serves `api` on a port that several ingresses of this node may share. A token then costs a quarter of the CPU
    that it costs through Serve's proxy; on few cores that CPU is the engine's."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    server = uvicorn.Server(uvicorn.Config(api, log_config=None, access_log=False, lifespan="off"))
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.01)
    return server


def build(args: ClusterConfig) -> serve.Application:
    """The application of a configuration (Serve validates a mapping against `ClusterConfig`)."""
    engines = {pool.name: engine_deployment(args, pool) for pool in args.pools}
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=args.http.replicas,
        max_ongoing_requests=_NEVER_QUEUE,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=args.http.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
    )
    return ingress.bind(args, engines)


def engine_deployment(config: ClusterConfig, pool: PoolConfig) -> serve.Application:
    """The replicas of one pool."""
    num_replicas = sum(each.replicas for each in config.pools)
    num_threads = pool.num_cpus or max((os.cpu_count() or 1) // num_replicas, 1)
    ships = any(each.role == "prefill" for each in config.pools)
    deployment = serve.deployment(
        Replica,
        name=pool.name,
        num_replicas=pool.replicas,
        max_ongoing_requests=_NEVER_QUEUE,
        ray_actor_options={
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            # The engine shares its cores with the ingress: spinning OpenMP threads would starve both
            # (a 50 ms step became 1.2 s; PASSIVE has to be there before torch is imported).
            "runtime_env": {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(num_threads)}},
        },
        request_router_config=RequestRouterConfig(request_router_class=PinningRouter),
        graceful_shutdown_timeout_s=config.http.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
    )
    engine = pool.engine or config.engine
    model = config.model
    transfer = config.transfer if ships else None
    dtype = pool.dtype or model.dtype
    return deployment.bind(model.path, dtype, model.max_model_len, engine, num_threads, pool.role, transfer)


def start_ray(config: ClusterConfig) -> None:
    """A Ray of our own on this machine, unless the environment names a cluster to join."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would run the engine at nice 15
    for name, value in _MESSAGE.items():
        os.environ.setdefault(name, value)
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init()
        return
    cpus = max(os.cpu_count() or 1, 1 + sum(pool.num_cpus * pool.replicas for pool in config.pools))
    ray.init(
        address="local",
        num_cpus=int(cpus),
        include_dashboard=False,
        object_store_memory=80 << 20,  # tokens travel in messages, not in the object store
        log_to_driver=False,
        configure_logging=False,
    )


STARTING = ("Ray", "Serve", "replicas: model and warm-up")  # what `serve_forever` goes through, in this order


def serve_forever(config: ClusterConfig, starting: Callable[[str], None], started: Callable[[], None]) -> None:
    """Starts everything and ends everything on SIGINT or SIGTERM. Calls `starting` with each of `STARTING` as it
    begins, then `started`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end as KeyboardInterrupt, wherever we are
    try:
        starting(STARTING[0])
        start_ray(config)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has put its own there, which aborts
        if not os.environ.get("RAY_ADDRESS"):  # one node
            config = config.model_copy(update={"http": config.http.model_copy(update={"direct": True})})
        location = ProxyLocation.Disabled if config.http.direct else ProxyLocation.EveryNode
        starting(STARTING[1])
        serve.start(proxy_location=location, http_options=HTTPOptions(host=config.http.host, port=config.http.port))
        starting(STARTING[2])
        serve.run(build(config), name=APP_NAME, logging_config=LoggingConfig(enable_access_log=False))
        started()
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # an impatient second Ctrl-C must not leave processes behind
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
