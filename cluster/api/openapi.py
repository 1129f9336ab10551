"""The API, described for machines: OpenAPI 3.1, from the same models that read the requests."""

from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from crossdock.cluster.api.bodies import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from crossdock.cluster.api.playground import Scenario

_BODIES: dict[str, tuple[str, type[BaseModel]]] = {
    "/v1/completions": ("Continue a prompt, or several", CompletionRequest),
    "/v1/chat/completions": ("Answer a conversation", ChatCompletionRequest),
    "/tokenize": ("The tokens of a text or of a conversation", TokenizeRequest),
    "/detokenize": ("The text of tokens", DetokenizeRequest),
}
_LOOKS = {
    "/v1/models": "The served model and its aliases",
    "/v1/models/{name}": "One of them",
    "/v1/requests": "Requests in flight",
    "/v1/requests/{name}": "The timeline of a request, by its id",
    "/v1/replicas": "Every replica now, and its recent steps",
    "/v1/playground/scheduler": "What the scheduler does in a scenario",
    "/health": "The process lives",
    "/ready": "A replica can serve",
    "/metrics": "Prometheus, of the whole deployment",
    "/version": "Of Crossdock",
}
_AFTER = {
    "name": "after",
    "in": "query",
    "description": "INCARNATION:NUMBER of the step that was seen last; once for each replica",
    "schema": {"type": "array", "items": {"type": "string", "pattern": "^[0-9a-f]{32}:[0-9]{1,15}$"}},
}


def document(open_paths: tuple[str, ...]) -> dict[str, Any]:
    """`open_paths`: those that ask for no key."""
    models = [model for _, model in _BODIES.values()]
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for path, (summary, model) in _BODIES.items():
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        paths[path] = {
            "post": _operation(path, summary, open_paths, requestBody={"required": True, "content": content})
        }
    for path, summary in _LOOKS.items():
        parameters: list[dict[str, Any]] = []
        if "{name}" in path:
            parameters = [
                {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            ]
        elif path == "/v1/replicas":
            parameters = [_AFTER]
        elif path == "/v1/playground/scheduler":
            fields = Scenario.model_json_schema()["properties"]
            parameters = [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
        paths[path] = {"get": _operation(path, summary, open_paths, parameters=parameters)}
    fields = {"message": "string", "type": "string", "param": ["string", "null"], "code": ["string", "null"]}
    error = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in fields.items()},
        "required": list(fields),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Crossdock", "version": version("crossdock")},
        "paths": paths,
        "components": {
            "schemas": {
                **schemas["$defs"],
                "Error": {"type": "object", "properties": {"error": error}, "required": ["error"]},
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, summary: str, open_paths: tuple[str, ...], **more: Any) -> dict[str, Any]:
    refused = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses = {"200": {"description": "Done"}, "default": {"description": "Refused", "content": refused}}
    security: dict[str, Any] = {} if path in open_paths else {"security": [{"key": []}]}
    return {"summary": summary, "responses": responses, **security, **more}
