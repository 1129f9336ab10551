"""The Ray Serve application: an ingress with the OpenAI API, and one engine deployment per pool.

`crossdock.cluster.serve.app:build` is the import path for `serve run`, `serve deploy` and RayService manifests.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from crossdock.cluster.api.endpoints import build_api
from crossdock.cluster.api.generation_defaults import GenerationDefaults
from crossdock.cluster.api.http_config import OPEN_TO_OTHERS
from crossdock.cluster.api.limits import Loan
from crossdock.cluster.api.listener import Listener, listen
from crossdock.cluster.api.tiers import Tiers
from crossdock.cluster.config import ClusterConfig, PoolConfig
from crossdock.cluster.dispatch.client import follow_members
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.pinning import PinningRouter
from crossdock.cluster.serve.scaler import Scaler
from crossdock.cluster.serve.tokenizer import load_tokenizer
from crossdock.workers.model.checkpoint import resolve_model
from crossdock.workers.replica.interpreter import prepare_interpreter
from crossdock.workers.replica.replica import Replica, bind_serve_to_own_node

logger = logging.getLogger("ray.serve")

APP_NAME = "crossdock"
_FIRST_REPLICA_S = 10.0  # an ingress waits so long for a replica; while models load it answers 503 after that
_SCRAPE_S = 5.0  # a scrape waits so long for the other ingresses: Prometheus gives up after 10 s
_LAST_WORDS_S = 1.0  # a client is told in this time that its request ends with the ingress
_ENDING_S = 5.0  # after the drain of an ingress, until Serve ends its process
_LOAN_S = 0.5  # a request waits so long for what the other ingresses lend
_NEVER_QUEUE = 1_000_000  # requests; the engine decides about admission, and Serve's own limit must not interfere
_TINY_BUNDLE = 0.001  # CPUs; Ray accepts no bundle without resources


class Ingress:
    """HTTP in, tokens out: one dispatcher over all pools, and the OpenAI API in front of it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ClusterConfig, engines: dict[str, DeploymentHandle], scaler: DeploymentHandle | None = None
    ) -> None:
        """Start serving. Serve runs every deployment that an ingress is bound to, so `scaler` too."""
        bind_serve_to_own_node()
        path = resolve_model(config.model.path)
        self.dispatcher = Dispatcher(
            config.model.name,
            config.router,
            self._all_ingress_metrics,
            most_queued=config.http.max_queued_requests,
            vllm_metrics=config.http.vllm_metrics,
        )
        self._name = uuid.uuid4().hex
        self._drain_s = config.http.drain_timeout_s
        self._listener: Listener | None = None
        context = serve.get_replica_context()
        self._every_ingress = serve.get_deployment_handle(context.deployment, context.app_name)
        self._every_ingress._init()
        tokenizer = await asyncio.to_thread(load_tokenizer, path, config.model)
        tiers = Tiers(config.engine.slo_classes, config.engine.default_slo_class)
        model = config.model
        defaults = GenerationDefaults.read(path, model.generation_config, model.override_generation_config)
        decisions = None if scaler is None else partial(_decisions, scaler)
        self._api = build_api(
            self.dispatcher,
            tokenizer,
            config.http,
            tiers,
            defaults=defaults,
            decisions=decisions,
            ask_peers=self._ask_peers,
        )
        follow_members(engines, self._name, self.dispatcher.join, self.dispatcher.leave)
        with suppress(TimeoutError):  # without this wait an upgrade would route requests to an ingress without replicas
            async with asyncio.timeout(_FIRST_REPLICA_S):
                while not self.dispatcher.ready():
                    await asyncio.sleep(0.02)
        prepare_interpreter()
        if config.http.is_open_to_others:
            logger.warning(OPEN_TO_OTHERS, config.http.host, config.http.port)
        if config.http.direct:
            http = config.http
            self._listener = await listen(
                self._api,
                http.host,
                http.port,
                keep_alive_s=http.keep_alive_s,
                write_timeout_s=http.write_timeout_s,
            )

    def __serve_build_asgi_app__(self) -> Any:
        return _DrainedFirst(self._api, self._drain)

    async def __del__(self) -> None:  # Serve awaits it when the replica stops, after the end of the API's lifespan
        await self.dispatcher.close()
        await self.drain(_LAST_WORDS_S)

    async def _drain(self) -> None:
        await self.drain(self._drain_s)

    async def drain(self, seconds: float) -> bool:
        """Take no further request, and wait until those that run are answered, but at most `seconds`, then and when
        this ingress ends.

        Serve does this for requests that come through its proxies; it does not know of others. Returns whether all
        were answered.
        """
        self._drain_s = seconds
        return self._listener is None or await self._listener.close(seconds)

    async def ingress_metrics(self) -> tuple[str, str]:
        """Return this ingress's name and metrics: its part of a scrape that another ingress answers."""
        return self._name, self.dispatcher.metrics.text()

    async def replicas(self) -> list[dict[str, Any]]:
        """Return the state of every replica that is up: what /v1/replicas answers to an operator."""
        return await self.dispatcher.replicas({}, None)

    async def lend(self, asker: str, tenant: str, requests: float, tokens: float) -> Loan | None:
        """Give another ingress, `asker`, what it lacks for a tenant's key; None: that is this one."""
        return None if asker == self._name else self._api.state.lend(tenant, requests, tokens)

    async def _ask_peers(self, tenant: str, requests: float, tokens: float) -> list[Loan]:
        """Ask all other ingresses for what this one lacks for a tenant's key."""
        return [loan for loan in await self._of_all("lend", _LOAN_S, self._name, tenant, requests, tokens) if loan]

    async def _all_ingress_metrics(self) -> dict[str, str]:
        """Return the metrics of all ingresses, by name, without those that fail or do not answer in time."""
        return dict([await self.ingress_metrics(), *await self._of_all("ingress_metrics", _SCRAPE_S)])

    async def _of_all(self, method: str, seconds: float, *arguments: Any) -> list[Any]:
        """Return the answers of all ingresses, this one too, without those that fail or do not answer in time."""
        try:
            async with asyncio.timeout(seconds):
                asked = await self._every_ingress.broadcast(method, *arguments)._fetch_replica_results_async()
        except TimeoutError:
            return []
        # `results_async` has one time limit for all: an ingress that hangs would cost the answers of the others.
        answering = (asyncio.wait_for(answer.get_async(), seconds) for answer in asked)
        answers = await asyncio.gather(*answering, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]


class _DrainedFirst:
    """The API as Serve holds it: its lifespan, and so tracing, ends when the ingress is drained."""

    def __init__(self, api: Any, drain: Callable[[], Awaitable[None]]) -> None:
        self._api = api
        self._drain = drain

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def receive_when_drained() -> Any:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self._drain()
            return message

        await self._api(scope, receive_when_drained if scope["type"] == "lifespan" else receive, send)


async def _decisions(scaler: DeploymentHandle) -> list[dict[str, Any]]:
    """Return the scaler's newest decisions. Raises TimeoutError where it does not answer."""
    async with asyncio.timeout(_SCRAPE_S):
        found: list[dict[str, Any]] = await scaler.decisions.remote()
    return found


def build(args: ClusterConfig) -> serve.Application:
    """Return the application of a configuration. Serve validates a mapping against `ClusterConfig`."""
    engines = {pool.name: engine_deployment(args, pool) for pool in args.pools}
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=args.http.replicas,
        max_ongoing_requests=_NEVER_QUEUE,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=args.http.drain_timeout_s + _ENDING_S,
        graceful_shutdown_wait_loop_s=0.1,
    )
    if not args.is_elastic:
        return ingress.bind(args, engines)
    scaler = serve.deployment(Scaler, num_replicas=1, ray_actor_options={"num_cpus": 0}, name="scaler")
    return ingress.bind(args, engines, scaler.bind(args, engines))


def engine_deployment(config: ClusterConfig, pool: PoolConfig) -> serve.Application:
    """Return the deployment of one pool's replicas."""
    spec = config.replica_spec(pool)
    deployment = serve.deployment(
        Replica,
        name=pool.name,
        num_replicas=pool.replicas,
        max_ongoing_requests=_NEVER_QUEUE,
        ray_actor_options={
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            **({"label_selector": pool.node_labels} if pool.node_labels and pool.num_ranks == 1 else {}),
            # The engine shares its cores with the ingress: spinning OpenMP threads would starve both
            # (a 50 ms step became 1.2 s; PASSIVE has to be there before torch is imported).
            "runtime_env": {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(spec.num_threads)}},
        },
        request_router_config=RequestRouterConfig(request_router_class=PinningRouter),
        graceful_shutdown_timeout_s=config.http.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
        **(_placement_group(pool) if pool.num_ranks > 1 else {}),
    )
    return deployment.bind(spec)


def _placement_group(pool: PoolConfig) -> dict[str, Any]:
    """Return a bundle for each rank of a replica. The first is the Serve replica's own."""
    bundle = {"CPU": pool.num_cpus or _TINY_BUNDLE, **({"GPU": pool.num_gpus} if pool.num_gpus else {})}
    group: dict[str, Any] = {
        "placement_group_bundles": [bundle] * pool.num_ranks,
        "placement_group_strategy": pool.placement,
    }
    if pool.node_labels:  # of the nodes of all ranks, not of the driver's alone
        group["placement_group_bundle_label_selector"] = [pool.node_labels] * pool.num_ranks
    return group
