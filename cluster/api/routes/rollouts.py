"""Endpoints for trainers: pause and resume generation, replace weights. Paths and answers are vLLM's."""

import asyncio
from pathlib import Path
from typing import Any, Literal

from fastapi import Request, Response

from crossdock.cluster.api.body.json_body import Body
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.http_json import json_answer
from crossdock.cluster.api.routes.adapters import below, check_operator
from crossdock.cluster.dispatch.gate import PauseMode
from crossdock.cluster.dispatch.rollouts import Rollouts


class InitTransfer(Body):
    init_info: dict[str, Any]


class UpdateWeights(Body):
    update_info: dict[str, Any]


class FinishUpdate(Body):
    weight_version: str | None = None


class UpdateFromDisk(Body):
    """The body of SGLang's path."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    checksums: dict[str, str] | None = None  # SHA-256 of tensors, by name


class CheckWeights(Body):
    """The body of vLLM's path."""

    action: Literal["checksum", "compare"]
    baseline: dict[str, str] | None = None


class RolloutControl:
    """Served where the operator has enabled the paths. With API keys, a key must see all requests."""

    def __init__(self, rollouts: Rollouts, folder: Path | None) -> None:
        """`folder`: below which checkpoints may be read; None: nowhere."""
        self._rollouts = rollouts
        self._folder = folder

    async def pause(self, request: Request, mode: PauseMode = "abort", clear_cache: bool = True) -> Response:
        """End running requests (abort), let them end (wait), or stop them where they are (keep)."""
        check_operator(request)
        await self._rollouts.pause(mode)
        if clear_cache and mode != "keep":
            await self._rollouts.reset_cache()
        return json_answer({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        check_operator(request)
        await _refusing(self._rollouts.resume(), None, "asleep")
        return json_answer({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        check_operator(request)
        return json_answer({"is_paused": self._rollouts.is_paused})

    async def sleep(self, request: Request, level: int = 1, mode: PauseMode = "abort") -> Response:
        """Give up the memory of pages (level 1), or of pages and weights (level 2), until `wake_up`."""
        check_operator(request)
        await _refusing(self._rollouts.sleep(level, mode), "mode" if mode == "keep" else "level", "cannot_sleep")
        return Response(status_code=200)

    async def wake_up(self, request: Request) -> Response:
        """Take the memory again: all of it, or what the query's `tags` name, once or several times."""
        check_operator(request)
        await _refusing(self._rollouts.wake_up(request.query_params.getlist("tags")), "tags", "cannot_wake_up")
        return Response(status_code=200)

    async def is_sleeping(self, request: Request) -> Response:
        check_operator(request)
        return json_answer({"is_sleeping": await self._rollouts.is_sleeping()})

    async def reset_cache(self, request: Request) -> Response:
        check_operator(request)
        await self._rollouts.reset_cache()
        return json_answer({"success": True})

    async def world_size(self, request: Request) -> Response:
        """Count the ranks of all replicas: a trainer's group has one place for each."""
        check_operator(request)
        return json_answer({"world_size": await self._rollouts.world_size()})

    async def server_info(self, request: Request, config_format: str = "json") -> Response:
        check_operator(request)
        return json_answer({"vllm_config": self._rollouts.server_info()})

    async def init_transfer(self, request: Request, body: InitTransfer) -> Response:
        """Have all ranks join the trainer's process group; the answer comes once they have."""
        check_operator(request)
        await _refusing(self._rollouts.join_group(body.init_info), "init_info")
        return json_answer({"message": "Weight transfer initialized"})

    async def start_update(self, request: Request) -> Response:
        check_operator(request)
        await _refusing(self._rollouts.start_update(), None)
        return json_answer({"message": "Weight update started"})

    async def receive(self, request: Request, body: UpdateWeights) -> Response:
        """Receive the named tensors, which the trainer sends to its group meanwhile."""
        check_operator(request)
        await _refusing(self._rollouts.receive(body.update_info), "update_info")
        return json_answer({"message": "Weights updated"})

    async def finish_update(self, request: Request, mode: PauseMode = "wait") -> Response:
        """Compute with the tensors that were received. `mode`: of requests that run, unless generation is paused."""
        check_operator(request)
        content = await request.body()
        await request.state.memory.admit(content)
        given = FinishUpdate.parse(content) if content else FinishUpdate()
        weights = await _refusing(self._rollouts.finish_update(given.weight_version or "", mode), "weight_version")
        return json_answer({"message": "Weight update finished", "weight_version": weights.name})

    async def update_from_disk(self, request: Request, body: UpdateFromDisk, mode: PauseMode = "wait") -> Response:
        """Compute with the weights of a checkpoint below the operator's folder."""
        check_operator(request)
        if self._folder is None:
            reason = "This server reads no weights while it runs: start it with --weights-folder FOLDER."
            raise ApiError(reason, status=403, code="weights_are_fixed")
        try:
            folder = await asyncio.to_thread(
                below, self._folder, body.model_path, "model_path", "checkpoints (--weights-folder)"
            )
        except FileNotFoundError:
            reason = f"No checkpoint is at 'model_path' {body.model_path!r}."
            raise ApiError(reason, status=404, kind="NotFoundError", param="model_path") from None
        except ValueError as error:
            raise ApiError(f"{error}", param="model_path", code="invalid_value") from None
        mode = "abort" if body.abort_all_requests else mode
        update = self._rollouts.update(str(folder), body.weight_version or "", mode, checksums=body.checksums)
        weights = await _refusing(update, "model_path")
        return json_answer({"success": True, "message": "Weights updated", "weight_version": weights.name})

    async def check(self, request: Request, body: CheckWeights) -> Response:
        """Return the checksum of each tensor of the last update, once all memory that steps read is compared."""
        check_operator(request)
        if body.action == "compare" and not body.baseline:
            raise ApiError(
                "'baseline' must give the checksums to compare with.", param="baseline", code="invalid_value"
            )
        found = await _refusing(self._rollouts.checksums(), None, "weights_not_proven")
        if body.action == "checksum":
            return json_answer({"checksums": dict(found)})
        wrong = sorted(name for name, each in (body.baseline or {}).items() if found.get(name) != each)
        return json_answer({"match": not wrong, "mismatches": wrong})

    async def weight_info(self, request: Request) -> Response:
        check_operator(request)
        weights = self._rollouts.weights
        return json_answer({"weight_version": weights.name, "number": weights.number, "id": weights.id})


async def _refusing(work: Any, param: str | None, code: str = "weights_not_replaced") -> Any:
    """Await work. Raises ApiError with the reason where replicas refuse."""
    try:
        return await work
    except ValueError as error:
        reason = str(error.args[0]) if error.args else str(error)
        raise ApiError(reason, param=param, code=code) from None
