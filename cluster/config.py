"""The configuration: one frozen tree of settings, each component's model beside its class."""

import os
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from crossdock.cluster.api.body.generation_defaults import GenerationConfig
from crossdock.cluster.api.body.pooler_config import PoolerConfig
from crossdock.cluster.api.http.http_config import HttpConfig, ModelHttpConfig
from crossdock.cluster.api.http.keys import check_keys
from crossdock.router.fleet import RouterConfig
from crossdock.router.scaling import ScalingConfig
from crossdock.workers.model.model_spec import FITTING, ModelSpec
from crossdock.workers.model.weights.checkpoint import model_name
from crossdock.workers.model.weights.config_overrides import check_overrides
from crossdock.workers.replica.config import (
    Device,
    EmulatedDevice,
    EngineConfig,
    EplbConfig,
    ReplicaSpec,
    TransferConfig,
)
from crossdock.workers.report.presets import estimate, is_gpu, stored_profile, time_scale
from crossdock.workers.report.profile import NO_ENCODE_POOLS, Role

DEVICES = ("CPU", "GPU")  # Ray's names of what replicas reserve
_JUDGE = "classifier_from_token"
_OF_JUDGES = ("architectures", "is_original_qwen3_reranker")  # how vLLM says that a model that generates judges pairs
Dtype: TypeAlias = Literal["auto", "bfloat16", "float16", "float32"]


class ModelConfig(BaseModel):
    """The model that is served."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str | None = Field(
        None,
        json_schema_extra={"format": "model"},
        description="Directory, or hub name (org/name or org/name@revision); null is the embedded SmolLM2-135M.",
    )
    tokenizer: str | None = Field(
        None,
        json_schema_extra={"format": "model"},
        description="Directory or hub name of another tokenizer with the model's ids; null: the model's own.",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        json_schema_extra={"format": "path"},
        description="File with the chat template, or the template itself in one line; null: the model's.",
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        "auto",
        description="Content of messages in the template: string, or openai's list of parts; auto: what it shows.",
    )
    served_name: str | None = Field(
        None, min_length=1, description="The name that clients give; null: made from `path`."
    )
    hf_overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="Values in place of those of the model's config.json: a rope_scaling for a longer context, say.",
    )
    dtype: Dtype = Field(
        "auto",
        description="Data type of weights, activations and, unless kv_cache_dtype names another, KV pages; "
        "auto is the checkpoint's.",
    )
    max_model_len: int | None = Field(
        None,
        ge=FITTING,
        description="Longest prompt and output together, in tokens; null is the model's own limit, and auto or -1 what "
        "of it fits the KV pages.",
    )
    generation_config: str = Field(
        "auto",
        json_schema_extra={"format": "path"},
        description="Sampling of requests that leave it open: auto is the model's generation_config.json, vllm none; "
        "else a directory with that file.",
    )
    override_generation_config: GenerationConfig = Field(
        default_factory=lambda: GenerationConfig.model_validate({}),
        description="Values that win over those of generation_config.",
    )
    pooler_config: PoolerConfig = Field(
        default_factory=lambda: PoolerConfig.model_validate({}),
        description="How /v1/embeddings makes a vector of a text; what is not given is the model's.",
    )

    lora_modules: dict[str, str] = Field(
        default_factory=dict,
        json_schema_extra={"format": "path"},
        description="Folders of LoRA adapters by the names that clients ask for.",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_judge(cls, values: Any) -> Any:
        """Read vLLM's overrides for Qwen3-Reranker as what says the same here."""
        if not isinstance(values, dict) or not isinstance(overrides := values.get("hf_overrides"), dict):
            return values
        if _JUDGE not in overrides:
            return values
        words = {_JUDGE: overrides[_JUDGE]}
        pooler = values.get("pooler_config") or {}
        if not isinstance(pooler, dict) or pooler.get(_JUDGE) not in (None, overrides[_JUDGE]):
            raise ValueError(f"hf_overrides and pooler_config both have {_JUDGE}; give one of them")
        rest = {name: value for name, value in overrides.items() if name not in (_JUDGE, *_OF_JUDGES)}
        return {**values, "hf_overrides": rest, "pooler_config": {**pooler, **words}}

    @field_validator("max_model_len", mode="before")
    @classmethod
    def _read_length(cls, value: Any) -> Any:
        """Read `auto` as -1, its other name in vLLM."""
        return FITTING if value == "auto" else value

    @field_validator("max_model_len")
    @classmethod
    def _check_length(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be a number of tokens, or auto")
        return value

    @field_validator("hf_overrides")
    @classmethod
    def _check_overrides(cls, overrides: dict[str, Any]) -> dict[str, Any]:
        check_overrides(overrides)
        return overrides

    @property
    def asked_length(self) -> int | None:
        """The longest request that is asked for; None: the model's own, or what of that fits the KV pages."""
        return None if self.max_model_len == FITTING else self.max_model_len

    @property
    def name(self) -> str:
        """The name by which clients ask for the model."""
        return self.served_name or model_name(self.path)

    def folder(self, *, needs_weights: bool = True) -> Path:
        """Return the directory of the model's files, as `ModelSpec.folder` does."""
        return ModelSpec(self.path, hf_overrides=self.hf_overrides).folder(needs_weights=needs_weights)


class PoolConfig(BaseModel):
    """Replicas of one kind.

    With a `prefill` and a `decode` pool, prompts are computed in one pool. Their KV pages are transferred to the other
    pool, which generates. A mixed replica does both in the same steps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("mixed", pattern=r"^[a-z][a-z0-9-]*$", description="Name of the Serve deployment.")
    role: Role = Field("mixed", description="mixed, prefill or decode; by default its name if that is one of them.")
    replicas: int = Field(
        1,
        ge=0,
        description="Number of replicas; the minimum, if max_replicas is set; 0: the first request starts one.",
    )
    max_replicas: int | None = Field(None, ge=1, description="Number that the pool may grow to; null: none.")
    num_cpus: int = Field(0, ge=0, description="Cores of each rank; 0 reserves none and uses all.")
    num_gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs of each rank; 0.5 where two replicas of one rank share a GPU; 0 runs on CPUs; null: 1 where "
        "Ray finds GPUs, else 0.",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks that divide every layer of a replica.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Consecutive stages of layers that a replica is cut into.")
    enable_expert_parallel: bool | None = Field(
        None,
        description="Whole experts on each of the ranks that divide a layer, in place of a slice of every expert; "
        "null: whole with enable_eplb, else what takes less time.",
    )
    enable_eplb: bool = Field(
        False, description="Move whole experts between ranks by counted rows, and copy hot ones (eplb_config)."
    )
    eplb_config: EplbConfig = Field(
        default_factory=lambda: EplbConfig.model_validate({}),
        description="How many copies experts have and when they move, as JSON with vLLM's names.",
    )
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "STRICT_PACK", description="How a replica's ranks share nodes: a strategy of Ray's placement groups."
    )
    rank_timeout_s: float = Field(
        60.0, gt=0, description="A rank that does not answer for so long during a step counts as hung."
    )
    node_labels: dict[str, str] = Field(
        default_factory=dict, description="Ray labels of the nodes it may run on: {ray.io/accelerator-type: H100}."
    )
    dtype: Dtype | None = Field(None, description="For devices that need another dtype; null is the model's.")
    checkpoint: str | None = Field(
        None,
        json_schema_extra={"format": "model"},
        description="Directory or hub name of the same model in another weight format; null is model.path.",
    )
    engine: EngineConfig | None = Field(None, description="Engine settings that differ from the cluster's.")
    emulated: str | None = Field(
        None,
        json_schema_extra={"format": "profile"},
        description="Profile whose seconds the replicas take instead of computing: a preset of crossdock simulate, a "
        "JSON file, or a GPU, `h100-tp2`, for the served model; `h100-8b*4` four times as slowly; null: they compute.",
    )

    @property
    def moving_experts(self) -> EplbConfig | None:
        """How whole experts move between ranks; None: they stay, or there are none."""
        return self.eplb_config if self.enable_eplb and self.has_whole_experts else None

    @property
    def has_whole_experts(self) -> bool | None:
        """Whether ranks are asked for whole experts; None: each replica chooses by predicted seconds."""
        return True if self.enable_expert_parallel is None and self.enable_eplb else self.enable_expert_parallel

    @property
    def most(self) -> int:
        """The number of replicas that the pool may grow to."""
        return self.max_replicas or self.replicas

    @property
    def devices(self) -> dict[str, float]:
        """The devices that a replica reserves, by Ray's names."""
        each = dict(zip(DEVICES, (float(self.num_cpus), self.num_gpus or 0.0), strict=True))
        return {name: number * self.num_ranks for name, number in each.items()}

    @property
    def num_ranks(self) -> int:
        """The number of ranks in each replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.name in ("ingress", "scaler"):
            raise ValueError(f"name {self.name!r} is another deployment's; choose another")
        return self

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.most == 0:
            raise ValueError("replicas (0) needs max_replicas, the number that requests may start")
        if self.most < self.replicas:
            raise ValueError(f"max_replicas ({self.most}) must be at least replicas ({self.replicas})")
        return self

    @model_validator(mode="after")
    def _check_num_gpus(self) -> Self:
        if self.num_gpus is None or self.num_gpus in (0, 1) or (self.num_gpus < 1 and self.num_ranks == 1):
            return self
        if self.num_gpus > 1:
            raise ValueError(
                f"num_gpus ({self.num_gpus:g}) is of each rank, which uses one GPU; tensor_parallel_size uses more"
            )
        raise ValueError(
            f"num_gpus ({self.num_gpus:g}) must be 1 or 0 where a replica has several ranks, here {self.num_ranks}: "
            f"two ranks cannot communicate on one GPU"
        )

    @model_validator(mode="after")
    def _check_emulated(self) -> Self:
        """Refuse settings that an emulated device would ignore."""
        if self.emulated is None:
            return self
        given = [
            *(["tensor_parallel_size or pipeline_parallel_size"] if self.num_ranks > 1 else []),
            *(["num_gpus"] if self.num_gpus else []),
            *(["enable_expert_parallel"] if self.enable_expert_parallel else []),
            *(["enable_eplb"] if self.enable_eplb else []),
            *[name for name in ("dtype", "checkpoint") if getattr(self, name) is not None],
        ]
        if given:
            raise ValueError(f"{', '.join(given)}: of an emulated device the profile says all this; leave it out")
        return self

    @property
    def device(self) -> Device | None:
        """The device of every rank; None: the one that torch finds."""
        if self.num_gpus is None:
            return None
        return "cuda" if self.num_gpus else "cpu"

    @model_validator(mode="before")
    @classmethod
    def _derive_role_from_name(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not isinstance(name := data.get("name", "mixed"), str):
            return data
        if data.get("role", name) == "encode":
            raise ValueError(NO_ENCODE_POOLS)
        if "role" in data or "name" not in data:
            return data
        roles = [role for role in get_args(Role) if role != "mixed"]
        if name in roles:
            return {"role": name, **data}
        if meant := get_close_matches(name.partition("-")[0], roles, 1, 0.82):  # "code" is no "decode"
            raise ValueError(
                f"name {name!r} gives no role: write {meant[0]!r}, or set the role of this pool, for example "
                f"--set pools.{name}.role={meant[0]}"
            )
        return data


class ApplicationConfig(BaseModel):
    """The Serve application: what tells it from other applications of a Ray cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        "crossdock",
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Name of the Serve application; no other application of the Ray cluster has it.",
    )
    route_prefix: str = Field(
        "/",
        pattern=r"^(/|(/[A-Za-z0-9._~-]+)+)$",
        description="Path below which the API answers: /llm gives /llm/v1. No other application of the Ray cluster has "
        "it.",
    )
    room_timeout_s: float = Field(
        900.0,
        ge=0,
        description="Seconds that crossdock serve waits for machines on which its replicas find room, before it ends.",
    )

    @property
    def path(self) -> str:
        """The route prefix as the beginning of a path: empty for `/`."""
        return "" if self.route_prefix == "/" else self.route_prefix


class ServedModel(BaseModel):
    """One of several models: the sections of a file that serves it alone, with what differs from the others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        pattern=r"^[a-z][a-z0-9-]*$",
        description="Clients' name, unless model.served_name is another; the names of its deployments begin with it.",
    )
    model: ModelConfig = Field(default_factory=lambda: ModelConfig.model_validate({}))
    engine: EngineConfig | None = Field(None, description="Engine settings that differ from the cluster's.")
    pools: tuple[PoolConfig, ...] = (PoolConfig.model_validate({}),)
    http: ModelHttpConfig | None = Field(None, description="Settings of http that are of a model, where they differ.")


class ClusterConfig(BaseModel):
    """The root of the tree: every setting of a cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)  # API keys are in it

    model: ModelConfig = Field(default_factory=lambda: ModelConfig.model_validate({}))
    engine: EngineConfig = Field(default_factory=lambda: EngineConfig.model_validate({}))
    pools: tuple[PoolConfig, ...] = (PoolConfig.model_validate({}),)
    models: tuple[ServedModel, ...] = Field((), description="Several models, in place of model and pools.")
    router: RouterConfig = Field(default_factory=lambda: RouterConfig.model_validate({}))
    scaling: ScalingConfig = Field(default_factory=lambda: ScalingConfig.model_validate({}))
    transfer: TransferConfig = Field(default_factory=lambda: TransferConfig.model_validate({}))
    http: HttpConfig = Field(default_factory=lambda: HttpConfig.model_validate({}))
    application: ApplicationConfig = Field(default_factory=lambda: ApplicationConfig.model_validate({}))

    _num_other_ranks: int = PrivateAttr(0)  # of other models on the same machine

    @property
    def each_model(self) -> tuple[Self, ...]:
        """The configuration of each model alone. Where there are several, names of pools begin with the model's."""
        if not self.models:
            return (self,)
        alone = [self._alone(member) for member in self.models]
        for each in alone:
            each._num_other_ranks = sum(other._num_ranks for other in alone if other is not each)
        return tuple(alone)

    def _alone(self, member: ServedModel) -> Self:
        served = member.model.model_copy(update={"served_name": member.model.served_name or member.name})
        pools = [pool.model_copy(update={"name": f"{member.name}-{pool.name}"}) for pool in member.pools]
        own = {} if member.http is None else {name: getattr(member.http, name) for name in ModelHttpConfig.model_fields}
        parts = {name: getattr(self, name) for name in ("router", "scaling", "transfer", "application")}
        http = self.http.model_copy(update=own)
        engine = member.engine or self.engine
        try:
            return self.model_validate({"model": served, "pools": pools, "engine": engine, "http": http, **parts})
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"models: {member.name!r}: {reason}") from None

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which clients ask for the model and its configured adapters."""
        return (self.model.name, *self.http.model_aliases, *self.model.lora_modules)

    @property
    def is_elastic(self) -> bool:
        """Whether the scaler may change sizes of pools or roles of replicas."""
        pools = [pool for each in self.each_model for pool in each.pools]
        return self.scaling.flip_roles or any(pool.most > pool.replicas for pool in pools)

    @property
    def starts_on_request(self) -> bool:
        """Whether the model may be without replicas until a request comes."""
        return all(pool.replicas == 0 for pool in self.pools)

    @property
    def _num_ranks(self) -> int:
        return sum(pool.most * pool.num_ranks for pool in self.pools)

    @property
    def is_emulated(self) -> bool:
        """Whether replicas take the seconds of profiles instead of computing."""
        return any(pool.emulated is not None for pool in self.pools)

    def with_slow_promises(self) -> Self:
        """Multiply the SLO targets of all classes by the slowdown N of `emulated:PROFILE*N`."""
        scale = max(time_scale(pool.emulated or "") for pool in self.pools)
        if scale == 1:
            return self

        def slow(engine: EngineConfig) -> EngineConfig:
            seconds = ({"ttft_s": slo.ttft_s * scale, "tpot_s": slo.tpot_s * scale} for slo in engine.slo_classes)
            classes = (slo.model_copy(update=each) for slo, each in zip(engine.slo_classes, seconds, strict=True))
            return engine.model_copy(update={"slo_classes": tuple(classes)})

        pools = [pool.model_copy(update={"engine": pool.engine and slow(pool.engine)}) for pool in self.pools]
        return self.model_copy(update={"engine": slow(self.engine), "pools": tuple(pools)})

    @property
    def enables_lora(self) -> bool:
        """Whether replicas take adapters: all of them that make tokens, or none."""
        return (self.pools[0].engine or self.engine).enable_lora

    def emulated_device(self, pool: PoolConfig) -> EmulatedDevice | None:
        """Return the device that a pool emulates, as `emulated_device` does; None: it emulates none."""
        if pool.emulated is None:
            return None
        model = self.model.path
        if self.model.hf_overrides:  # a directory is a name of a model, too
            model = str(self.model.folder(needs_weights=False))
        return emulated_device(pool.emulated, model, (pool.engine or self.engine).quantization)

    @property
    def _has_holders(self) -> bool:
        """Return whether a prefix may be at another replica than the one that computes the rest."""
        return sum(each.most for each in self.pools) > 1

    def replica_spec(self, pool: PoolConfig) -> ReplicaSpec:
        """Return the spec with which each replica of `pool` is started."""
        engine = pool.engine or self.engine
        model = self.model
        num_ranks = self._num_ranks + self._num_other_ranks
        return ReplicaSpec(
            model=engine.model_spec(
                pool.checkpoint or model.path, pool.dtype or model.dtype, model.max_model_len, model.hf_overrides
            ),
            engine=engine,
            tokenizer=model.tokenizer or (pool.checkpoint and (model.path or "default")),
            num_threads=pool.num_cpus or max((os.cpu_count() or 1) // num_ranks, 1),
            role=pool.role,
            transfer=self.transfer if self._has_holders else None,
            mixes_weights=self.router.unlike_weights == "mixed",
            tensor_parallel_size=pool.tensor_parallel_size,
            pipeline_parallel_size=pool.pipeline_parallel_size,
            enable_expert_parallel=pool.has_whole_experts,
            eplb=pool.moving_experts,
            rank_timeout_s=pool.rank_timeout_s,
            emulated=self.emulated_device(pool),
            lora_modules=model.lora_modules,
            device=pool.device,
        )

    @model_validator(mode="before")
    @classmethod
    def _inherit_engine(cls, data: Any) -> Any:
        """Complete the `engine` of each model and each pool, and `http` of a model: they name only what differs."""
        if not isinstance(data, Mapping):
            return data
        data = _with_outer(data, ("models",), "http", ModelHttpConfig.model_fields.keys() - {"model_aliases"})
        data = _with_outer(data, ("models", "pools"), "engine")
        models = data.get("models")
        if isinstance(models, list | tuple):
            engine = {"engine": data.get("engine")}
            whole = [{**engine, **each} if isinstance(each, Mapping) else each for each in models]
            data = {**data, "models": [_with_outer(each, ("pools",), "engine") for each in whole]}
        return data

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        """Refuse models that cannot be told apart, and settings of a model at a place where no model has them."""
        if not self.models:
            return self
        names = [name for each in self.each_model for name in each.names]
        own = [member.name for member in self.models]
        if twice := [name for name in names if names.count(name) > 1] + [name for name in own if own.count(name) > 1]:
            raise ValueError(f"models: {twice[0]!r} names two of them; each needs names of its own")
        deployments = [pool.name for each in self.each_model for pool in each.pools]
        if twice := [name for name in deployments if deployments.count(name) > 1]:
            raise ValueError(f"models: two pools would be deployed as {twice[0]!r} (MODEL-POOL); rename one")
        given = {"model": self.model, "pools": self.pools, "http.model_aliases": self.http.model_aliases}
        defaults = {"model": ModelConfig.model_validate({}), "pools": (PoolConfig.model_validate({}),)}
        for name, value in given.items():
            if value != defaults.get(name, ()):
                raise ValueError(f"{name}: there are several models; set models.NAME.{name} of one of them")
        if self.http.rollouts:
            raise ValueError("http.rollouts: trainers replace the weights of one model; serve it without `models`")
        classes = {tuple(slo.name for slo in each.engine.slo_classes) for each in self.each_model}
        if len(classes) > 1:
            raise ValueError("models: engine.slo_classes must have the same names in all, for keys and clients")
        return self

    @model_validator(mode="after")
    def _check_pools_work_together(self) -> Self:
        names = [pool.name for pool in self.pools]
        if not names:
            raise ValueError("pools: at least one is needed")
        if len({pool.replicas > 0 for pool in self.pools}) > 1:
            raise ValueError("pools: replicas is 0 in all or in none, as a request starts all that it needs")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"pools: two are named {name!r}; give each its own name")
        roles = {pool.role for pool in self.pools}
        if roles in ({"prefill"}, {"decode"}):
            raise ValueError(f"pools: all have the role {roles.pop()!r}; give one of them the other, or 'mixed'")
        sizes = {(pool.engine or self.engine).page_size for pool in self.pools}
        if "prefill" in roles and len(sizes) > 1:
            raise ValueError(f"pools: page_size must be the same in all, to ship pages; there are {sorted(sizes)}")
        return self

    @model_validator(mode="after")
    def _check_pairs_have_equal_weights(self) -> Self:
        """Refuse prefill and decode pools that would exchange nothing, as their weights are unlike."""
        weights = {
            pool.name: (pool.checkpoint or self.model.path, (pool.engine or self.engine).rounds_to)
            for pool in self.pools
        }
        partner = {"prefill": "decode", "decode": "prefill"}
        for pool in self.pools:
            others = [each for each in self.pools if each.role in (partner.get(pool.role), "mixed")]
            if pool.role not in partner or self.router.unlike_weights == "mixed":
                continue
            if all(weights[pool.name] != weights[each.name] for each in others):
                raise ValueError(
                    f"pools: {pool.name!r} has other weights than all pools that it could exchange pages with; give "
                    f"them the same checkpoint and engine.quantization, or set router.unlike_weights: mixed, which "
                    f"computes prompts with one format and outputs with the other"
                )
        return self

    @model_validator(mode="after")
    def _check_emulated_pools(self) -> Self:
        """Refuse what no emulated device does, and a fleet of which only a part is emulated."""
        if not self.is_emulated:
            return self
        if missing := [pool.name for pool in self.pools if pool.emulated is None]:
            raise ValueError(f"pools: set `emulated` for all pools or for none; these lack it: {', '.join(missing)}")
        for pool in self.pools:
            if not is_gpu(pool.emulated or ""):  # else the model is read before a start
                emulated_device(pool.emulated or "")  # raises where there is no such profile
        if len({time_scale(pool.emulated or "") for pool in self.pools}) > 1:
            raise ValueError("pools: emulated must have the same *N in all: promises are slowed alike")
        if self.model.dtype != "auto":
            raise ValueError(
                f"model.dtype: an emulated device has no use for it, here {self.model.dtype}; leave it out"
            )
        for pool in self.pools:
            for name, default in _COMPUTING.items():
                found = getattr(pool.engine or self.engine, name)
                is_priced = name == "quantization" and found == "fp8" and is_gpu(pool.emulated or "")
                if found != default and not is_priced:
                    raise ValueError(f"engine.{name}: an emulated device has no use for it; leave it out")
        return self

    @model_validator(mode="after")
    def _check_pools_share_classes(self) -> Self:
        """Require the same SLO classes everywhere: a request has its class before it has a replica."""
        shared = (self.engine.slo_classes, self.engine.default_slo_class)
        for pool in self.pools:
            if pool.engine is not None and (pool.engine.slo_classes, pool.engine.default_slo_class) != shared:
                raise ValueError(
                    f"pools: {pool.name!r} must have the classes of all, engine.slo_classes and "
                    f"engine.default_slo_class; leave both out of its engine"
                )
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        engines = [pool.engine or self.engine for pool in self.pools]
        if len({(engine.enable_lora, engine.max_lora_rank) for engine in engines}) > 1:
            raise ValueError("pools: enable_lora and max_lora_rank must be the same in all: any may get a request")
        if self.is_emulated and self.enables_lora:
            raise ValueError("enable_lora: an emulated device computes no adapters; leave it out, or simulate them")
        if (self.model.lora_modules or self.http.lora_folder) and not self.enables_lora:
            name = "model.lora_modules" if self.model.lora_modules else "http.lora_folder"
            raise ValueError(f"{name} needs engine.enable_lora: true (--enable-lora)")
        if taken := {self.model.name, *self.http.model_aliases} & self.model.lora_modules.keys():
            raise ValueError(f"model.lora_modules: {taken.pop()!r} is a name of the base model; choose another")
        return self

    @model_validator(mode="after")
    def _check_kv_events(self) -> Self:
        """Refuse an address that only one replica can use, where there may be several."""
        for pool in self.pools:
            events = (pool.engine or self.engine).kv_events
            if events is not None and not events.fits_replicas and sum(each.most for each in self.pools) > 1:
                raise ValueError(
                    f"engine.kv_events_config: endpoint {events.endpoint} and replay_endpoint {events.replay_endpoint} "
                    f"are of one replica, and there may be several; give addresses such as tcp://*:5557"
                )
        return self

    @model_validator(mode="after")
    def _check_api_keys(self) -> Self:
        check_keys(self.http.api_keys, [slo.name for slo in self.engine.slo_classes], "http.api_keys")
        if self.http.has_weights and self.engine.prefill_order == "fcfs":
            reason = (
                "tenants have no shares where prompts are computed in order of arrival (engine.prefill_order: fcfs)"
            )
            raise ValueError(f"http.tenant_weights, and weight in http.api_keys: {reason}; give shortest_remaining")
        return self


_COMPUTING = {  # settings of engines that change how a model computes or where its pages are, with their defaults
    "speculative_config": None,
    "kv_cache_host_memory": None,
    "kv_cache_files": None,
    "kv_cache_dtype": "auto",
    "attention_backend": "auto",
    "cpu_kernels": "auto",
    "quantization": None,
    "load_format": "auto",
}


@lru_cache
def emulated_device(emulated: str, model: str | None = None, quantization: str | None = None) -> EmulatedDevice:
    """Return the device of `PROFILE` or `PROFILE*N`, or of `GPU` for `model`, the name of the served model, whose
    weights are what `quantization` says.

    Raises:
        ValueError: there is no such profile, or it cannot be read.
    """
    try:
        if not is_gpu(emulated):
            return EmulatedDevice(emulated, stored_profile(emulated))
        profile = estimate(emulated.partition("*")[0], ModelSpec(model).folder(needs_weights=False), quantization)
        scale = time_scale(emulated)
        return EmulatedDevice(emulated, profile if scale == 1 else profile.slowed(scale))
    except ValueError as error:
        raise ValueError(f"emulated: {error}") from None


def field_at(path: Sequence[int | str]) -> FieldInfo | None:
    """Return the field at a path of names below the root; None: there is none.

    Positions in lists and `*` are skipped: ("pools", 0, "replicas") and ("pools", "*", "replicas") are the same.
    """
    names = _names(path)
    model = model_at(names[:-1])
    return model.model_fields.get(names[-1]) if model is not None and names else None


def model_at(path: Sequence[int | str]) -> type[BaseModel] | None:
    """Return the model that holds the fields below a path of names; None: there are no fields below it."""
    model: type[BaseModel] | None = ClusterConfig
    for name in _names(path):
        if model is None or name not in model.model_fields:
            return None
        model = _model_in(model.model_fields[name].annotation)
    return model


def _names(path: Sequence[int | str]) -> list[str]:
    return [part for part in path if isinstance(part, str) and part != "*"]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside `Model`, `Model | None` or `tuple[Model, ...]`; None: there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (typing.Union, types.UnionType, tuple):
        return next((model for inner in get_args(annotation) if (model := _model_in(inner))), None)
    return None


def _with_outer(data: Any, lists: Sequence[str], section: str, inherited: Collection[str] | None = None) -> Any:
    """Return the data whose members of `lists` have, in a section that they name, the outer settings too.

    `inherited`: the settings that members take over; None: all.
    """
    if not isinstance(data, Mapping) or not isinstance(outer := data.get(section), Mapping):
        return data
    outer = {name: value for name, value in outer.items() if inherited is None or name in inherited}

    def complete(member: Any) -> Any:
        if isinstance(member, Mapping) and isinstance(member.get(section), Mapping):
            return {**member, section: {**outer, **member[section]}}
        return member

    found = {name: data[name] for name in lists if isinstance(data.get(name), list | tuple)}
    return {**data, **{name: [complete(member) for member in members] for name, members in found.items()}}
