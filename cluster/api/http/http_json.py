"""JSON in, JSON or server-sent events out. FastAPI describes the bodies; `Body.parse` reads each of them, once."""

import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

from fastapi import Path, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from crossdock.cluster.api.body.json_body import Body
from crossdock.cluster.api.errors import ApiError, to_json
from crossdock.cluster.api.slices import slices

# The rest of a path. The length is for the description only: an empty name is answered like an unknown one.
Name = Annotated[str, Path(json_schema_extra={"minLength": 1})]

_Body = TypeVar("_Body", bound=Body)
_PIECES_AT_ONCE = 2048  # of JSON: values and marks; under a millisecond
_PIECEWISE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class JsonRoute(APIRoute):
    """A route whose endpoint takes the request and its body.

    FastAPI's own reading would accept NaN and lone surrogates, and report errors in another shape than OpenAI's.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        assert self.body_field is not None
        kind = self.body_field.field_info.annotation
        endpoint = self.endpoint
        assert isinstance(kind, type)
        assert issubclass(kind, Body)

        async def handle(request: Request) -> Response:
            response: Response = await endpoint(request, await _read(request, kind))
            return response

        return handle


class JsonRoutes:
    """ASGI middleware that answers the paths of `JsonRoute` itself: a request passes none of FastAPI's layers."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._handlers = {each.path: each.get_route_handler() for each in routes if isinstance(each, JsonRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        handler = self._handlers.get(scope["path"].removeprefix(scope.get("root_path", ""))) if is_post else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        answer = await handler(Request(scope, receive))
        await answer(scope, receive, send)


async def _read(request: Request, kind: type[_Body]) -> _Body:
    content_type = (header(request, b"content-type") or "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        reason = f"Unsupported content type {content_type[:100]!r}: send application/json."
        raise ApiError(reason, status=415, code="unsupported_media_type")
    content = (await request.receive())["body"]  # whole, from `HttpGuard`; `body()` would keep it until the answer
    await request.state.memory.admit(content)
    return kind.parse(content)


def header(request: Request, name: bytes) -> str | None:
    """Find the first header with a name in lower case, as `request.headers` does, in less time."""
    return next((value.decode("latin-1") for each, value in request.scope["headers"] if each == name), None)


def json_answer(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


async def long_json_answer(value: Any) -> Response:
    """Return an answer whose length grows with the request's input. Other requests are served meanwhile."""
    return Response(await long_json(value), media_type="application/json")


async def long_json(value: Any) -> bytes:
    """Return a value as JSON, as `to_json` does, but written in slices."""
    texts = [
        "".join(pieces).encode("utf-8", "replace")
        async for pieces in slices(_PIECEWISE.iterencode(value), _PIECES_AT_ONCE)
    ]
    return b"".join(texts)


def error_answer(error: ApiError, body: bytes | None = None) -> Response:
    """Return an error as an answer. `body`: in another API's shape than OpenAI's."""
    content = error.body() if body is None else body
    return Response(content, error.status, headers=error.headers, media_type="application/json")


async def event_stream(events: AsyncGenerator[bytes, None]) -> Response:
    """Return the events as an answer, once the first has come: an error before it still decides the status."""
    return EventStream(await anext(events, b""), events)


class EventStream(Response):
    """Server-sent events: the first, which came before the status was decided, and the rest."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None  # read by FastAPI, which answers GET
        self.raw_headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        self.raw_headers.append((b"content-type", b"text/event-stream; charset=utf-8"))
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest) as rest:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            send_event = scope["state"]["send_event"]  # past all layers
            async for event in rest:
                await send_event(event)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
