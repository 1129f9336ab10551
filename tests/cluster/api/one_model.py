"""The API of one model, with the defaults of a server for all that a test does not give."""

from typing import Any

from fastapi import FastAPI

from crossdock.cluster.api.body.generation_defaults import GenerationDefaults
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults
from crossdock.cluster.api.endpoints import build_api
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.service_tiers import ServiceTiers
from crossdock.cluster.api.routes.model_routes import ModelRoutes
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher

_OF_SERVER = ("decisions", "ask_peers", "rollouts")  # arguments of `build_api`


def one_model_api(
    dispatcher: Dispatcher,
    tokenizer: ModelTokenizer,
    http: HttpConfig,
    tiers: ServiceTiers | None = None,
    **others: Any,
) -> FastAPI:
    """Return the ASGI application of one model. `others`: arguments of `build_api`, and fields of `ModelRoutes`."""
    of_server = {name: others.pop(name) for name in _OF_SERVER if name in others}
    given = {name: value for name, value in others.items() if value is not None}
    parts = {"defaults": GenerationDefaults(), "pooling": EmbeddingDefaults()} | given
    routes = ModelRoutes(dispatcher, tokenizer, http, tiers or ServiceTiers(), **parts)
    return build_api([routes], dispatcher, http, **of_server)
