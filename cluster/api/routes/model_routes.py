"""One model's routes: all that answers its requests. And the choice among the models of a server."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeAlias

from fastapi import Request, Response

from crossdock.cluster.api.body.bodies import LoadAdapterRequest, UnloadAdapterRequest
from crossdock.cluster.api.body.generation_defaults import GenerationDefaults
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.http_json import Name, json_answer
from crossdock.cluster.api.http.service_tiers import SLO_CLASS_HEADER, ServiceTiers
from crossdock.cluster.api.media.media import Media
from crossdock.cluster.api.routes.adapters import AdapterNames
from crossdock.cluster.api.routes.chats import Chats
from crossdock.cluster.api.routes.completions import Completions
from crossdock.cluster.api.routes.conversations import Conversations
from crossdock.cluster.api.routes.decisions import Decisions
from crossdock.cluster.api.routes.embeddings import Classification, Embeddings
from crossdock.cluster.api.routes.generation import Generations
from crossdock.cluster.api.routes.messages import Messages
from crossdock.cluster.api.routes.models import Models, no_such_model
from crossdock.cluster.api.routes.response_store import ResponseStore
from crossdock.cluster.api.routes.responses import AskStores, Responses
from crossdock.cluster.api.routes.scores import Scores
from crossdock.cluster.api.routes.tokenization import Tokenization
from crossdock.cluster.api.text.logprobs import LogprobWriter
from crossdock.cluster.api.text.message_format import MessageFormat
from crossdock.cluster.api.text.prompts import PromptEncoder
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.cold_start import MOST_WAIT_S, ColdStart
from crossdock.cluster.dispatch.dispatcher import TokenSource

logger = logging.getLogger("ray.serve")

_RERANK = ("/v1/rerank", "/rerank", "/v2/rerank")  # the paths of Jina and Cohere that vLLM has
Creates: TypeAlias = Mapping[str, Callable[[Request, Any], Awaitable[Response]]]
"""The function that answers a request and its body, by path."""

Endpoint: TypeAlias = tuple[str, str, Callable[..., Any], str]  # method, path, what answers, summary


@dataclass(slots=True, eq=False)
class ModelRoutes:
    """The answers of one model, whose tokens come from `source`: over HTTP, and in this process without it."""

    source: TokenSource
    tokenizer: ModelTokenizer
    http: HttpConfig
    tiers: ServiceTiers
    defaults: GenerationDefaults
    pooling: EmbeddingDefaults
    ask_stores: AskStores | None = None
    media: Media | None = None  # None: the model reads text only
    adapters: AdapterNames = field(default_factory=AdapterNames)  # adapters that requests may name
    name: str = ""  # the name that clients give; empty: that of the source
    cold_start: ColdStart | None = None  # None: the model always has replicas
    beside: "ModelRoutes | None" = None  # of another model, with which this one shares stored responses
    models: Models = field(init=False)
    encoder: PromptEncoder = field(init=False)
    generations: Generations = field(init=False)
    completions: Completions = field(init=False)
    conversations: Conversations = field(init=False)
    chats: Chats = field(init=False)
    embeddings: Embeddings = field(init=False)
    responses: Responses = field(init=False)
    scores: Scores = field(init=False)
    classification: Classification = field(init=False)
    decisions: Decisions = field(init=False)

    def __post_init__(self) -> None:
        http = self.http
        tokenizer = self.tokenizer
        media = self.media
        message_format = _message_format(tokenizer, http)
        families = message_format.families
        self.models = Models(self.source, http.model_aliases, families, self.adapters.by_name, self.name)
        self.encoder = PromptEncoder(
            tokenizer,
            trusts_templates=http.trust_request_chat_template,
            variables=http.default_chat_template_kwargs,
            media=media,
            call_ids=message_format.call_ids,
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
            why_no_text=self.pooling.why_no_text,
        )
        forces = http.force_include_usage
        self.completions = Completions(self.generations, self.encoder, tokenizer, forces_usage=forces)
        self.conversations = Conversations(self.generations, self.encoder, message_format)
        self.chats = Chats(self.conversations, self.generations, tokenizer, forces_usage=forces)
        self.embeddings = Embeddings(self.completions, self.pooling)
        self.scores = Scores(self.generations, self.completions, self.encoder, tokenizer, self.pooling)
        self.classification = Classification(self.completions, self.pooling)
        self.decisions = Decisions(self.generations, self.encoder, tokenizer, message_format)
        writer = LogprobWriter(tokenizer, as_ids=False)
        if self.beside is not None:
            self.responses = self.beside.responses.of(self.conversations, writer)
            return
        most_bytes = http.response_store_bytes
        store = ResponseStore(most_bytes, http.response_ttl_s) if most_bytes else None
        ask_stores = self.ask_stores if http.replicas > 1 else None
        timeout_s = http.request_timeout_s
        self.responses = Responses(self.conversations, writer, store, ask_stores, timeout_s=timeout_s)

    async def until_up(self, request: Request, body: Any) -> None:
        """Wait for a replica of a model that may have none. Raises ModelStarting where the class cannot wait."""
        if self.cold_start is None:
            return
        header = request.headers.get(SLO_CLASS_HEADER)
        tier = getattr(body, "service_tier", None)
        asked = self.tiers.choose("default" if tier == "standard_only" else tier, header, request.state.api_key)
        request.state.start_s = await self.cold_start.wait(self.tiers.patience_s(asked) or MOST_WAIT_S)

    def creates(self) -> Creates:
        """Return the functions that answer a request and its body, by path."""
        return {path: create for _, path, create, _ in self.answers()}

    def answers(self) -> list[Endpoint]:
        """Return the endpoints whose bodies name the model."""
        tokenization = Tokenization(self.models, self.encoder, self.tokenizer)
        messages = Messages(self.conversations, self.models)
        create = self.responses.create
        return [
            ("POST", "/v1/completions", self.completions.create, "Continue a prompt, or several"),
            ("POST", "/v1/chat/completions", self.chats.create, "Answer a conversation"),
            ("POST", "/v1/embeddings", self.embeddings.create, "The vectors of texts"),
            ("POST", "/classify", self.classification.create, "The labels of texts"),
            *(("POST", path, self.scores.score, "How well texts fit texts") for path in ("/v1/score", "/score")),
            *(("POST", path, self.scores.rerank, "Documents by how well they fit a query") for path in _RERANK),
            ("POST", "/v1/decisions", self.decisions.create, "Answers to questions about an input, as probabilities"),
            ("POST", "/v1/responses", create, "Answer a conversation, in the form of OpenAI's Responses API"),
            ("POST", "/v1/messages", messages.create, "Answer a conversation, in the form of Anthropic's API"),
            ("POST", "/v1/messages/count_tokens", messages.count_tokens, "The number of tokens of a conversation"),
            ("POST", "/tokenize", tokenization.tokenize, "The tokens of a text or of a conversation"),
            ("POST", "/detokenize", tokenization.detokenize, "The text of tokens"),
        ]


class ModelChoice:
    """All models of a server: the field `model` of a request picks the routes that answer."""

    def __init__(self, models: Sequence[ModelRoutes]) -> None:
        self._models = models

    def endpoints(self) -> list[Endpoint]:
        """Return the endpoints of all models, and the endpoints that clients need beside them."""
        responses = self._models[0].responses  # the store of all
        creates = self.creates()
        return [
            *((method, path, creates[path], summary) for method, path, _, summary in self._models[0].answers()),
            ("GET", "/v1/responses/{name}", responses.retrieve, "A stored response"),
            ("DELETE", "/v1/responses/{name}", responses.delete, "Forget a stored response"),
            ("POST", "/v1/responses/{name}/cancel", responses.cancel, "End a response in the background"),
            ("GET", "/v1/responses/{name}/input_items", responses.items, "The items before a stored response"),
            ("POST", "/v1/load_lora_adapter", self.load, "Name a LoRA adapter, which requests may then ask for"),
            ("POST", "/v1/unload_lora_adapter", self.unload, "Forget the name of a LoRA adapter"),
            ("GET", "/v1/models", self.all, "The served models, their aliases and their adapters"),
            ("GET", "/v1/models/{name:path}", self.one, "One of them"),
        ]

    def creates(self) -> Creates:
        """Return the functions that answer a request and its body, by path."""
        tables = [routes.creates() for routes in self._models]
        return {path: self._chosen([table[path] for table in tables]) for path in tables[0]}

    async def all(self) -> Response:
        """List all models, each with its aliases and adapters."""
        data = [each for routes in self._models for each in routes.models.all()]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}  # Anthropic's fields of a page
        return json_answer({"object": "list", "data": data, **ends})

    async def one(self, name: Name) -> Response:
        return json_answer(self._routes(name).models.one(name))

    async def load(self, request: Request, body: LoadAdapterRequest) -> Response:
        """Name an adapter of the model `base_model_name`, or else of the only one that takes adapters."""
        taking = [routes for routes in self._models if routes.adapters.are_taken] or self._models[:1]
        if body.base_model_name is None and len(taking) > 1:
            names = ", ".join(routes.name for routes in taking)
            reason = f"'base_model_name' must name the model of the adapter: {names}."
            raise ApiError(reason, kind="InvalidUserInput", param="base_model_name")
        routes = taking[0] if body.base_model_name is None else self._routes(body.base_model_name)
        if any(body.lora_name in other.models.names for other in self._models if other is not routes):
            reason = f"'lora_name' {body.lora_name!r} is a name of another model."
            raise ApiError(reason, kind="InvalidUserInput", param="lora_name")
        return await routes.adapters.load(request, body)

    async def unload(self, request: Request, body: UnloadAdapterRequest) -> Response:
        having = [routes for routes in self._models if body.lora_name in routes.adapters.by_name]
        if not having and len(self._models) > 1 and self._models[0].adapters.learn is not None:
            await self._models[0].adapters.learn()  # another ingress may have loaded it a moment ago
            having = [routes for routes in self._models if body.lora_name in routes.adapters.by_name]
        return await (having or self._models)[0].adapters.unload(request, body)

    def _chosen(self, functions: Sequence[Callable[..., Awaitable[Response]]]) -> Callable[..., Awaitable[Response]]:
        """Return the function that answers a request by that of its model. `functions`: one for each model."""
        if len(self._models) == 1 and self._models[0].cold_start is None:
            return functions[0]

        @wraps(functions[0])
        async def chosen(request: Request, body: Any) -> Response:
            routes = self._routes(body.model)
            await routes.until_up(request, body)
            return await functions[self._models.index(routes)](request, body)

        return chosen

    def _routes(self, name: str | None) -> ModelRoutes:
        """Return the routes of the model that has this name. Raises ApiError: there is none, or several models."""
        if len(self._models) == 1:
            return self._models[0]  # which refuses other names
        found = next((routes for routes in self._models if name in routes.models.names), None)
        if found is not None:
            return found
        served = ", ".join(each for routes in self._models for each in routes.models.names)
        if name is None:
            raise ApiError(f"'model' must be given: this server has {served}.", param="model", code="missing_model")
        raise no_such_model(name, served)


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
