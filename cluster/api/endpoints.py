"""The API's paths: the endpoint that answers each, and the guards around them."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.security import HTTPBearer
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from crossdock.cluster.api.batches.claim import Claimant, claim
from crossdock.cluster.api.batches.folder import BatchFolder
from crossdock.cluster.api.batches.lines import LineAnswers
from crossdock.cluster.api.batches.pace import Pace
from crossdock.cluster.api.batches.routes import Batches, BatchFiles
from crossdock.cluster.api.batches.space import Uploads
from crossdock.cluster.api.batches.worker import BatchWorker
from crossdock.cluster.api.body.json_body import invalid_field
from crossdock.cluster.api.errors import AnthropicErrorAnswer, ApiError, ErrorAnswer, shown
from crossdock.cluster.api.http.gateways import GatewayPath, HeadRequests
from crossdock.cluster.api.http.host_names import HostNames
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.http_guard import HttpGuard
from crossdock.cluster.api.http.http_json import JsonRoute, JsonRoutes, long_json_answer
from crossdock.cluster.api.http.keys import KeyRing
from crossdock.cluster.api.http.limits import AskPeers, Ledger, Loan, Unit
from crossdock.cluster.api.http.sites import Sites
from crossdock.cluster.api.http.tenant_reader import TenantReader
from crossdock.cluster.api.http.tracing import Tracing, otlp_exporter
from crossdock.cluster.api.routes.absent_paths import ABSENT, advice
from crossdock.cluster.api.routes.model_routes import Endpoint, ModelChoice, ModelRoutes
from crossdock.cluster.api.routes.rollouts import RolloutControl
from crossdock.cluster.api.routes.simulator import Simulator
from crossdock.cluster.api.routes.status import ScalingDecisions, ServerStatus
from crossdock.cluster.api.routes.web_assets import ASSET_HEADERS, WebAsset, web_assets
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.dispatchers import Dispatchers
from crossdock.cluster.dispatch.rollouts import Rollouts
from crossdock.workers.schedule.shares import Shares

_GENERATES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"),
    *("/classify", "/v1/score", "/v1/rerank", "/v1/decisions"),
)
_UPLOADS = 8  # files of the largest size that may be on their way to an ingress
logger = logging.getLogger("ray.serve")

_OPEN = ("/health", "/ready", "/metrics", "/version", "/openapi.json")  # need no key: they show no client's requests
_ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": AnthropicErrorAnswer, "description": "Refused"}
}
_KEY = Security(HTTPBearer(auto_error=False, scheme_name="key"))  # for the description; `HttpGuard` checks the key


def build_api(
    models: Sequence[ModelRoutes],
    fleets: Dispatcher | Dispatchers,
    http: HttpConfig,
    *,
    decisions: ScalingDecisions | None = None,
    ask_peers: AskPeers | None = None,
    rollouts: Rollouts | None = None,
    claimant: Claimant | None = None,
) -> FastAPI:
    """Return the ASGI application of all models. Its `state` answers other ingresses: `lend` their `ask_peers`,
    `stored` their `ask_stores`. `decisions`: the scaler's; None: there is no scaler. `rollouts`: what
    trainers may ask of the whole application; None: their paths are not served. `claimant`: claims the folder of
    batches; None: no other application is started with it.
    """
    app = GuardedApi(
        title="Crossdock",
        version=version("crossdock"),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=Response,
        responses={"default": {"model": ErrorAnswer, "description": "Refused"}},
    )
    tiers = models[0].tiers  # the service tiers of all models have the same names
    app.state.stored = models[0].responses.at_this_ingress
    _add_endpoints(app, ModelChoice(models).endpoints())
    _add_endpoints(app, _reporting(ServerStatus(fleets, decisions), Simulator(fleets)))
    if rollouts is not None:
        checkpoints = None if http.weights_folder is None else Path(http.weights_folder)
        _add_endpoints(app, _of_trainers(RolloutControl(rollouts, checkpoints)))
    app.add_api_route("/openapi.json", partial(_description, app), response_model=None, include_in_schema=False)
    for path, asset in web_assets().items():
        app.add_api_route(path, partial(_asset, asset), response_model=None, include_in_schema=False)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_exception_handler(RequestValidationError, _invalid_query)
    keys = KeyRing(http.api_keys, None if http.api_keys_file is None else Path(http.api_keys_file), tiers.names)
    ledger = Ledger(http.replicas, ask_peers=ask_peers)
    app.state.adapters = {routes.name: routes.adapters for routes in models}
    app.state.lend = partial(_lend, keys, ledger)
    app.state.batches = None
    memory = Shares(http.request_memory_bytes)  # of bodies and of lines of batches
    if http.batch_folder is not None:
        pace = Pace(models[0].source, lambda: fleets.num_replicas)
        lines = [replace(routes, source=pace.of(routes.source), ask_stores=None) for routes in models]
        answers = ModelChoice(lines).creates()
        part = Shares(http.request_memory_bytes // 2, within=memory)
        folder = BatchFolder(Path(http.batch_folder), int(http.batch_bytes))
        folder.check()
        app.state.claim = None if claimant is None else claim(folder.root, claimant)  # as long as this process lives
        tenant_reader = TenantReader(http.tenant_header, http.tenant_weights)
        answer = LineAnswers(answers, keys, ledger, tenant_reader, part, tiers.names[-1])
        worker = BatchWorker(folder, answer, pace, part, http.max_body_bytes)
        app.state.batches = worker
        _add_endpoints(app, _batches(worker, Uploads(_UPLOADS * int(http.batch_file_bytes))))
    app.guards = _guards(fleets, http, keys, ledger, memory)
    return app


class GuardedApi(FastAPI):
    """The API inside its guards. A request meets the last one first; errors are left to `HttpGuard`."""

    guards: Sequence[Callable[[ASGIApp], ASGIApp]] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Starlette.__call__(self, scope, receive, send)  # FastAPI's looks for telemetry in each request

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = ExceptionMiddleware(AsyncExitStackMiddleware(self.router), self.exception_handlers)
        app = JsonRoutes(app, self.routes)
        for guard in self.guards:
            app = guard(app)
        return app


def _guards(
    fleets: Dispatcher | Dispatchers, http: HttpConfig, keys: KeyRing, ledger: Ledger, memory: Shares
) -> list[Callable[[ASGIApp], ASGIApp]]:
    """Return the guards around the endpoints. The last one is the first that a request meets."""
    guards: list[Callable[[ASGIApp], ASGIApp]] = []
    if http.otlp_endpoint is not None:
        guards.append(
            partial(
                Tracing,
                exporter=otlp_exporter(http.otlp_endpoint),
                sample_ratio=http.trace_sample_ratio,
                timelines=fleets.timelines,
                paths=_GENERATES,
            )
        )
    guards.append(
        partial(
            HttpGuard,
            keys=keys,
            open_paths={*_OPEN, *web_assets()},
            ledger=ledger,
            tenant_reader=TenantReader(http.tenant_header, http.tenant_weights),
            hosts=HostNames(http.allowed_hosts) if http.is_local and not http.needs_key else None,
            sites=Sites(http.allowed_origins, http.allowed_hosts),
            max_body_bytes=http.max_body_bytes,
            max_file_bytes=0 if http.batch_folder is None else int(http.batch_file_bytes),
            request_timeout_s=http.request_timeout_s,
            memory=memory,
        )
    )
    if http.allowed_origins:
        guards.append(
            partial(
                CORSMiddleware,
                allow_origins=http.allowed_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=("*",),
            )
        )
    if http.root_path:
        guards.append(partial(GatewayPath, root_path=http.root_path))
    return [*guards, HeadRequests]


def _add_endpoints(app: FastAPI, endpoints: Iterable[Endpoint]) -> None:
    for method, path, endpoint, summary in endpoints:
        app.router.add_api_route(
            path,
            endpoint,
            methods=[method],
            summary=summary,
            response_model=None,
            dependencies=[] if path in _OPEN else [_KEY],
            responses=_ANTHROPIC_ERRORS if path.startswith("/v1/messages") else None,
            route_class_override=JsonRoute if "body" in signature(endpoint).parameters else None,
        )


def _batches(worker: BatchWorker, uploads: Uploads) -> list[Endpoint]:
    """Return the endpoints of files and batches."""
    files = BatchFiles(worker.folder, uploads)
    batches = Batches(worker.folder, worker.wake)
    return [
        ("POST", "/v1/files", files.create, "Store a file of requests"),
        ("GET", "/v1/files", files.all, "The files, the newest first"),
        ("GET", "/v1/files/{name}", files.one, "One of them"),
        ("GET", "/v1/files/{name}/content", files.content, "The content of a file"),
        ("DELETE", "/v1/files/{name}", files.delete, "Delete a file"),
        ("POST", "/v1/batches", batches.create, "Run the requests of a file beside those of others"),
        ("GET", "/v1/batches", batches.all, "The batches, the newest first"),
        ("GET", "/v1/batches/{name}", batches.one, "One of them, and how far it is"),
        ("POST", "/v1/batches/{name}/cancel", batches.cancel, "End a batch"),
    ]


def _of_trainers(control: RolloutControl) -> list[Endpoint]:
    """Return the endpoints with which trainers stop generation and replace weights."""
    return [
        ("POST", "/pause", control.pause, "Stop generation; requests that come meanwhile wait"),
        ("POST", "/resume", control.resume, "Go on"),
        ("GET", "/is_paused", control.is_paused, "Whether generation is stopped"),
        ("POST", "/sleep", control.sleep, "Give up the memory of pages, or of pages and weights"),
        ("POST", "/wake_up", control.wake_up, "Take the memory again, and go on"),
        ("GET", "/is_sleeping", control.is_sleeping, "Whether memory is given up"),
        ("POST", "/reset_prefix_cache", control.reset_cache, "Forget all cached prefixes"),
        ("POST", "/flush_cache", control.reset_cache, "The same, by SGLang's name"),
        ("GET", "/get_world_size", control.world_size, "The number of ranks of all replicas"),
        ("GET", "/server_info", control.server_info, "What trainers read of the configuration"),
        ("POST", "/init_weight_transfer_engine", control.init_transfer, "Join a trainer's process group"),
        ("POST", "/start_weight_update", control.start_update, "Begin an update of weights"),
        ("POST", "/update_weights", control.receive, "Receive tensors from the trainer's group"),
        ("POST", "/finish_weight_update", control.finish_update, "Compute with the tensors that were received"),
        ("POST", "/update_weights_from_disk", control.update_from_disk, "Compute with the weights of a checkpoint"),
        ("GET", "/weight_info", control.weight_info, "The version of the weights"),
        ("POST", "/weight_checker", control.check, "The checksums of the weights"),
    ]


def _reporting(status: ServerStatus, simulator: Simulator) -> list[Endpoint]:
    """Return the endpoints that report what the server does."""
    return [
        ("GET", "/v1/requests", status.requests, "Requests in flight"),
        ("GET", "/v1/requests/{name:path}", status.timeline, "The timeline of a request, by its id"),
        ("GET", "/v1/replicas", status.replicas, "Every replica now, and its recent steps"),
        ("GET", "/v1/scaling", status.scaling, "The newest changes of pools and roles, and what decided them"),
        ("GET", "/v1/simulator", simulator.run, "The steps of the real scheduler in a scenario, simulated"),
        ("GET", "/health", status.health, "The process is alive"),
        ("GET", "/ready", status.ready, "A replica can serve"),
        ("GET", "/metrics", status.metrics, "Prometheus metrics of the whole deployment"),
        ("GET", "/version", status.version, "The version of Crossdock"),
    ]


def _lend(keys: KeyRing, ledger: Ledger, owner: str, unit: Unit, amount: float) -> Loan:
    """Lend another ingress the missing amount of an owner's key. A key that is not in force here lends nothing."""
    key = keys.of_owner(owner)
    return Loan() if key is None else ledger.account(key).lend(unit, amount)


async def _asset(asset: WebAsset, request: Request) -> Response:
    return Response(asset.content, media_type=asset.media_type, headers=ASSET_HEADERS)


async def _description(app: FastAPI, request: Request) -> Response:
    """Return the API as OpenAPI. A thread makes it, once: that takes longer than a step of a model."""
    document = await asyncio.to_thread(app.openapi)
    path = request.scope.get("root_path", "").rstrip("/")
    return await long_json_answer({**document, "servers": [{"url": path}]} if path else document)


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Refuse an unknown path or a wrong method, in the shape that the guard gives to errors of this path."""
    assert isinstance(error, HTTPException)
    served = [route.path for route in request.app.routes if "{" not in route.path]
    if error.status_code == 405 and request.url.path in ABSENT and request.url.path not in served:
        # A route for any name has matched the path. A client that probes for the path expects 404.
        error = HTTPException(404)
    reason = f"{error.detail}: {request.method} {shown(request.url.path)}"
    if error.status_code == 404 and (sentence := advice(request.url.path, served)) is not None:
        reason += f". {sentence}"
    if error.status_code == 405 and error.headers is not None and "Allow" in error.headers:
        reason += f". Use {error.headers['Allow']}."
    raise ApiError(reason, status=error.status_code, headers=error.headers)


async def _invalid_query(request: Request, error: Exception) -> Response:
    """Refuse a query whose fields FastAPI refuses."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    raise invalid_field(first["loc"][1:], first["type"], first["msg"])  # the first step is "query"
