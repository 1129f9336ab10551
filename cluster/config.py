"""The configuration: one frozen tree, from a YAML file and overrides. Nothing reads the environment after it."""

import copy
import difflib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from crossdock.cluster.api.http_config import HttpConfig
from crossdock.cluster.api.keys import check_keys
from crossdock.cluster.deploy.nodes import DeployConfig
from crossdock.router.fleet import RouterConfig
from crossdock.router.scaling import ScalingConfig
from crossdock.workers.model.checkpoint import model_name
from crossdock.workers.replica.config import EngineConfig, TransferConfig
from crossdock.workers.report.profile import Role

Dtype: TypeAlias = Literal["auto", "bfloat16", "float16", "float32"]


class ConfigError(ValueError):
    """The configuration cannot be used. The message has one line per problem: where, what, and what is accepted."""


class ModelConfig(BaseModel):
    """What is served."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str | None = Field(
        None, description="Directory, or hub name (org/name or org/name@revision); null is the embedded SmolLM2-135M."
    )
    served_name: str | None = Field(None, min_length=1, description="Clients' name of the model; null derives it.")
    dtype: Dtype = Field("auto", description="Of weights, activations and mostly KV pages; auto is the checkpoint's.")
    max_model_len: int | None = Field(
        None, ge=1, description="Prompt and output together, in tokens; null is the model's own limit."
    )

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_name or model_name(self.path)


class PoolConfig(BaseModel):
    """Replicas of one kind. With a `prefill` and a `decode` pool, prompts are computed in one and their KV pages
    shipped to the other, which generates; a mixed replica does both in the same steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("mixed", pattern=r"^[a-z][a-z0-9-]*$", description="Name of the Serve deployment.")
    role: Role = Field("mixed", description="mixed, prefill or decode; a pool named prefill or decode has that role.")
    replicas: int = Field(1, ge=1, description="How many to run; with max_replicas, at least.")
    max_replicas: int | None = Field(None, ge=1, description="How many the pool may grow to; null: it does not.")
    num_cpus: int = Field(0, ge=0, description="Cores of each rank; 0 reserves none and uses all.")
    num_gpus: float = Field(0, ge=0, description="GPUs of each rank.")
    tensor_parallel_size: int = Field(1, ge=1, description="Ranks that divide every layer of a replica.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Stages of layers of a replica, one after the other.")
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "STRICT_PACK", description="Of a replica's ranks on nodes, as Ray's placement groups have it."
    )
    rank_timeout_s: float = Field(60.0, gt=0, description="A rank that is silent for so long during a step is hung.")
    node_labels: dict[str, str] = Field(
        default_factory=dict, description="Ray labels of the nodes it may run on: {ray.io/accelerator-type: H100}."
    )
    dtype: Dtype | None = Field(None, description="Where its devices need another than the model's; null is that.")
    engine: EngineConfig | None = Field(None, description="What differs from the cluster's engine settings.")

    @property
    def most(self) -> int:
        """Replicas, when it has grown to its bound."""
        return self.max_replicas or self.replicas

    @property
    def num_ranks(self) -> int:
        """Of each replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="after")
    def _leaves_others_their_names(self) -> Self:
        if self.name in ("ingress", "scaler"):
            raise ValueError(f"name {self.name!r} is another deployment's; choose another")
        return self

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.most < self.replicas:
            raise ValueError(f"max_replicas ({self.most}) must be at least replicas ({self.replicas})")
        return self

    @model_validator(mode="before")
    @classmethod
    def _name_says_the_role(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("name") in ("prefill", "decode"):
            return {"role": data["name"], **data}
        return data


class ClusterConfig(BaseModel):
    """All of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)  # API keys are in it

    model: ModelConfig = Field(default_factory=lambda: ModelConfig.model_validate({}))
    engine: EngineConfig = Field(default_factory=lambda: EngineConfig.model_validate({}))
    pools: tuple[PoolConfig, ...] = (PoolConfig.model_validate({}),)
    router: RouterConfig = Field(default_factory=lambda: RouterConfig.model_validate({}))
    scaling: ScalingConfig = Field(default_factory=lambda: ScalingConfig.model_validate({}))
    transfer: TransferConfig = Field(default_factory=lambda: TransferConfig.model_validate({}))
    http: HttpConfig = Field(default_factory=lambda: HttpConfig.model_validate({}))
    deploy: DeployConfig = Field(
        default_factory=lambda: DeployConfig.model_validate({}), description="For `crossdock deploy render` alone."
    )

    @property
    def is_elastic(self) -> bool:
        """Whether sizes or roles may change by themselves."""
        return self.scaling.flip_roles or any(pool.most > pool.replicas for pool in self.pools)

    @model_validator(mode="before")
    @classmethod
    def _pools_inherit_the_engine(cls, data: Any) -> Any:
        """A pool's `engine` names only what differs."""
        if not isinstance(data, Mapping):
            return data
        engine, pools = data.get("engine"), data.get("pools")
        if not isinstance(engine, Mapping) or not isinstance(pools, list | tuple):
            return data
        return {**data, "pools": [_inherit(pool, engine) for pool in pools]}

    @model_validator(mode="after")
    def _pools_can_be_told_apart(self) -> Self:
        names = [pool.name for pool in self.pools]
        if not names:
            raise ValueError("pools: at least one is needed")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"pools: two are named {name!r}; give each its own name")
        roles = {pool.role for pool in self.pools}
        if roles == {"prefill"} or roles == {"decode"}:
            raise ValueError(f"pools: all have the role {roles.pop()!r}; give one of them the other, or 'mixed'")
        sizes = {(pool.engine or self.engine).page_size for pool in self.pools}
        if "prefill" in roles and len(sizes) > 1:
            raise ValueError(f"pools: page_size must be the same in all, to ship pages; there are {sorted(sizes)}")
        return self

    @model_validator(mode="after")
    def _nodes_are_of_pools(self) -> Self:
        names = [pool.name for pool in self.pools]
        for node in self.deploy.nodes:
            if node.pool not in names:
                raise ValueError(f"deploy.nodes: there is no pool {node.pool!r}; there are {', '.join(names)}")
            asked = next(pool for pool in self.pools if pool.name == node.pool)
            for what, has, wants in (("gpus", node.gpus, asked.num_gpus), ("cpus", node.cpus, asked.num_cpus)):
                if wants > has:
                    raise ValueError(
                        f"deploy.nodes: those of pool {node.pool!r} have {what}: {has}; one of its replicas needs "
                        f"{wants:g} (pools.{node.pool}.num_{what})"
                    )
        return self

    @model_validator(mode="after")
    def _classes_are_the_same_everywhere(self) -> Self:
        """A request has its class before it has a replica."""
        wanted = (self.engine.slo_classes, self.engine.default_slo_class)
        for pool in self.pools:
            if pool.engine is not None and (pool.engine.slo_classes, pool.engine.default_slo_class) != wanted:
                raise ValueError(
                    f"pools: {pool.name!r} must have the classes of all, engine.slo_classes and "
                    f"engine.default_slo_class; leave both out of its engine"
                )
        return self

    @model_validator(mode="after")
    def _keys_differ_and_name_classes_that_exist(self) -> Self:
        check_keys(self.http.api_keys, [slo.name for slo in self.engine.slo_classes], "http.api_keys")
        return self


def load(path: Path | None = None, overrides: Mapping[str, object] | None = None) -> ClusterConfig:
    """Reads `path` (YAML; None: all defaults), then applies `overrides`, by dotted name: {"engine.max_num_seqs": 8}.

    A member of a list is named by its position or its `name`, all of them by `*`: "pools.mixed.replicas". ConfigError
    says what is wrong.
    """
    data = {} if path is None else _read(path)
    for key, value in (overrides or {}).items():
        _set(data, key, copy.deepcopy(value))
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        source = f"{path}: " if path else ""
        problems = [
            source + _explain(tuple(detail["loc"]), detail["type"], detail["msg"], detail["input"])
            for detail in error.errors(include_url=False)
        ]
        raise ConfigError("\n".join(problems)) from None


def to_yaml(config: ClusterConfig) -> str:
    """The whole tree, each setting with its description, readable by `load`. Secrets are hidden."""
    return "\n".join(_lines(config, "")) + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a mapping is expected ({', '.join(ClusterConfig.model_fields)}), not {data!r}")
    return data


def _inherit(pool: Any, engine: Mapping[str, Any]) -> Any:
    if isinstance(pool, Mapping) and isinstance(pool.get("engine"), Mapping):
        return {**pool, "engine": {**engine, **pool["engine"]}}
    return pool


def _set(data: dict[str, Any], key: str, value: object) -> None:
    """Sets `key` in the nested mapping, making the mappings on the way."""
    parts = key.split(".")
    if parts[0] == "pools" and len(parts) > 1 and "pools" not in data:
        data["pools"] = [{"name": "mixed"}]
    here: Any = data
    for depth, part in enumerate(parts[:-1]):
        if isinstance(here, list) and part == "*":
            for number in range(len(here)):
                _set(data, ".".join([*parts[:depth], str(number), *parts[depth + 1 :]]), value)
            return
        if isinstance(here, list):
            here = _member(here, part, key)
        else:
            if here.get(part) is None:
                here[part] = {}
            here = here[part]
        if not isinstance(here, dict | list):
            raise ConfigError(f"{key}: {'.'.join(parts[: depth + 1])} is {here!r}, which has no parts")
    if isinstance(here, list):
        raise ConfigError(f"{key}: names a whole member of a list; set its fields one by one")
    here[parts[-1]] = value


def _member(members: list[Any], part: str, key: str) -> Any:
    names = [member.get("name") for member in members if isinstance(member, dict)]
    if part.isdigit() and int(part) < len(members):
        return members[int(part)]
    if part in names:
        return members[names.index(part)]
    raise ConfigError(f"{key}: no member {part!r} here; there are {', '.join(str(name) for name in names)}")


def _explain(loc: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    where = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden":
        return f"{where}: no such setting{_suggestion(loc)}"
    if kind == "value_error":  # a rule of ours, which names the fields it is about
        message = message.removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    message = message.replace("Input should", "must", 1)
    message = message[:1].lower() + message[1:]
    return f"{where}: {message}" if _is_secret(loc) else f"{where}: {message}, not {value!r}"


def _suggestion(loc: tuple[int | str, ...]) -> str:
    fields = _fields_at(loc[:-1])
    name = str(loc[-1]).replace("-", "_")
    if close := difflib.get_close_matches(name, fields, n=1):
        return f"; did you mean {close[0]}?"
    for section, field in ClusterConfig.model_fields.items():  # the right name at the wrong place
        if name in getattr(_model_of(field.annotation), "model_fields", {}):
            return f"; did you mean {section}{'.NAME' if section == 'pools' else ''}.{name}?"
    return f"; there are {', '.join(fields)}"


def _fields_at(loc: tuple[int | str, ...]) -> list[str]:
    model: Any = ClusterConfig
    for part in loc:
        if isinstance(part, str):
            model = _model_of(model.model_fields[part].annotation)
    return list(model.model_fields)


def _is_secret(loc: tuple[int | str, ...]) -> bool:
    """Fields that do not appear in a repr do not appear in messages either."""
    names = [part for part in loc if isinstance(part, str)]
    model: Any = ClusterConfig
    for name in names:
        field = getattr(model, "model_fields", {}).get(name)
        if field is None:
            return False
        if not field.repr:
            return True
        model = _model_of(field.annotation)
    return False


def _model_of(annotation: Any) -> Any:
    """The pydantic model inside `Model`, `Model | None` or `tuple[Model, ...]`; None where there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (typing.Union, types.UnionType, tuple):
        return next((model for inner in get_args(annotation) if (model := _model_of(inner))), None)
    return None


def _lines(model: BaseModel, indent: str) -> list[str]:
    lines = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        comment = f"  # {field.description}" if field.description else ""
        if not field.repr and value:
            lines.append(f"{indent}{name}: [<hidden>]{comment}")
        elif isinstance(value, BaseModel):
            lines += [f"{indent}{name}:{comment}", *_lines(value, indent + "  ")]
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            lines.append(f"{indent}{name}:{comment}")
            for member in cast(tuple[BaseModel, ...], value):
                first, *rest = _lines(member, indent + "    ")
                lines += [f"{indent}  - {first.lstrip()}", *rest]
        else:
            plain = model.model_dump(mode="json", include={name})[name]
            text = yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
            lines.append(f"{indent}{name}: {text}{comment}")
    return lines
