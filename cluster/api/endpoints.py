"""The API's paths: the endpoint that answers each, and the guards around them."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from fastapi import FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from crossdock.cluster.api.batches.folder import BatchFolder
from crossdock.cluster.api.batches.line_answers import Creates, LineAnswers
from crossdock.cluster.api.batches.pace import Pace
from crossdock.cluster.api.batches.routes import Batches, BatchFiles
from crossdock.cluster.api.batches.worker import BatchWorker
from crossdock.cluster.api.body.generation_defaults import GenerationDefaults
from crossdock.cluster.api.body.json_body import invalid_field
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults
from crossdock.cluster.api.errors import AnthropicErrorAnswer, ApiError, ErrorAnswer, shown
from crossdock.cluster.api.http.gateways import GatewayPath, HeadRequests
from crossdock.cluster.api.http.host_names import HostNames
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.http_guard import HttpGuard
from crossdock.cluster.api.http.http_json import JsonRoute
from crossdock.cluster.api.http.keys import KeyRing
from crossdock.cluster.api.http.limits import AskPeers, Ledger, Loan
from crossdock.cluster.api.http.payers import Payers
from crossdock.cluster.api.http.tiers import Tiers
from crossdock.cluster.api.http.tracing import Tracing, otlp_exporter
from crossdock.cluster.api.media.media import Media
from crossdock.cluster.api.routes.absent_paths import advice
from crossdock.cluster.api.routes.adapters import AdapterNames
from crossdock.cluster.api.routes.chats import Chats
from crossdock.cluster.api.routes.completions import Completions
from crossdock.cluster.api.routes.conversations import Conversations
from crossdock.cluster.api.routes.embeddings import Embeddings
from crossdock.cluster.api.routes.generation import Generations
from crossdock.cluster.api.routes.messages import Messages
from crossdock.cluster.api.routes.models import Models
from crossdock.cluster.api.routes.response_store import ResponseStore
from crossdock.cluster.api.routes.responses import AskStores, Responses
from crossdock.cluster.api.routes.rollouts import RolloutControl
from crossdock.cluster.api.routes.scores import Scores
from crossdock.cluster.api.routes.status import Decisions, ServerStatus
from crossdock.cluster.api.routes.tokenization import Tokenization
from crossdock.cluster.api.routes.web_assets import ASSET_HEADERS, WebAsset, web_assets
from crossdock.cluster.api.text.logprobs import LogprobWriter
from crossdock.cluster.api.text.message_format import MessageFormat
from crossdock.cluster.api.text.prompts import PromptEncoder
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher, TokenSource
from crossdock.cluster.dispatch.rollouts import Rollouts
from crossdock.workers.schedule.shares import Shares

_GENERATES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"),
    *("/v1/score", "/v1/rerank"),
)
logger = logging.getLogger("ray.serve")

_OPEN = ("/health", "/ready", "/metrics", "/version", "/openapi.json")  # need no key: they show no client's requests
_ANTHROPIC_ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": AnthropicErrorAnswer, "description": "Refused"}
}
_RERANK = ("/v1/rerank", "/rerank", "/v2/rerank")  # the paths of Jina and Cohere that vLLM has
_CONTROLS = ("/pause", "/resume")
_WITHOUT_JSON = ("/cancel", "/v1/files", *_CONTROLS)  # ends of paths whose POST has no body, or a form
_Endpoint: TypeAlias = tuple[str, str, Callable[..., Any], str]  # method, path, what answers, summary
_KEY = Security(HTTPBearer(auto_error=False, scheme_name="key"))  # for the description; `HttpGuard` checks the key


def build_api(
    dispatcher: Dispatcher,
    tokenizer: ModelTokenizer,
    http: HttpConfig,
    tiers: Tiers | None = None,
    *,
    defaults: GenerationDefaults | None = None,
    embeddings: EmbeddingDefaults | None = None,
    decisions: Decisions | None = None,
    ask_peers: AskPeers | None = None,
    ask_stores: AskStores | None = None,
    media: Media | None = None,
    adapters: AdapterNames | None = None,
    rollouts: Rollouts | None = None,
) -> FastAPI:
    """Return the ASGI application. Its `state` answers other ingresses: `lend` their `ask_peers`, `stored` their
    `ask_stores`.

    `tokenizer` must be that of the model that the dispatcher's replicas serve. `tiers`: their SLO classes; None: the
    default ones. `defaults`: of sampling; None: those of OpenAI's API. `embeddings`: how prompts become vectors; None:
    by their last token. `decisions`: the scaler's; None: there is no scaler. `media`: pictures; None: the model reads
    text only. `adapters`: that requests may name; None: there are none. `rollouts`: what trainers may ask of the whole
    application; None: their paths are not served.
    """
    tiers = tiers or Tiers()
    app = FastAPI(
        title="Crossdock",
        version=version("crossdock"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=Response,
        responses={"default": {"model": ErrorAnswer, "description": "Refused"}},
    )
    pooling, sampling = embeddings or EmbeddingDefaults(), defaults or GenerationDefaults()
    adapters = adapters or AdapterNames()
    routes = ModelRoutes(dispatcher, tokenizer, http, tiers, sampling, pooling, ask_stores, media, adapters)
    app.state.stored = routes.responses.at_this_ingress
    _add_endpoints(app, routes.endpoints())
    _add_endpoints(app, _reporting(ServerStatus(dispatcher, decisions)))
    _add_endpoints(app, [] if rollouts is None else _of_trainers(RolloutControl(rollouts)))
    for path, asset in web_assets().items():
        app.add_api_route(path, partial(_asset, asset), response_model=None, include_in_schema=False)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_exception_handler(RequestValidationError, _invalid_query)
    keys = KeyRing(http.api_keys, None if http.api_keys_file is None else Path(http.api_keys_file), tiers.names)
    ledger = Ledger(http.replicas, ask_peers=ask_peers)
    app.state.adapters = adapters
    app.state.lend = partial(_lend, keys, ledger)
    app.state.batches = None
    if http.batch_folder is not None:
        lines = Pace(dispatcher, lambda: len(dispatcher.fleet))
        answers = ModelRoutes(lines, tokenizer, http, tiers, sampling, pooling, None, media, adapters).creates()
        shares = Shares(http.request_memory_bytes)
        folder = BatchFolder(Path(http.batch_folder))
        folder.check()
        worker = BatchWorker(
            folder,
            LineAnswers(answers, keys, ledger, shares, tiers.names[-1]),
            lines,
        )
        app.state.batches = worker
        _add_endpoints(app, _batches(worker))
    _add_middleware(app, dispatcher, http, keys, ledger)
    return app


def _add_middleware(app: FastAPI, dispatcher: Dispatcher, http: HttpConfig, keys: KeyRing, ledger: Ledger) -> None:
    """Put the guards around the endpoints. The last one added is the first that a request meets."""
    if http.otlp_endpoint is not None:
        app.add_middleware(
            Tracing,
            exporter=otlp_exporter(http.otlp_endpoint),
            sample_ratio=http.trace_sample_ratio,
            timelines=dispatcher.timelines,
            paths=_GENERATES,
        )
    app.add_middleware(
        HttpGuard,
        keys=keys,
        open_paths={*_OPEN, *web_assets()},
        ledger=ledger,
        payers=Payers(http.tenant_header, http.tenant_weights),
        hosts=HostNames(http.allowed_hosts) if http.is_local and not http.needs_key else None,
        max_body_bytes=http.max_body_bytes,
        max_file_bytes=0 if http.batch_folder is None else int(http.batch_file_bytes),
        request_timeout_s=http.request_timeout_s,
        memory_bytes=http.request_memory_bytes,
    )
    if http.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=http.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("*",),
        )
    if http.root_path:
        app.add_middleware(GatewayPath, root_path=http.root_path)
    app.add_middleware(HeadRequests)


def _add_endpoints(app: FastAPI, endpoints: Iterable[_Endpoint]) -> None:
    for method, path, endpoint, summary in endpoints:
        app.router.add_api_route(
            path,
            endpoint,
            methods=[method],
            summary=summary,
            response_model=None,
            dependencies=[] if path in _OPEN else [_KEY],
            responses=_ANTHROPIC_ERRORS if path.startswith("/v1/messages") else None,
            route_class_override=JsonRoute if method == "POST" and not path.endswith(_WITHOUT_JSON) else None,
        )


@dataclass(slots=True, eq=False)
class ModelRoutes:
    """The answers of one model, whose tokens come from `source`: over HTTP, and in this process without it."""

    source: TokenSource
    tokenizer: ModelTokenizer
    http: HttpConfig
    tiers: Tiers
    defaults: GenerationDefaults
    pooling: EmbeddingDefaults
    ask_stores: AskStores | None = None
    media: Media | None = None  # None: the model reads text only
    adapters: AdapterNames = field(default_factory=AdapterNames)  # that requests may name
    models: Models = field(init=False)
    encoder: PromptEncoder = field(init=False)
    generations: Generations = field(init=False)
    completions: Completions = field(init=False)
    conversations: Conversations = field(init=False)
    chats: Chats = field(init=False)
    embeddings: Embeddings = field(init=False)
    responses: Responses = field(init=False)
    scores: Scores = field(init=False)

    def __post_init__(self) -> None:
        http, tokenizer, media = self.http, self.tokenizer, self.media
        message_format = _message_format(tokenizer, http)
        self.models = Models(self.source, http.model_aliases, message_format.families, self.adapters.by_name)
        self.encoder = PromptEncoder(
            tokenizer,
            trusts_templates=http.trust_request_chat_template,
            variables=http.default_chat_template_kwargs,
            media=media,
        )
        self.generations = Generations(
            self.source,
            tokenizer,
            self.models,
            self.tiers,
            self.defaults,
            max_logprobs=http.max_logprobs,
            logprobs_mode=http.logprobs_mode,
            placeholders=None if media is None else media.placeholders,
        )
        forces = http.force_include_usage
        self.completions = Completions(self.generations, self.encoder, tokenizer, forces_usage=forces)
        self.conversations = Conversations(self.generations, self.encoder, message_format)
        self.chats = Chats(self.conversations, self.generations, tokenizer, forces_usage=forces)
        self.embeddings = Embeddings(self.generations, self.completions, self.pooling)
        self.scores = Scores(self.generations, self.completions, self.encoder, tokenizer, self.pooling)
        writer = LogprobWriter(tokenizer, as_ids=False)
        self.responses = _responses(self.conversations, writer, http, self.ask_stores)

    def creates(self) -> Creates:
        """Return the functions that answer a request and its body, by the paths that lines of a batch may name."""
        return {
            "/v1/chat/completions": self.chats.create,
            "/v1/completions": self.completions.create,
            "/v1/embeddings": self.embeddings.create,
            "/v1/score": self.scores.score,
            "/v1/rerank": self.scores.rerank,
        }

    def endpoints(self) -> list[_Endpoint]:
        """Return the endpoints of the model, and the endpoints that clients need beside them."""
        responses, models = self.responses, self.models
        messages = Messages(self.conversations, models)
        tokenization = Tokenization(models, self.encoder, self.tokenizer)
        return [
            ("POST", "/v1/completions", self.completions.create, "Continue a prompt, or several"),
            ("POST", "/v1/chat/completions", self.chats.create, "Answer a conversation"),
            ("POST", "/v1/embeddings", self.embeddings.create, "The vectors of texts"),
            *(("POST", path, self.scores.score, "How well texts fit texts") for path in ("/v1/score", "/score")),
            *(("POST", path, self.scores.rerank, "Documents by how well they fit a query") for path in _RERANK),
            ("POST", "/v1/responses", responses.create, "Answer a conversation, in the form of OpenAI's Responses API"),
            ("GET", "/v1/responses/{name}", responses.retrieve, "A stored response"),
            ("DELETE", "/v1/responses/{name}", responses.delete, "Forget a stored response"),
            ("POST", "/v1/responses/{name}/cancel", responses.cancel, "End a response in the background"),
            ("GET", "/v1/responses/{name}/input_items", responses.items, "The items before a stored response"),
            ("POST", "/v1/messages", messages.create, "Answer a conversation, in the form of Anthropic's API"),
            ("POST", "/v1/messages/count_tokens", messages.count_tokens, "The number of tokens of a conversation"),
            ("POST", "/tokenize", tokenization.tokenize, "The tokens of a text or of a conversation"),
            ("POST", "/detokenize", tokenization.detokenize, "The text of tokens"),
            (
                "POST",
                "/v1/load_lora_adapter",
                self.adapters.load,
                "Name a LoRA adapter, which requests may then ask for",
            ),
            ("POST", "/v1/unload_lora_adapter", self.adapters.unload, "Forget the name of a LoRA adapter"),
            ("GET", "/v1/models", models.all, "The served model, its aliases and its adapters"),
            ("GET", "/v1/models/{name:path}", models.one, "One of them"),
        ]


def _batches(worker: BatchWorker) -> list[_Endpoint]:
    """Return the endpoints of files and batches."""
    files, batches = BatchFiles(worker.folder), Batches(worker.folder, worker.wake)
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


def _of_trainers(control: RolloutControl) -> list[_Endpoint]:
    """Return the endpoints with which trainers stop generation and replace weights."""
    return [
        ("POST", "/pause", control.pause, "Stop generation; requests that come meanwhile wait"),
        ("POST", "/resume", control.resume, "Go on"),
        ("GET", "/is_paused", control.is_paused, "Whether generation is stopped"),
    ]


def _reporting(status: ServerStatus) -> list[_Endpoint]:
    """Return the endpoints that report what the server does."""
    return [
        ("GET", "/v1/requests", status.requests, "Requests in flight"),
        ("GET", "/v1/requests/{name:path}", status.timeline, "The timeline of a request, by its id"),
        ("GET", "/v1/replicas", status.replicas, "Every replica now, and its recent steps"),
        ("GET", "/v1/scaling", status.scaling, "The newest changes of pools and roles, and what decided them"),
        ("GET", "/health", status.health, "The process is alive"),
        ("GET", "/ready", status.ready, "A replica can serve"),
        ("GET", "/metrics", status.metrics, "Prometheus metrics of the whole deployment"),
        ("GET", "/version", status.version, "The version of Crossdock"),
    ]


def _message_format(tokenizer: ModelTokenizer, http: HttpConfig) -> MessageFormat:
    message_format = MessageFormat(
        tokenizer,
        tool_parser=http.tool_call_parser,
        reasoning_parser=http.reasoning_parser,
        reads_unforced_calls=http.enable_auto_tool_choice,
    )
    logger.info(
        "families of messages, found or configured: %s",
        ", ".join(f"{name} {family}" for name, family in message_format.families.items()),
    )
    return message_format


def _responses(
    conversations: Conversations, writer: LogprobWriter, http: HttpConfig, ask_stores: AskStores | None
) -> Responses:
    has_store = http.response_store_bytes > 0
    return Responses(
        conversations,
        writer,
        ResponseStore(http.response_store_bytes, http.response_ttl_s) if has_store else None,
        ask_stores if http.replicas > 1 else None,
        timeout_s=http.request_timeout_s,
    )


def _lend(keys: KeyRing, ledger: Ledger, tenant: str, requests: float, tokens: float, seconds: float = 0.0) -> Loan:
    """Lend another ingress the missing amount of a tenant's key. A key that is not in force here lends nothing."""
    key = keys.of_tenant(tenant)
    return Loan() if key is None else ledger.account(key).lend(requests, tokens, seconds)


async def _asset(asset: WebAsset, request: Request) -> Response:
    return Response(asset.content, media_type=asset.media_type, headers=ASSET_HEADERS)


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Refuse an unknown path or a wrong method, in the shape that the guard gives to errors of this path."""
    assert isinstance(error, HTTPException)
    reason = f"{error.detail}: {request.method} {shown(request.url.path)}"
    served = [route.path for route in request.app.routes if "{" not in route.path]
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
