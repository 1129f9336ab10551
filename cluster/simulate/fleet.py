"""The simulated cluster: pools of replicas, each with a profile, the network between them, and failures."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from zlib import crc32

from pydantic import BaseModel, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from crossdock.cluster.yaml_text import read_yaml
from crossdock.router.fleet import RouterConfig
from crossdock.router.scaling import ScalingConfig
from crossdock.workers.replica.tiers.tier_store import HOST_RATE
from crossdock.workers.report.presets import stored_profile
from crossdock.workers.report.profile import NO_ENCODE_POOLS, Role, SchedulingProfile, TierSize
from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.request.slo import SloClass
from crossdock.workers.schedule.request.submission import Adapter


class SimulatedPool(BaseModel):
    """Replicas of one kind, named NAME/0, NAME/1, …"""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$", description="Name of the pool.")
    role: Role = Field(
        "mixed", description="mixed, prefill or decode; a pool named after one of the last two has that role."
    )
    model: str = Field("", description="The one of `models` that its replicas serve; empty: there is one model.")
    replicas: int = Field(1, ge=0, description="How many run from the start, and the least when the pool shrinks.")
    max_replicas: int | None = Field(None, ge=1, description="Number that the pool may grow to; null: none.")
    profile: SchedulingProfile = Field(
        description="A preset, such as h100-8b, a GPU and a model's directory, h100:DIRECTORY, a JSON file of "
        "`crossdock tune`, or a server's URL."
    )
    engine: SchedulerConfig = Field(
        description="Settings that differ from the profile, or are not in it, e.g. prefill_order."
    )
    enable_prefix_caching: bool = Field(True, description="Share pages between requests with equal beginnings.")
    kv_cache_host_memory: ByteSize | None = Field(
        None, description="Memory of the host for pages that leave the pool, e.g. 64GiB; null: as in the profile."
    )
    speculative_config: SpeculativeConfig | None = Field(None, description="As of a server; null: no drafts.")
    draft_acceptance: float = Field(
        0.5, ge=0, le=1, description="Probability that a draft is accepted if all before it are; drawn by seed."
    )
    price: float = Field(0.0, ge=0, description="Price of a replica for an hour, in any currency.")

    @property
    def most(self) -> int:
        """The number of replicas that the pool may grow to."""
        return self.max_replicas or self.replicas

    @property
    def gpus(self) -> int:
        """The GPUs of a replica: one for each rank."""
        return self.profile.tensor_parallel_size * self.profile.pipeline_parallel_size

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.most < self.replicas:
            raise ValueError(f"max_replicas ({self.most}) must be at least replicas ({self.replicas})")
        return self

    @model_validator(mode="before")
    @classmethod
    def _profile_and_engine_agree(cls, data: Any) -> Any:
        """Give the engine the settings of the profile, unless they are set here; then give those to the profile too."""
        if not isinstance(data, Mapping) or not isinstance(data.get("profile"), SchedulingProfile):
            return data
        profile: SchedulingProfile = data["profile"]
        shared = profile.model_dump(include=set(SchedulerConfig.model_fields) & set(SchedulingProfile.model_fields))
        given = data.get("engine") or {}
        if given.get("page_size", profile.page_size) != profile.page_size:
            raise ValueError(f"engine.page_size is the profile's, {profile.page_size}; leave it out")
        engine = SchedulerConfig.model_validate({**_default_class(profile), **shared, **given})
        named = data.get("name") if data.get("name") in ("prefill", "decode") else profile.role
        role = data.get("role", named)
        agreed = {name: getattr(engine, name) for name in shared} | {"role": role}
        agreed["min_chunk_tokens"] = engine.min_chunk_tokens or engine.page_size
        if (memory := data.get("kv_cache_host_memory")) is not None:
            agreed["tiers"] = _with_host_memory(profile.tiers, TypeAdapter(ByteSize).validate_python(memory))
        return {**data, "role": role, "engine": engine, "profile": profile.model_copy(update=agreed)}


def _with_host_memory(tiers: Sequence[TierSize], num_bytes: int) -> tuple[TierSize, ...]:
    """Return the tiers with so much memory of the host, at the rate of the profile."""
    rate = next((tier.bytes_per_second for tier in tiers if tier.name == "host"), HOST_RATE)
    host = TierSize(name="host", num_bytes=num_bytes, bytes_per_second=rate)
    return (host, *(tier for tier in tiers if tier.name != "host"))


def _default_class(profile: SchedulingProfile) -> dict[str, str]:
    names = [slo.name for slo in profile.slo_classes]
    default = SchedulerConfig.model_fields["default_slo_class"].default
    return {} if default in names else {"default_slo_class": names[0]}


class Failure(BaseModel):
    """A replica dies or hangs, or another one comes up."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: float = Field(ge=0, description="Seconds after the first arrival.")
    kill: str | None = Field(None, description="The replica, e.g. mixed/0.")
    hang: str | None = Field(None, description="The replica that computes and answers nothing from now on.")
    add: str | None = Field(None, description="The pool.")

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if sum(each is not None for each in (self.kill, self.hang, self.add)) != 1:
            raise ValueError("give kill or hang (a replica, e.g. mixed/0) or add (a pool), one of them")
        return self


class SimulatedAdapters(BaseModel):
    """The LoRA adapters that requests name: each request one of them, drawn evenly by its number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int = Field(0, ge=0, description="How many there are; 0: all requests are for the base model.")
    slots: int = Field(8, ge=1, description="How many a replica holds at once.")
    load_s: float = Field(0.5, ge=0, description="Seconds to load one.")
    num_weights: int = Field(0, ge=0, description="Numbers in the matrices of each.")

    def of(self, request: str) -> Adapter | None:
        """Return the adapter of a request; None: there are none."""
        if not self.count:
            return None
        name = f"{crc32(request.encode()) % self.count}"
        return Adapter(name, "", name, self.num_weights)


class SimulatedModel(BaseModel):
    """One of several models, and its part of the requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="As pools name it.")
    share: dict[float, float] = Field(
        min_length=1,
        description="Its part of the requests, from so many seconds on, beside those of other models: {0: 1, 60: 9}.",
    )

    def weight(self, now: float) -> float:
        """Return its part of the requests now."""
        begun = [at for at in self.share if at <= now]
        return self.share[max(begun)] if begun else 0.0


class SimulatedFleet(BaseModel):
    """The simulated cluster: its pools, routers and network, and its failures."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pools: tuple[SimulatedPool, ...]
    slo_classes: tuple[SloClass, ...] | None = Field(
        None, description="The promises of all pools; null: those of the profiles."
    )
    router: RouterConfig = Field(
        default_factory=lambda: RouterConfig.model_validate({}), description="How requests are placed."
    )
    scaling: ScalingConfig = Field(
        default_factory=lambda: ScalingConfig.model_validate({}),
        description="When pools grow and shrink, and replicas change roles: the settings of a server.",
    )
    start_s: float = Field(30.0, ge=0, description="Seconds until a replica that a pool grows by is up.")
    routers: int = Field(1, ge=1, description="Ingresses, each with a router of its own.")
    publish_s: float = Field(0.05, ge=0, description="Least seconds between two reports of a replica to routers.")
    latency_s: float = Field(0.001, ge=0, description="Seconds from an ingress to a replica and back.")
    noise: float = Field(0.0, ge=0, lt=1, description="Relative spread of step times around their prediction.")
    models: tuple[SimulatedModel, ...] = Field((), description="Several models, each with pools of its own.")
    gpus: int | None = Field(None, ge=1, description="GPUs that several models divide; null: as many as pools ask for.")
    failures: tuple[Failure, ...] = ()
    adapters: SimulatedAdapters = Field(
        default_factory=lambda: SimulatedAdapters.model_validate({}), description="LoRA adapters of the requests."
    )

    @model_validator(mode="before")
    @classmethod
    def _pools_share_the_classes(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not data.get("slo_classes") or not isinstance(data.get("pools"), list):
            return data
        classes = data["slo_classes"]
        return {
            **data,
            "pools": [{**pool, "engine": {**pool.get("engine", {}), "slo_classes": classes}} for pool in data["pools"]],
        }

    @model_validator(mode="after")
    def _pools_fit_together(self) -> Self:
        names = [pool.name for pool in self.pools]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"pools must have different names, one at least; they are {', '.join(names) or 'none'}")
        if {pool.model for pool in self.pools} != ({model.name for model in self.models} or {""}):
            raise ValueError("models: each must have pools, and each pool must name one of them as its model")
        for model in {pool.model for pool in self.pools}:
            if {pool.role for pool in self.pools if pool.replicas and pool.model == model} == {"prefill"}:
                raise ValueError("pools: all have the role 'prefill'; give one of them the role decode or mixed")
        if self.gpus is not None and sum(pool.gpus * pool.replicas for pool in self.pools) > self.gpus:
            raise ValueError(f"gpus: the pools have more than {self.gpus} from the start; lower their replicas")
        for field in ("page_size", "slo_classes"):
            if len({getattr(pool.engine, field) for pool in self.pools}) > 1:
                raise ValueError(f"pools: {field} must be the same in all")
        is_shipping = any(pool.role == "prefill" for pool in self.pools) or self.scaling.flip_roles
        if is_shipping and len({pool.profile.windows for pool in self.pools}) > 1:
            raise ValueError(
                "pools: the profiles have unlike groups of layers (windows), between which no pages are shipped; "
                "measure all with the same --disable-hybrid-kv-cache-manager"
            )
        for failure in self.failures:
            pool = (failure.add or failure.kill or failure.hang or "").partition("/")[0]
            if pool not in names:
                raise ValueError(f"failures: there is no pool {pool!r}; there are {', '.join(names)}")
        return self

    def model_of(self, request: str, now: float) -> str:
        """Return the model that a request is for, drawn by its number; empty: there is one."""
        weights = [model.weight(now) for model in self.models]
        drawn = crc32(b"model" + request.encode()) / 2**32 * sum(weights)
        for model, weight in zip(self.models, weights, strict=True):
            drawn -= weight
            if drawn < 0:
                return model.name
        return self.models[-1].name if self.models else ""

    @property
    def is_elastic(self) -> bool:
        """Whether sizes of pools or roles of replicas may change."""
        return self.scaling.flip_roles or any(pool.most > pool.replicas for pool in self.pools)

    @property
    def classes(self) -> tuple[SloClass, ...]:
        return self.pools[0].engine.slo_classes


def load_fleet(
    path: Path | None, pools: str | None = None, host_memory: str | None = None, **settings: Any
) -> SimulatedFleet:
    """Return the fleet that a YAML file describes. `pools` (`NAME=COUNTxPROFILE,…`), `host_memory` of each replica,
    and `settings` that are not None take precedence.

    Raises:
        ValueError: names the field and the accepted values.
    """
    data = _read(path) if path is not None else {}
    folder = path.parent if path is not None else Path()
    if pools is not None:
        data["pools"] = [_parse_pool(part) for part in pools.split(",")]
    data |= {name: value for name, value in settings.items() if value is not None}
    if host_memory is not None and isinstance(data.get("pools"), list):
        data["pools"] = [{**pool, "kv_cache_host_memory": host_memory} for pool in data["pools"]]
    return describe(data, folder)


def describe(data: Mapping[str, Any], folder: Path = Path()) -> SimulatedFleet:
    """Return the fleet that `data` describes, in the fields of the YAML file; `folder` holds files of profiles."""
    try:
        if isinstance(data.get("pools"), list):
            data = {**data, "pools": [_with_profile(pool, folder) for pool in data["pools"]]}
        return SimulatedFleet.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(_explain(detail) for detail in error.errors(include_url=False))) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        data = read_yaml(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a mapping is expected ({', '.join(SimulatedFleet.model_fields)}), not {data!r}")
    return data


def _parse_pool(text: str) -> dict[str, Any]:
    name, equals, rest = text.strip().partition("=")
    count, times, profile = rest.partition("x")
    if not equals or not times or not count.isdecimal() or not profile:
        raise ValueError(f"pools: {text!r} is not of the form NAME=COUNTxPROFILE, e.g. mixed=4xh100-8b")
    return {"name": name, "replicas": int(count), "profile": profile}


def _with_profile(pool: Any, folder: Path) -> Any:
    """Return the pool with its profile in place of the profile's name."""
    if not isinstance(pool, Mapping) or not isinstance(pool.get("profile"), str):
        return pool
    if pool.get("role", pool.get("name")) == "encode":
        raise ValueError(f"pools: {NO_ENCODE_POOLS}")
    return {**pool, "profile": read_profile(pool["profile"], folder)}


def read_profile(name: str, folder: Path = Path()) -> SchedulingProfile:
    """Return a profile: a JSON file of `crossdock tune --profile`, that of a server's first replica, a preset, or
    the estimate for `GPU:DIRECTORY`.

    Raises:
        ValueError: there is no such profile, or it cannot be read.
    """
    if name.startswith(("http://", "https://")):
        return _fetch_profile(name)
    return stored_profile(name, folder)


def _fetch_profile(url: str) -> SchedulingProfile:
    import httpx  # here: no other profile needs it

    headers = {"authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
    try:
        answer = httpx.get(url.rstrip("/").removesuffix("/v1") + "/v1/replicas", headers=headers, timeout=10)
        answer.raise_for_status()
        replicas = answer.json()["data"]
        found = replicas[0]
        learnt = {name: found[name] for name in ("cost", "overrun", "interval_share") if found.get(name)}
        return SchedulingProfile.model_validate(found["profile"] | learnt)
    except httpx.HTTPError as error:
        raise ValueError(f"profile: {url}: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"profile: {url} names no replica at /v1/replicas; is it a Crossdock server?") from None


def _explain(detail: Any) -> str:
    where = ".".join(str(part) for part in detail["loc"])
    message = detail["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    if detail["type"] == "value_error":
        return f"{where}: {message}" if where else message
    if detail["type"] == "extra_forbidden":
        return f"{where}: no such setting"
    return f"{where}: {message[:1].lower() + message[1:]}" + (
        "" if detail["type"] == "missing" else f", not {detail['input']!r}"
    )
