"""The ingress: HTTP in, tokens out. No torch: its process has transformers' tokenizers alone."""

import asyncio
import logging
import os
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from crossdock.cluster.api.batches.claim import Claimant
from crossdock.cluster.api.body.generation_defaults import GenerationDefaults
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults
from crossdock.cluster.api.endpoints import build_api
from crossdock.cluster.api.heap import keep_one_heap
from crossdock.cluster.api.http.http_config import OPEN_TO_OTHERS, HttpConfig
from crossdock.cluster.api.http.limits import Loan, Unit
from crossdock.cluster.api.http.listener import Listener, listen
from crossdock.cluster.api.http.service_tiers import ServiceTiers
from crossdock.cluster.api.media.media import Media
from crossdock.cluster.api.routes.adapters import AdapterNames, Naming
from crossdock.cluster.api.routes.model_routes import ModelRoutes
from crossdock.cluster.api.routes.response_store import StoredResponse
from crossdock.cluster.api.routes.responses import Action
from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.dispatch.client import follow_members
from crossdock.cluster.dispatch.cold_start import MOST_WAIT_S, ColdStart
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.dispatchers import Dispatchers
from crossdock.cluster.dispatch.gate import PauseMode
from crossdock.cluster.dispatch.losses import Loss
from crossdock.cluster.dispatch.rollouts import Rollouts
from crossdock.cluster.serve.every_ingress import EveryIngress
from crossdock.cluster.serve.media import open_media
from crossdock.cluster.serve.rollouts import server_info
from crossdock.cluster.serve.shared_adapters import Known, SharedAdapters
from crossdock.cluster.serve.tokenizer import load_tokenizer
from crossdock.workers.model.lora.adapter_files import read_adapter
from crossdock.workers.replica.serving.interpreter import prepare_interpreter
from crossdock.workers.replica.serving.notices import leave_notice
from crossdock.workers.replica.serving.own_node import bind_serve_to_own_node
from crossdock.workers.schedule.request.submission import Adapter
from crossdock.workers.schedule.shares import Shares

logger = logging.getLogger("ray.serve")

_FIRST_REPLICAS_S = 10.0  # an ingress waits so long for replicas; while models load it answers 503 after that
_SCRAPE_S = 5.0  # a scrape waits so long for the other ingresses: Prometheus gives up after 10 s
_LAST_WORDS_S = 1.0  # a client is told in this time that its request ends with the ingress
_NOTICES = 16  # at most, of lost replicas, kept for the command
_LOAN_S = 0.5  # a request waits so long for what the other ingresses lend
_FIRST_S = 0.5  # an ingress that starts waits so long to be told of others: it may be the first
_STORES_S = 2.0  # … and so long for a response that another ingress may have stored


class Ingress:
    """HTTP in, tokens out: one dispatcher over all pools of each model, and the OpenAI API in front of it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        models: Sequence[ClusterConfig],
        engines: dict[str, DeploymentHandle],
        scaler: DeploymentHandle | None = None,
    ) -> None:
        """Start serving. Serve runs every deployment that an ingress is bound to, so `scaler` too.

        `models`: the configuration of each. Their `http` differs in settings of a model alone.
        """
        keep_one_heap()
        _keep_torch_out()
        bind_serve_to_own_node()
        http = models[0].http
        self._name = uuid.uuid4().hex
        self._drain_s = http.drain_timeout_s
        self._listener: Listener | None = None
        self._media: list[Media] = []
        context = serve.get_replica_context()
        every_ingress = serve.get_deployment_handle(context.deployment, context.app_name)
        every_ingress._init()
        self._of_all = EveryIngress(every_ingress, self).ask
        self._adapters = SharedAdapters(self._of_all, self._name)
        queue = Shares(http.max_queued_requests)
        self._dispatchers = {each.model.name: self._dispatcher(each, queue) for each in models}
        self._num_losses = 0
        for dispatcher in self._dispatchers.values():
            dispatcher.losses.on_settled = partial(self._tell_of, context.app_name)
        self.fleets = self._fleets(http)
        routes: list[ModelRoutes] = []
        for each in models:
            routes.append(await self._routes(each, routes, scaler))
        decisions = None if scaler is None else partial(_decisions, scaler)
        rollouts = self._rollouts = self._new_rollouts(models[0])  # None: trainers' paths are not enabled
        if http.direct:  # no proxy knows the route
            http = http.model_copy(update={"root_path": http.root_path + models[0].application.path})
        cluster = ray.get_runtime_context().gcs_address
        self._api = build_api(
            routes,
            self.fleets,
            http,
            decisions=decisions,
            ask_peers=self._ask_peers,
            rollouts=rollouts,
            claimant=Claimant(context.app_name, socket.gethostname(), cluster),
        )
        if http.replicas > 1 and http.lora_folder is not None:
            self._adapters.start(self._api.state.adapters)
            await self._adapters.learn(told_s=_FIRST_S)
        for each, dispatcher in zip(models, self._dispatchers.values(), strict=True):
            own = {pool.name: engines[pool.name] for pool in each.pools}
            follow_members(own, self._name, dispatcher.join, dispatcher.leave)
        self._awaited = [
            (self._dispatchers[each.model.name], {pool.role for pool in each.pools if pool.replicas}) for each in models
        ]
        with suppress(TimeoutError):  # without this wait an upgrade would route requests to an ingress without replicas
            async with asyncio.timeout(_FIRST_REPLICAS_S):
                while not await self.is_connected():
                    await asyncio.sleep(0.02)
        if self._api.state.batches is not None:
            self._api.state.batches.start()
        if self._rollouts is not None:
            await self._rollouts.start()
        prepare_interpreter()
        if http.is_open_to_others:
            logger.warning(OPEN_TO_OTHERS, http.host, http.port)
        if http.direct:
            self._listener = await listen(
                self._api,
                http.host,
                http.port,
                keep_alive_s=http.keep_alive_s,
                write_timeout_s=http.write_timeout_s,
                has_keys=http.needs_key,
            )

    def _dispatcher(self, config: ClusterConfig, queue: Shares) -> Dispatcher:
        return Dispatcher(
            config.model.name,
            config.router,
            self._all_ingress_metrics,
            most_queued=queue,
            vllm_metrics=config.http.vllm_metrics,
            metrics_hold_s=config.http.metrics_hold_s,
        )

    def _tell_of(self, application: str, loss: Loss) -> None:
        """Leave a notice for the command about a lost replica. The last few are kept."""
        self._num_losses += 1
        slot = self._num_losses % _NOTICES
        content = loss.content() | {"number": self._num_losses}
        leave_notice(application, "loss", f"{self._name}-{slot}", content)

    def _fleets(self, http: HttpConfig) -> Dispatcher | Dispatchers:
        """Return the dispatchers as operators ask them; of one model its dispatcher itself."""
        if len(self._dispatchers) > 1:
            return Dispatchers(self._dispatchers, self._all_ingress_metrics, http.metrics_hold_s)
        return next(iter(self._dispatchers.values()))

    async def _routes(
        self, config: ClusterConfig, others: Sequence[ModelRoutes], scaler: DeploymentHandle | None
    ) -> ModelRoutes:
        """Return the routes of a model. `others`: those of the models before."""
        model = config.model
        engine = config.engine
        dispatcher = self._dispatchers[config.model.name]
        cold_start = self._cold_start(config, scaler) if scaler is not None and config.starts_on_request else None
        path = model.folder(needs_weights=not config.is_emulated)
        tokenizer = await asyncio.to_thread(load_tokenizer, path, model)
        media = await asyncio.to_thread(open_media, path, tokenizer, config.http, dispatcher.metrics.registry)
        self._media += [] if media is None else [media]
        return ModelRoutes(
            dispatcher,
            tokenizer,
            config.http,
            ServiceTiers(engine.slo_classes, engine.default_slo_class),
            GenerationDefaults.read(path, model.generation_config, model.override_generation_config),
            EmbeddingDefaults.read(path, model.pooler_config),
            self._ask_stores,
            media,
            await asyncio.to_thread(self._adapters_of, config, cold_start),
            model.name,
            cold_start,
            others[0] if others else None,
        )

    def _cold_start(self, config: ClusterConfig, scaler: DeploymentHandle) -> ColdStart:
        """Return the start of a model that may have no replica."""
        name = config.model.name
        dispatcher = self._dispatchers[config.model.name]
        is_up = partial(dispatcher.has_roles, {pool.role for pool in config.pools})

        async def ask() -> float:
            async with asyncio.timeout(_SCRAPE_S):
                return float(await scaler.start.remote(name))

        return ColdStart(name, is_up, ask, dispatcher.spawn)

    def _adapters_of(self, config: ClusterConfig, cold_start: ColdStart | None) -> AdapterNames:
        """Return the names of the configured adapters. ValueError: one of them cannot be served."""
        engine = config.engine
        folder = config.http.lora_folder
        dispatcher = self._dispatchers[config.model.name]

        async def check(path: str) -> None:
            if cold_start is not None:
                await cold_start.wait(MOST_WAIT_S)
            await dispatcher.check_adapter(path)

        def read(name: str, path: Path) -> Adapter:
            return read_adapter(path, engine.max_lora_rank).adapter(name)

        below = None if folder is None else Path(folder)
        notify = partial(self._adapters.tell, config.model.name)
        names = (config.model.name, *config.http.model_aliases)
        learn = self._adapters.learn if config.http.replicas > 1 else None
        reads = read if config.enables_lora else None
        found = AdapterNames(reads, below, notify, names, check, learn, self._name)
        for name, path in config.model.lora_modules.items():
            found.put(name, read(name, Path(path).expanduser().absolute()))
        return found

    def _new_rollouts(self, config: ClusterConfig) -> Rollouts | None:
        """Return the operators' calls; None where their paths are not enabled, as always where models are several."""
        if not config.http.rollouts:
            return None
        dispatcher = self._dispatcher_of_one
        ask = self._of_all if config.http.replicas > 1 else None
        return Rollouts(dispatcher, ask, partial(server_info, config, dispatcher.fleet))

    @property
    def _dispatcher_of_one(self) -> Dispatcher:
        (dispatcher,) = self._dispatchers.values()
        return dispatcher

    async def hold(self, mode: PauseMode) -> None:
        """Let no request begin here, as an operator asked of one of the ingresses; see `Dispatcher.hold`."""
        await self._dispatcher_of_one.hold(mode)

    async def release(self, number: int) -> None:
        """Go on after `hold`, with the weights of update `number` or later ones."""
        await self._dispatcher_of_one.release(number)

    async def push_weights(self, tensors: list[Any], name: str, mode: PauseMode) -> str:
        """Have all replicas compute with tensors of Ray's object store, see `rollouts.push_weights`."""
        if self._rollouts is None:
            raise ValueError("http.rollouts must be true (--enable-rollouts) for weights to be replaced")
        return (await self._rollouts.update("", name, mode, tensors)).name

    async def put_adapter(self, asker: str, model: str, name: str, naming: Naming) -> None:
        """Let a name mean an adapter of a model, as at another ingress, `asker`."""
        self._adapters.hear(asker, model, name, naming)

    async def adapters(self) -> Known:
        """Return the meaning of each adapter's name here, for other ingresses."""
        return self._adapters.known()

    def __serve_build_asgi_app__(self) -> Any:
        return _DrainedFirst(self._api, lambda: self.drain(self._drain_s))

    async def __del__(self) -> None:  # Serve awaits it when the replica stops, after the end of the API's lifespan
        if self._rollouts is not None:
            self._rollouts.stop()
        await self._adapters.close()
        await self.fleets.close()
        await self.drain(_LAST_WORDS_S)
        for media in self._media:
            media.close()

    async def drain(self, seconds: float) -> bool:
        """Take no further request, and wait until those that run are answered, but at most `seconds`, then and when
        this ingress ends.

        Serve does this for requests that come through its proxies; it does not know of others. Returns whether all
        were answered.
        """
        self._drain_s = seconds
        if self._api.state.batches is not None:
            await self._api.state.batches.close()
        return self._listener is None or await self._listener.close(seconds)

    async def end(self) -> None:
        """End the requests that run, with an error. Only the end of this ingress may follow."""
        await self.fleets.close()

    def check_health(self) -> None:
        """Raise the error that has ended a task which this ingress cannot do without: Serve then replaces it."""
        for dispatcher in self._dispatchers.values():
            dispatcher.check()
        self._adapters.check()
        if self._rollouts is not None:
            self._rollouts.check()
        if self._listener is not None:
            self._listener.check()
        if self._api.state.batches is not None:
            self._api.state.batches.check()

    async def ingress_metrics(self) -> tuple[str, str]:
        """Return this ingress's name and metrics: its part of a scrape that another ingress answers."""
        return self._name, self.fleets.ingress_text()

    async def is_connected(self) -> bool:
        """Return whether this ingress has a replica of each role that the configuration starts with."""
        return all(dispatcher.has_roles(roles) for dispatcher, roles in self._awaited)

    async def replicas(self) -> list[dict[str, Any]]:
        """Return the state of every replica that is up: what /v1/replicas answers to an operator."""
        return await self.fleets.replicas({}, None)

    async def lend(self, asker: str, owner: str, unit: Unit, amount: float) -> Loan | None:
        """Lend another ingress, `asker`, its missing amount for an owner's key; None: `asker` is this ingress."""
        return None if asker == self._name else self._api.state.lend(owner, unit, amount)

    async def _ask_peers(self, owner: str, unit: Unit, amount: float) -> list[Loan]:
        """Ask all other ingresses for the missing amount of an owner's key."""
        return [loan for loan in await self._of_all("lend", _LOAN_S, self._name, owner, unit, amount) if loan]

    async def stored(self, asker: str, action: Action, owner: str, name: str, after: int) -> StoredResponse | None:
        """Answer another ingress, `asker`, whose client asks for a stored response; None: it is not stored here."""
        if asker == self._name:
            return None
        found: StoredResponse | None = await self._api.state.stored(action, owner, name, after)
        return found

    async def _ask_stores(self, action: Action, owner: str, name: str, after: int) -> list[StoredResponse]:
        """Ask all other ingresses for a response that this one has not stored."""
        asked = self._name, action, owner, name, after
        return [found for found in await self._of_all("stored", _STORES_S, *asked) if found]

    async def _all_ingress_metrics(self) -> dict[str, str]:
        """Return the metrics of all ingresses, by name, without those that fail or do not answer in time."""
        return dict([await self.ingress_metrics(), *await self._of_all("ingress_metrics", _SCRAPE_S)])


class _DrainedFirst:
    """The API as Serve holds it: its lifespan, and so tracing, ends when the ingress is drained."""

    def __init__(self, api: Any, drain: Callable[[], Awaitable[bool]]) -> None:
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


ServedIngress = serve.ingress()(Ingress)
"""The class that Serve runs: the application builds its ASGI app in the replica."""


def _keep_torch_out() -> None:
    """Make an import of torch fail in this process, unless there has been one.

    transformers then offers tokenizers alone, in a quarter of the memory and of the seconds.
    """
    if "torch" not in sys.modules:
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would advise to install torch
        sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to block an import
