"""What a deployment is made of beyond the application: the machines of each pool, the image, where state is kept."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_QUANTITY = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti)?$"
_NAME = r"^[a-z]([a-z0-9-]{0,40}[a-z0-9])?$"  # KubeRay appends to it, and a DNS label ends at 63 characters


class NodeConfig(BaseModel):
    """The machines of one pool, all alike. They carry the pool's `node_labels`, which is how its replicas find them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pool: str = Field(description="The pool whose replicas run here.")
    cpus: int = Field(ge=1, description="Cores of each.")
    memory: str = Field(pattern=_QUANTITY, description="Memory of each, e.g. 64Gi.")
    gpus: int = Field(0, ge=0, description="GPUs of each.")
    min: int = Field(1, ge=0, description="How many are always there.")
    max: int = Field(1, ge=1, description="How many the autoscaler may ask for.")
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="Kubernetes: labels of the nodes that may carry them, e.g. the GPU's product."
    )
    node_config: dict[str, Any] = Field(
        default_factory=dict, description="ray up: what the cloud is asked for, e.g. {InstanceType: p5.4xlarge}."
    )

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> "NodeConfig":
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must be at most max ({self.max})")
        return self


class HeadConfig(BaseModel):
    """The machine of Ray's head, which runs no replica."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpus: int = Field(2, ge=1)
    memory: str = Field("8Gi", pattern=_QUANTITY)
    node_config: dict[str, Any] = Field(default_factory=dict, description="ray up: as of a pool's nodes.")


class DeployConfig(BaseModel):
    """What `crossdock deploy render` needs to know; the running application does not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("crossdock", pattern=_NAME, description="Of the RayService, or of ray up's cluster.")
    image: str = Field("crossdock:cpu", min_length=1, description="Built by manifests/Dockerfile.")
    head: HeadConfig = Field(default_factory=lambda: HeadConfig.model_validate({}))
    nodes: tuple[NodeConfig, ...] = Field((), description="One entry for each pool.")
    redis: str | None = Field(None, description="host:port where Ray's head keeps its state, to survive a restart.")
    model_claim: str | None = Field(
        None, description="Kubernetes: a volume claim with models, mounted at /models on every node."
    )
    upgrade: Literal["NewCluster", "None"] = Field(
        "None", description="KubeRay, when nodes change: a second cluster beside the first, or by hand."
    )
    provider: dict[str, Any] = Field(
        default_factory=lambda: {"type": "aws", "region": "us-east-1"}, description="ray up: the cloud, in Ray's words."
    )
    ssh_user: str = Field("ubuntu", description="ray up: who logs in.")

    @model_validator(mode="after")
    def _a_pool_has_its_nodes_once(self) -> "DeployConfig":
        names = [node.pool for node in self.nodes]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"nodes: pool {twice[0]!r} is named twice; give each pool one entry")
        return self
