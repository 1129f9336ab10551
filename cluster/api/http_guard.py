"""Where an HTTP request begins and ends: its key, its size, its time limit, its client's presence, and any error."""

import asyncio
import logging
import math
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Collection
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crossdock.cluster.api import bodies
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.keys import ApiKey, KeyRing
from crossdock.cluster.api.limits import Account, Ledger
from crossdock.cluster.dispatch.dispatch import ReplicaLost
from crossdock.workers.schedule.request import Overloaded

logger = logging.getLogger("ray.serve")

_SILENCE_S = 30.0  # while a body is on its way
_CLOSE = {"Connection": "close"}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of any error. Of those that are ours it learns that they are, and no more."""
    match error:
        case ApiError():
            return error
        case Overloaded():
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            return ApiError(
                str(error), status=429, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers
            )
        case ReplicaLost():
            # Its own message may quote a remote traceback.
            reason = "The model is not available now: its replica is starting or was lost. Try again."
            return ApiError(reason, status=503, kind="server_error", code="service_unavailable")
    return ApiError("Internal server error.", status=500, kind="server_error", code="internal_error")


def refusal(error: ApiError) -> Response:
    return Response(error.body(), error.status, headers=error.headers, media_type="application/json")


class EventStream(Response):
    """Server-sent events: those that were waited for before the status was decided, and the rest."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest) as rest:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in rest:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class HttpGuard:
    """ASGI middleware. The application behind it gets the whole body at once and never hears of a disconnect: it is
    cancelled. Keys guard every path but the open ones. `state` has the request's id and, if keys are asked for, its key
    and that key's account.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        open_paths: Collection[str],
        ledger: Ledger,
        max_body_bytes: int,
        request_timeout_s: float | None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._ledger = ledger
        self._max_body_bytes = max_body_bytes
        self._timeout_s = request_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        answer = _Answer(send, _request_id(headers))
        state = scope.setdefault("state", {})
        state["request_id"] = answer.request_id
        state["api_key"] = state["account"] = None
        try:
            async with asyncio.timeout(self._timeout_s) as clock:
                state["api_key"] = key = self._key(scope, headers)
                if key is not None:
                    state["account"] = answer.account = self._ledger.account(key)
                    if scope["method"] == "POST":  # what is only looked at costs nothing
                        answer.begin_on_account()
                body = await self._read(headers, receive)
                if body is None:
                    return
                await _while_connected(self._app(scope, _replay(body), answer.send), receive)
        except Exception as error:
            if isinstance(error, TimeoutError) and clock.expired():
                reason = f"The request took more than {self._timeout_s} s."
                error = ApiError(reason, status=504, kind="server_error", code="request_timeout")
            await answer.fail(error)
        finally:
            answer.end_on_account()

    def _key(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiKey | None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._keys.is_open or path in self._open_paths:
            return None
        return self._keys.find(headers.get(b"authorization", b""))

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The body, or None if the client left. Reading ends where the limit is passed, and the connection with it."""
        limit = self._max_body_bytes
        length = headers.get(b"content-length", b"")
        parts: list[bytes] = []
        size = int(length) if length.isdigit() else 0
        if size <= limit:
            size = 0
            while size <= limit:
                try:
                    async with asyncio.timeout(_SILENCE_S):
                        message = await receive()
                except TimeoutError:
                    reason = f"Nothing of the body came for {_SILENCE_S:.0f} s."
                    raise ApiError(reason, status=408, code="request_timeout", headers=_CLOSE) from None
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if not message.get("more_body", False):
                    break
        if size > limit:
            reason = f"The body is larger than {limit} bytes."
            raise ApiError(reason, status=413, code="request_too_large", headers=_CLOSE)
        return b"".join(parts)


class _Answer:
    """The sending side of a request: names it in the answer, and knows how an error can still be told."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.account: Account | None = None  # whose state the answer tells
        self._send = send
        self._is_on_account = False
        self._has_started = False
        self._has_ended = False
        self._is_stream = False

    def begin_on_account(self) -> None:
        assert self.account is not None
        self.account.begin()
        self._is_on_account = True

    def end_on_account(self) -> None:
        if self.account is not None and self._is_on_account:
            self._is_on_account = False
            self.account.end()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_started = True
            headers = list(message["headers"])
            self._is_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
            )
            headers.append((b"x-request-id", self.request_id.encode()))
            told = {name for name, _ in headers}
            for name, value in (self.account.headers() if self.account is not None else {}).items():
                if name.encode() not in told:  # a refusal has them already
                    headers.append((name.encode(), value.encode()))
            message = {**message, "headers": headers}
        elif not message.get("more_body", False):
            self._has_ended = True
            self.end_on_account()  # before the client knows that it may come again
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        told = as_api_error(error)
        if told.status == 500:
            logger.error("request %s failed", self.request_id, exc_info=error)
        elif told.status > 500:
            logger.warning("request %s failed: %s", self.request_id, error)
        if not self._has_started:
            await refusal(told)({"type": "http"}, _never, self.send)
        elif self._is_stream and not self._has_ended:
            body = bodies.error_event(told) + bodies.DONE
            await self.send({"type": "http.response.body", "body": body, "more_body": False})


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _replay(body: bytes) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await _never()

    return receive


async def _never() -> Message:
    forever: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await forever


async def _while_connected(work: Awaitable[None], receive: Receive) -> None:
    """Runs `work` until it is done or the client is gone, or this is cancelled. In every case its generators have been
    closed on return."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if not working.cancelled():
        working.result()
