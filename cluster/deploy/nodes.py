"""The settings of a deployment beyond the application: machines of each pool, image, storage of state."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_QUANTITY = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti)?$"
_NAME = r"^[a-z]([a-z0-9-]{0,40}[a-z0-9])?$"  # KubeRay appends to this name, and a DNS label has at most 63 characters


class NodeConfig(BaseModel):
    """The machines of one pool, all alike. They get the pool's `node_labels`, by which its replicas find them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool: str = Field(description="Pool whose replicas run on these machines.")
    cpus: int = Field(ge=1, description="Cores of each machine.")
    memory: str = Field(pattern=_QUANTITY, description="Memory of each machine, e.g. 64Gi.")
    gpus: int = Field(0, ge=0, description="GPUs of each machine.")
    min: int = Field(1, ge=0, description="Number of machines that are always there.")
    max: int = Field(1, ge=1, description="Largest number that the autoscaler may request.")
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="Kubernetes: labels of the nodes that may run them, e.g. the GPU's product."
    )
    node_config: dict[str, Any] = Field(
        default_factory=dict, description="ray up: the request to the cloud, e.g. {InstanceType: p5.4xlarge}."
    )
    addresses: tuple[str, ...] = Field(
        (), description="ray up, provider local: your machines, by IP address. Leave out min and max: all of them run."
    )

    @model_validator(mode="before")
    @classmethod
    def _count_addresses(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not data.get("addresses"):
            return data
        count = len(data["addresses"])
        if {data.get("min", count), data.get("max", count)} != {count}:
            raise ValueError(f"addresses: all {count} of them run; leave out min and max")
        return {**data, "min": count, "max": count}

    @model_validator(mode="after")
    def _check_bounds(self) -> "NodeConfig":
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must be at most max ({self.max})")
        return self


class HeadConfig(BaseModel):
    """The machine of Ray's head, which runs no replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpus: int = Field(2, ge=1, description="Cores.")
    memory: str = Field("8Gi", pattern=_QUANTITY, description="Memory, e.g. 8Gi.")
    node_config: dict[str, Any] = Field(default_factory=dict, description="ray up: as in nodes.")


class DeployConfig(BaseModel):
    """Settings that only `crossdock deploy render` reads; the running application does not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("crossdock", pattern=_NAME, description="Name of the RayService, or of ray up's cluster.")
    image: str | None = Field(
        "crossdock:cpu",
        min_length=1,
        description="Container image, built by manifests/Dockerfile; null: ray up's machines have Crossdock installed.",
    )
    head: HeadConfig = Field(default_factory=lambda: HeadConfig.model_validate({}))
    nodes: tuple[NodeConfig, ...] = Field((), description="One entry for each pool.")
    redis: str | None = Field(
        None, description="host:port of the Redis with the head's state; null: a restart loses it."
    )
    model_claim: str | None = Field(
        None, description="Kubernetes: volume claim with models, mounted at /models on every node; null: none."
    )
    cache_claim: str | None = Field(
        None,
        description="Kubernetes: writable volume claim at /cache on every node for compiled kernels, which a pod else "
        "loses with its end; null: none.",
    )
    upgrade: Literal["NewCluster", "None"] = Field(
        "None", description="KubeRay, when nodes change: NewCluster starts a second cluster, None waits for you."
    )
    provider: dict[str, Any] = Field(
        default_factory=lambda: {"type": "aws", "region": "us-east-1"},
        description="ray up: the cloud, in Ray's format; {type: local, head_ip: …} for machines of your own.",
    )
    operator_namespace: str = Field(
        "kuberay-operator", pattern=_NAME, description="KubeRay: where its operator runs; only that reaches the head."
    )
    ssh_user: str = Field("ubuntu", description="ray up: user of the SSH connections.")
    ssh_private_key: str | None = Field(
        None,
        description="ray up: file with the key of the SSH connections; null: the provider makes one. local needs it.",
    )

    @property
    def is_autoscaled(self) -> bool:
        """Whether nodes join and leave."""
        return any(node.min < node.max for node in self.nodes)

    @model_validator(mode="after")
    def _check_each_pool_is_named_once(self) -> "DeployConfig":
        names = [node.pool for node in self.nodes]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"nodes: pool {twice[0]!r} is named twice; give each pool one entry")
        return self
