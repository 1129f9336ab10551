"""Endpoints for trainers: pause and resume generation, with the paths and answers of vLLM."""

from fastapi import Request, Response

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.http_json import json_answer
from crossdock.cluster.dispatch.gate import PauseMode
from crossdock.cluster.dispatch.rollouts import Rollouts


class RolloutControl:
    """Served where the operator has enabled the paths. With API keys, a key must see all requests."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    async def pause(self, request: Request, mode: PauseMode = "abort", clear_cache: bool = True) -> Response:
        """End running requests (abort), let them end (wait), or stop them where they are (keep)."""
        check_operator(request)
        await self._rollouts.pause(mode)
        return json_answer({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        check_operator(request)
        await self._rollouts.resume()
        return json_answer({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        check_operator(request)
        return json_answer({"is_paused": self._rollouts.is_paused})


def check_operator(request: Request) -> None:
    """Raise ApiError 403 for an API key that may not change what others get."""
    key = request.state.api_key
    if key is not None and not key.sees_all_requests:
        reason = "This API key may not do that: it needs a key with sees_all_requests."
        raise ApiError(reason, status=403, code="not_allowed")
