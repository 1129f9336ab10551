"""The custom resources in our manifests, as far as the manifests use them.

Written by hand from the API references of KubeRay (ray.io/v1, version 1.7) and of the Prometheus operator, because no
registry that we build from has their definitions; no registry has an API server to ask, either. All objects of our
manifests have passed an API server's own checks and the operators' own definitions: benchmarks/records/kubernetes.md.

Unknown fields are errors: the API server would silently drop them. Pods inside are checked against Kubernetes' schema.
"""

from typing import Annotated, Any, Literal

import kubernetes_validate
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

VERSION = "1.32"  # of Kubernetes
Labels = dict[str, str]


def check(document: dict[str, Any]) -> None:
    """Check a document of one of Kubernetes' own kinds. Raises kubernetes_validate.ValidationError."""
    kubernetes_validate.validate(document, VERSION, strict=True)


def _pod_template(template: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "x", **template.get("metadata", {})}
    check({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    return template


PodTemplate = Annotated[dict[str, Any], AfterValidator(_pod_template)]
Int32 = Annotated[int, Field(ge=0, lt=2**31)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)


class SecretKey(Strict):
    name: str
    key: str


class ValueFrom(Strict):
    secretKeyRef: SecretKey


class Credential(Strict):
    valueFrom: ValueFrom


class GcsFaultTolerance(Strict):
    backend: Literal["redis", "rocksdb"]
    redisAddress: str
    redisPassword: Credential


class Mount(Strict):
    name: str
    mountPath: str
    readOnly: bool


class AutoscalerOptions(Strict):
    version: Literal["v1", "v2"]
    idleTimeoutSeconds: Int32
    volumeMounts: list[Mount]


class AuthOptions(Strict):
    mode: Literal["disabled", "token"]


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: PodTemplate


class WorkerGroup(HeadGroup):
    groupName: str = Field(max_length=63)
    replicas: Int32
    minReplicas: Int32
    maxReplicas: Int32
    labels: Labels | None = None


class RayCluster(Strict):
    rayVersion: str
    authOptions: AuthOptions
    enableInTreeAutoscaling: bool = False
    autoscalerOptions: AutoscalerOptions | None = None
    gcsFaultToleranceOptions: GcsFaultTolerance | None = None
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class UpgradeStrategy(Strict):
    type: Literal["NewCluster", "None"]  # NewClusterWithIncrementalUpgrade needs options that our manifests do not have


class RayServiceSpec(Strict):
    serveConfigV2: str
    upgradeStrategy: UpgradeStrategy
    rayClusterDeletionDelaySeconds: Int32
    excludeHeadPodFromServeSvc: bool
    rayClusterConfig: RayCluster


class RayService(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: RayServiceSpec


class Selector(Strict):
    matchLabels: Labels


class MetricsEndpoint(Strict):
    port: str
    interval: str


class PodMonitorSpec(Strict):
    selector: Selector
    podMetricsEndpoints: list[MetricsEndpoint]


class PodMonitor(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: Metadata
    spec: PodMonitorSpec


class StaticConfig(Strict):
    targets: list[str] = Field(min_length=1)
    labels: Labels


class ScrapeConfigSpec(Strict):
    jobName: str
    scrapeInterval: str = Field(pattern=r"^[0-9]+(ms|s|m)$")
    metricsPath: str = Field(pattern="^/")
    staticConfigs: list[StaticConfig]


class ScrapeConfig(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1alpha1"]
    kind: Literal["ScrapeConfig"]
    metadata: Metadata
    spec: ScrapeConfigSpec


class Rule(Strict):
    alert: str | None = None
    record: str | None = None
    expr: str
    for_: str | None = Field(None, alias="for", pattern=r"^[0-9]+m$")
    labels: Labels = {}
    annotations: Labels = {}


class RuleGroup(Strict):
    name: str
    rules: list[Rule]


class PrometheusRuleSpec(Strict):
    groups: list[RuleGroup]


class PrometheusRule(Strict):
    apiVersion: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: Metadata
    spec: PrometheusRuleSpec


KINDS: dict[str, type[BaseModel]] = {
    kind.__name__: kind for kind in (RayService, PodMonitor, ScrapeConfig, PrometheusRule)
}


def validate(document: dict[str, Any]) -> None:
    """Check any document of ours. Raises ValueError or kubernetes_validate.ValidationError."""
    if document["kind"] in KINDS:
        KINDS[document["kind"]].model_validate(document)
    else:
        check(document)
