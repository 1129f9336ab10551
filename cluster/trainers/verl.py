"""The rollout `crossdock` of verl: importing this module registers it. verl finds it as a plugin (`verl.plugins`).

verl's replicas are handles of one running application, which balances over its own replicas: verl sends token ids to
any of them. Weights travel through Ray's object store, so the application runs in verl's Ray cluster.
"""

import asyncio
import os
from collections.abc import Iterable
from typing import Any

import httpx
import ray
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry, TokenOutput

from crossdock.cluster.serve.app import APP_NAME
from crossdock.cluster.serve.rollouts import push_weights

NAME = "crossdock"
_STOPS = {"stop": "completed", "length": "completed", "abort": "aborted"}  # verl's words for reasons of an end
_CONTROL_S = 1800.0  # the longest that running requests take to end


def settings(config: Any) -> dict[str, Any]:
    """Return `rollout.engine_kwargs.crossdock`: `url` of the application, and `app_name`. ValueError: no url."""
    found = dict((config.engine_kwargs or {}).get(NAME) or {})
    if unknown := found.keys() - {"url", "app_name"}:
        raise ValueError(f"rollout.engine_kwargs.crossdock has {sorted(unknown)}; it takes url and app_name")
    if not found.get("url"):
        raise ValueError("rollout.engine_kwargs.crossdock.url must be the address of a running application")
    if config.checkpoint_engine.backend != "naive":
        reason = f"rollout.checkpoint_engine.backend is {config.checkpoint_engine.backend!r}"
        raise ValueError(f"{reason}; a crossdock rollout takes naive: the trainer's ranks push their weights")
    return {"app_name": APP_NAME, **found}


class TokenServer:
    """One of verl's servers: passes token ids to the application and back. Runs as an actor of Ray."""

    def __init__(self, config: Any, leads: bool) -> None:
        """`leads`: passes verl's calls to all servers on to the application, once for all servers."""
        self._config = config
        self._leads = leads
        self._http = httpx.AsyncClient(base_url=settings(config)["url"], timeout=None)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Sample tokens after a prompt. RuntimeError: the application refuses the request, with its reason."""
        if image_data or video_data or audio_data:
            raise ValueError("image_data, video_data and audio_data must be empty: a crossdock rollout takes tokens")
        answer = await self._http.post(
            "/v1/completions",
            json=request_body(self._config, prompt_ids, sampling_params, priority),
            headers={"X-Request-Id": request_id},
        )
        if answer.status_code != 200:
            raise RuntimeError(f"crossdock answered {answer.status_code}: {answer.text[:500]}")
        return token_output(answer.json())

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End running requests with the tokens that they have; later ones wait for `resume_generation`."""
        await self._control("/pause?mode=abort&clear_cache=false")

    async def resume_generation(self) -> None:
        await self._control("/resume")

    async def clear_kv_cache(self) -> None:
        await self._control("/reset_prefix_cache")

    async def keep_memory(self) -> None:
        """Do nothing: the application has memory of its own, which no trainer needs."""

    sleep = wake_up = release_kv_cache = resume_kv_cache = start_profile = stop_profile = keep_memory

    async def _control(self, path: str) -> None:
        if self._leads:
            (await self._http.post(path, timeout=_CONTROL_S)).raise_for_status()


def request_body(config: Any, prompt_ids: list[int], sampling: dict[str, Any], priority: int) -> dict[str, Any]:
    """Return the body of /v1/completions for verl's sampling parameters: those of vLLM, but for three names."""
    params = {"repetition_penalty": config.repetition_penalty, "ignore_eos": config.ignore_eos, **sampling}
    most = min(config.response_length, config.prompt_length + config.response_length - len(prompt_ids))
    limits = [params.pop(name) for name in ("max_tokens", "max_new_tokens") if name in params]
    params["logprobs"] = 0 if params.pop("logprobs", False) else None
    if priority:
        params["priority"] = priority
    return {**params, "prompt": list(prompt_ids), "max_tokens": max(*limits, 1) if limits else max(most, 1)} | {
        "return_token_ids": True
    }


def token_output(answer: dict[str, Any]) -> TokenOutput:
    """Return an answer of /v1/completions as verl takes it. `global_steps`: the newest weights that made tokens."""
    [choice] = answer["choices"]
    versions = choice.get("weight_versions", [])
    name = versions[-1]["version"] if versions else ""
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
    return TokenOutput(
        token_ids=choice["token_ids"],
        log_probs=None if choice["logprobs"] is None else choice["logprobs"]["token_logprobs"],
        stop_reason=_STOPS.get(choice["finish_reason"], choice["finish_reason"]),
        extra_fields={
            "global_steps": int(name) if name.isdigit() else None,
            "num_cached_tokens": cached,
            "weight_versions": versions,
        },
    )


class ApplicationReplica(RolloutReplica):  # type: ignore[misc]
    """Stands for a replica of verl: a server that passes requests to the application. It starts no engine."""

    async def init_standalone(self) -> None:
        """Begin without resources of verl's cluster."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        actor = ray.remote(num_cpus=0)(TokenServer).options(
            name=f"{NAME}_server_{self.replica_rank}{self.name_suffix}", max_concurrency=self.max_concurrency
        )
        url = httpx.URL(settings(self.config)["url"])
        self._server_handle = actor.remote(self.config, self.replica_rank == 0)
        self._server_address = f"{url.host}:{url.port}"
        self.servers = [self._server_handle]


class ApplicationRollout(base.BaseRollout):  # type: ignore[misc]
    """The trainer's side: pushes the weights of a training step to all replicas of the application."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self._app_name = settings(self.config)["app_name"]
        self._rank = int(os.environ.get("RANK", "0"))
        self.replica_rank = self._rank if replica_rank == -1 else replica_rank
        self.is_leader_rank = self._rank == 0

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the application keeps its memory."""

    async def release(self) -> None:
        """Do nothing: the application keeps its memory."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Any]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Replace the application's weights by whole tensors, which all ranks of the trainer gather and the first one
        sends. Answers name the weights by `global_steps`. ValueError: these are not whole tensors of the model."""
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format is {wire_format!r}; a crossdock rollout takes named_tensors")
        if peft_config is not None:
            raise ValueError("model.lora.merge must be true: a crossdock rollout takes weights with adapters merged")
        name = "" if global_steps is None else str(global_steps)
        if self._rank == 0:
            await asyncio.to_thread(push_weights, weights, name, "wait", self._app_name)
        else:
            for _tensor in weights:  # gathering a shard is a call of all ranks
                pass


RolloutReplicaRegistry.register(NAME, lambda: ApplicationReplica)
base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.ApplicationRollout"
