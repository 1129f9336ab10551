"""Endpoints for operators: requests in flight, timelines, replicas and their steps, health, metrics, version."""

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import Query, Request, Response
from pydantic import Field

from crossdock.cluster.api.errors import ApiError, wrong
from crossdock.cluster.api.http.http_json import Name, json_answer, long_json_answer
from crossdock.cluster.api.http.keys import ApiKey
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.dispatchers import Dispatchers

# The pattern is for the description only: `_step_number` reports what is wrong in words of its own.
_SeenStep = Annotated[str, Field(json_schema_extra={"pattern": "^[0-9a-f]{32}:[0-9]{1,15}$"})]
_SEEN = "INCARNATION:NUMBER of the newest step that the client has, once for each replica."


_ID_PREFIXES = ("chatcmpl-", "cmpl-", "msg_")  # of the ids of answers, before the id of the request
ScalingDecisions = Callable[[], Awaitable[list[dict[str, Any]]]]
"""Returns the newest decisions of the scaler. Raises TimeoutError where it does not answer."""

_LOADS = ("load", "spare_load", "streams", "reason")  # fields of a decision that show what other keys' requests need


class ServerStatus:
    def __init__(self, dispatcher: Dispatcher | Dispatchers, decisions: ScalingDecisions | None = None) -> None:
        self._dispatcher = dispatcher
        self._decisions = decisions

    async def requests(self, request: Request) -> Response:
        data = await self._dispatcher.live_requests(_visible_owner(request))
        return await long_json_answer({"object": "list", "data": data})

    async def timeline(self, request: Request, name: Name) -> Response:
        """Find the request by its id (the answer's header X-Request-Id), or by the `id` in the answer's body."""
        owner = _visible_owner(request)
        for request_id in dict.fromkeys((name, *(name.removeprefix(prefix) for prefix in _ID_PREFIXES))):
            if found := await self._dispatcher.timelines(request_id, owner):
                return json_answer({"id": request_id, "object": "request.timeline", "requests": found})
        reason = f"No request '{name[:200]}' is known: it never arrived, ended long ago, or belongs to another API key."
        raise ApiError(reason, status=404, param="id", code="request_not_found")

    async def replicas(
        self, request: Request, after: Annotated[tuple[_SeenStep, ...], Query(description=_SEEN)] = ()
    ) -> Response:
        """List every replica as it is now, with its steps after those that the client has."""
        seen: dict[str, int] = {}
        for value in after:
            incarnation, _, number = value.partition(":")
            seen[incarnation] = _step_number(number, value)
        data = await self._dispatcher.replicas(seen, _visible_owner(request))
        return await long_json_answer({"object": "list", "data": data})

    async def scaling(self, request: Request) -> Response:
        """List the newest decisions about sizes of pools and roles of replicas, and the load that decided each. Only
        clients that may see all requests see these."""
        try:
            data = [] if self._decisions is None else await self._decisions()
        except TimeoutError:
            raise ApiError("The scaler does not answer.", status=503, code="not_ready") from None
        if _visible_owner(request) is not None:
            data = [{key: value for key, value in each.items() if key not in _LOADS} for each in data]
        return json_answer({"object": "list", "data": data})

    async def health(self) -> Response:
        return Response()

    async def ready(self) -> Response:
        if not self._dispatcher.ready():
            reason = "Nothing can be generated now: no replica is up, or generation is stopped (/pause or /sleep)."
            raise ApiError(reason, status=503, code="not_ready")
        return Response()

    async def metrics(self) -> Response:
        return Response(await self._dispatcher.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self) -> Response:
        return json_answer({"version": version("crossdock")})


def _step_number(number: str, value: str) -> int:
    if not (number.isascii() and number.isdigit() and len(number) < 16):
        raise wrong("after", f"{value[:100]!r} is not of the form INCARNATION:NUMBER")
    return int(number)


def _visible_owner(request: Request) -> str | None:
    """Return the owner whose requests this client may see. None: all, as is the case where no API key is required."""
    key: ApiKey | None = request.state.api_key
    return None if key is None or key.sees_all_requests else key.owner
