"""The outermost layer of every HTTP request: API key, body size, time limit, the client's presence, and all errors."""

import asyncio
import logging
import math
import re
import secrets
import traceback
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crossdock.cluster.api.errors import FULL, ApiError, disk_error
from crossdock.cluster.api.http.answers import error_event
from crossdock.cluster.api.http.connection import AnswerTransport
from crossdock.cluster.api.http.host_names import HostNames
from crossdock.cluster.api.http.http_json import error_answer
from crossdock.cluster.api.http.keys import ApiKey, KeyRing, owner_of
from crossdock.cluster.api.http.limits import Charge, Ledger
from crossdock.cluster.api.http.request_body import check_coding, check_no_body, read_body, streamed_body
from crossdock.cluster.api.http.request_memory import SMALL, RequestMemory
from crossdock.cluster.api.http.service_tiers import SLO_CLASS_HEADER
from crossdock.cluster.api.http.sites import Sites
from crossdock.cluster.api.http.tenant_reader import Tenant, TenantReader
from crossdock.cluster.dispatch.cold_start import ModelStarting
from crossdock.cluster.dispatch.dispatcher import ReplicaLost, SlowReader, SuspectRequest
from crossdock.cluster.dispatch.gate import GenerationPaused
from crossdock.workers.schedule.request.failures import NotFinite
from crossdock.workers.schedule.request.submission import Overloaded
from crossdock.workers.schedule.shares import Shares

logger = logging.getLogger("ray.serve")

_MESSAGES = "/v1/messages"  # below this path, errors have Anthropic's shape
FILES = "/v1/files"  # a POST here brings a file
_COMPUTES_NOTHING = ("/v1/responses/", FILES, "/v1/batches")
_NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients obey it
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def as_api_error(error: BaseException) -> ApiError:
    """Return an error as the client receives it. An internal error shows only that an error has happened."""
    match error:
        case ApiError():
            return error
        case Overloaded():
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            return ApiError(str(error), status=429, code="rate_limit_exceeded", headers=headers)
        case GenerationPaused():
            return ApiError(f"{error}. Try again.", status=503, code="generation_paused")
        case ModelStarting():
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            return ApiError(str(error), status=503, code="model_starting", headers=headers)
        case ReplicaLost():
            # The error's own message may quote a remote traceback.
            reason = "The model is not available now: its replica is starting, does not answer or was lost. Try again."
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
            return ApiError(reason, status=503, code="service_unavailable", headers=headers)
        case SuspectRequest():
            reason = "Replicas of the model ended while they worked on this request, so it is not tried again."
            return ApiError(f"{reason} Do not repeat it unchanged.", code="suspect_request", headers=_NO_RETRY)
        case NotFinite():
            return ApiError(f"{error}. Do not repeat the request.", status=500, code="not_finite", headers=_NO_RETRY)
        case OSError() if error.errno in FULL:
            return disk_error(error)
        case SlowReader():
            reason = "Too many tokens waited to be read, so the request was ended. Read the stream faster."
            return ApiError(reason, status=408, code="slow_reader")
    return ApiError("Internal server error.", status=500, code="internal_error")


class HttpGuard:
    """ASGI middleware.

    The application behind it receives whole bodies, and is cancelled when the client disconnects. API keys guard every
    path but `open_paths`, which take no body then. The scope's `state` holds `request_id`, `memory` (what the request
    holds), `tenant`, `send_event` (which sends an event of a streamed answer past all layers), and where keys are in
    use `api_key` and `account`. A route sets its `slo_class`, and `warnings`: sentences about fields without effect.
    Both become headers of the answer. A stream whose errors have a shape of their own sets `error_event`: the function
    that writes one.
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
        memory: Shares | None = None,
        hosts: HostNames | None = None,
        sites: Sites | None = None,
        tenant_reader: TenantReader | None = None,
        max_file_bytes: int = 0,
    ) -> None:
        """`memory`: of all requests together; None: 2 GiB. `hosts`: names that the server answers to; None: any.
        `sites`: whose pages may act on the server while no keys are set; None: any.
        `max_file_bytes`: of a file's upload, which is read in parts; 0: there are no such uploads."""
        self._tenant_reader = tenant_reader or TenantReader()
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._ledger = ledger
        self._hosts = hosts
        self._sites = sites
        self._shares = memory or Shares(1 << 31)
        self._max_file_bytes = max_file_bytes
        self._max_body_bytes = max_body_bytes
        self._timeout_s = request_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})
        state["request_id"] = _request_id(headers)  # a body may give another
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        sender = _AnswerSender(send, state, is_anthropic=f"{path}/".startswith(f"{_MESSAGES}/"))
        own: AnswerTransport | None = state.get("event_writer")
        state["send_event"] = partial(_send_event, send) if own is None else own.send_event
        state["api_key"] = state["account"] = None
        state["tenant"] = Tenant()
        try:
            async with asyncio.timeout(self._timeout_s) as clock:
                _check_credentials(scope["headers"])
                if self._hosts is not None:
                    self._hosts.check(headers)
                if self._sites is not None and self._keys.is_open:
                    self._sites.check(scope["method"], headers)
                state["api_key"] = key = self._key(path, headers)
                state["tenant"] = self._tenant_reader.of(key, headers)
                if key is not None:
                    _count_connection(state, key)
                    state["account"] = sender.charge = Charge(self._ledger.account(key))
                    computes = scope["method"] == "POST" and not path.startswith(_COMPUTES_NOTHING)
                    await sender.charge.begin(is_read=not computes)
                elif not self._keys.is_open:
                    check_no_body(headers)
                check_coding(headers)
                state["memory"] = sender.memory = RequestMemory(self._shares, owner_of(key))
                if self._max_file_bytes and (scope["method"], path) == ("POST", FILES):
                    await self._app(scope, streamed_body(headers, receive, self._max_file_bytes), sender.send)
                    return
                has_come = own is not None and own.has_body
                body = await read_body(headers, receive, self._max_body_bytes, sender.memory, has_come=has_come)
                if body is None:
                    return
                await _while_connected(self._app(scope, body, sender.send), receive, own)
        except Exception as error:
            if isinstance(error, TimeoutError) and clock.expired():
                reason = f"The request took more than {self._timeout_s} s."
                error = ApiError(reason, status=504, code="request_timeout")
            await sender.fail(error)
            _clear_frames(error)
        finally:
            if sender.memory is not None:
                sender.memory.release()
            if sender.charge is not None:
                sender.charge.end()

    def _key(self, path: str, headers: dict[bytes, bytes]) -> ApiKey | None:
        if self._keys.is_open or path in self._open_paths:
            return None
        given = headers.get(b"authorization", b"")
        if not given and (by_anthropics_name := headers.get(b"x-api-key", b"")):
            given = b"Bearer " + by_anthropics_name
        return self._keys.find(given)


async def _send_event(send: Send, event: bytes) -> None:
    """Send an event of a streamed answer through a server that is not ours, such as a proxy of Serve."""
    await send({"type": "http.response.body", "body": event, "more_body": True})


class _AnswerSender:
    """The sending side of a request. Adds its headers to the answer, and turns an error into an answer or an event."""

    def __init__(self, send: Send, state: Mapping[str, Any], *, is_anthropic: bool) -> None:
        self.charge: Charge | None = None  # the answer's headers show the state of its account
        self.memory: RequestMemory | None = None  # memory that the request holds
        self._start: Message | None = None  # waits for the first part of the body
        self._is_anthropic = is_anthropic
        self._send = send
        self._state = state
        self._has_started = False
        self._has_ended = False
        self._is_stream = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message["headers"])
            self._is_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
            )
            headers.append((b"x-request-id", self._state["request_id"].encode()))
            if (slo_class := self._state.get("slo_class")) is not None:
                headers.append((SLO_CLASS_HEADER.lower().encode(), slo_class.encode()))
            warnings = self._state.get("warnings", ())
            headers += [(b"warning", f'299 crossdock "{warning}"'.encode()) for warning in warnings]
            if self.charge is not None:
                present = {name for name, _ in headers}
                own = ((name.encode(), value.encode()) for name, value in self.charge.headers().items())
                headers += [each for each in own if each[0] not in present]  # a refusal for a limit has them already
            self._start = {**message, "headers": headers}
            if self._is_stream:
                await self._begin()
            return
        size = len(message.get("body", b""))
        is_last = not message.get("more_body", False)
        if is_last and self.memory is not None:
            self.memory.release()  # the body and all that became of it are gone
        if self._start is not None:
            if size > SMALL and self.memory is not None:
                self.memory.hold(size)  # a refusal is still an answer
            await self._begin()
        if is_last:
            self._has_ended = True
            if self.charge is not None:
                self.charge.end()  # before the client can see that its next request may come
        if is_last and size > SMALL:  # the answer counts until the client has read it
            await self._send({**message, "more_body": True})
            message = {**message, "body": b""}
        await self._send(message)

    async def _begin(self) -> None:
        """Send the status and the headers."""
        assert self._start is not None
        start = self._start
        self._start = None
        self._has_started = True
        await self._send(start)

    async def fail(self, error: Exception) -> None:
        api_error = as_api_error(error)
        if api_error.status == 500:
            logger.error("request %s failed", self._state["request_id"], exc_info=error)
        elif api_error.status > 500:
            logger.warning("request %s failed: %s", self._state["request_id"], error)
        if not self._has_started:
            body = api_error.anthropic_body(self._state["request_id"]) if self._is_anthropic else None
            await error_answer(api_error, body)({"type": "http"}, _never, self.send)
        elif self._is_stream and not self._has_ended:
            write = self._state.get("error_event", error_event)
            body = write(api_error)
            await self.send({"type": "http.response.body", "body": body, "more_body": False})


def _count_connection(state: Mapping[str, Any], key: ApiKey) -> None:
    """Have our own listener count the connection for the key. Raises ApiError 429 if the key has too many."""
    if "show_key" in state and not state["show_key"](key.owner):
        reason = "This API key has its share of the server's connections. Close some, or send requests on them."
        headers = {"Retry-After": "1", "Connection": "close"}
        raise ApiError(reason, status=429, code="too_many_connections", headers=headers)


def _check_credentials(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raise ApiError for two keys in one header's name: a gateway before this server may have checked the other one."""
    names = [name for name, _ in headers]
    for name in (b"authorization", b"x-api-key"):
        if names.count(name) > 1:
            raise ApiError(f"The header '{name.decode()}' was sent more than once: send one.", code="repeated_header")


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _clear_frames(error: BaseException | None) -> None:
    """Free what an error's frames hold, such as the body.

    The error and its frames refer to each other, so memory would wait for the garbage collector, which comes rarely.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


async def _never() -> Message:
    forever: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await forever


async def _while_connected(work: Awaitable[None], receive: Receive, own: AnswerTransport | None) -> None:
    """Run `work` until it is done, the client is gone, or this call is cancelled; its generators end first.

    `own`: the transport of our own listener, which calls when the client is gone: no task need wait for that.
    """
    task = asyncio.current_task()
    is_gone = False
    assert task is not None
    num_before = task.cancelling()

    def end() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    async def watch() -> None:
        with suppress(Exception):  # a connection that cannot be read any more is gone
            while (await receive())["type"] != "http.disconnect":
                pass
        end()

    watching = asyncio.ensure_future(watch()) if own is None else own.when_gone(end)
    try:
        await work
    except asyncio.CancelledError:
        if not is_gone or task.cancelling() > num_before + 1:  # others have cancelled this call, too
            raise
    finally:
        watching.cancel()
        if is_gone:
            task.uncancel()
