"""Kubernetes objects of a deployment: KubeRay's RayService, and the objects that protect and monitor it."""

from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.deploy.nodes import NodeConfig
from crossdock.cluster.deploy.serve import serve_config
from crossdock.cluster.deploy.yaml import Literal, to_yaml
from crossdock.cluster.serve.ray_environment import ENVIRONMENT

PART_OF = "app.kubernetes.io/part-of"  # on every pod of a deployment; KubeRay sets other labels of that prefix
GROUP = "ray.io/group"  # label that KubeRay sets: the worker group of a pod
API_KEYS = "crossdock-api-keys"  # Secret with one entry, the file of keys
REDIS_PASSWORD = "crossdock-redis"  # Secret with `password`
HUB = "crossdock-hub"  # optional Secret with HF_TOKEN, for models that require one
OBJECT_STORE = str(80 << 20)  # bytes; small, because tokens travel in messages and KV pages in separate memory
METRICS = 8080  # port of Ray's own metrics of a node


def kuberay(config: ClusterConfig) -> list[dict[str, Any]]:
    """Return the documents of a deployment.

    Raises:
        ValueError: a pool has no nodes, or API keys stand in the configuration itself.
    """
    _require_nodes(config)
    name = config.deploy.name
    return [
        _document("ray.io/v1", "RayService", name, _ray_service(config)),
        *(_disruption_budget(name, node) for node in config.deploy.nodes),
        _document("networking.k8s.io/v1", "NetworkPolicy", name, _network_policy(config)),
        _document("monitoring.coreos.com/v1", "PodMonitor", f"{name}-ray", _pod_monitor(name)),
        _document("monitoring.coreos.com/v1alpha1", "ScrapeConfig", name, _scrape(config)),
    ]


def _require_nodes(config: ClusterConfig) -> None:
    named = {node.pool for node in config.deploy.nodes}
    for pool in config.pools:
        if pool.name not in named:
            raise ValueError(f"deploy.nodes: pool {pool.name!r} has none; describe its machines")


def _document(api_version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}


# -- the cluster -------------------------------------------------------------------------------------------------------


def _ray_service(config: ClusterConfig) -> dict[str, Any]:
    deploy = config.deploy
    cluster: dict[str, Any] = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},  # without a token, any process that reaches a port of Ray's could run code
        "headGroupSpec": _head(config),
        "workerGroupSpecs": [_workers(config, node) for node in deploy.nodes],
    }
    if any(node.min < node.max for node in deploy.nodes):
        cluster["enableInTreeAutoscaling"] = True
        cluster["autoscalerOptions"] = {"version": "v2", "idleTimeoutSeconds": 300}
    if deploy.redis is not None:
        password = {"valueFrom": {"secretKeyRef": {"name": REDIS_PASSWORD, "key": "password"}}}
        cluster["gcsFaultToleranceOptions"] = {
            "backend": "redis",
            "redisAddress": deploy.redis,
            "redisPassword": password,
        }
    return {
        "serveConfigV2": Literal(to_yaml([serve_config(config, host="0.0.0.0")])),
        "upgradeStrategy": {"type": deploy.upgrade},
        "rayClusterDeletionDelaySeconds": _grace_seconds(config),  # of the old cluster: its streams end first
        "excludeHeadPodFromServeSvc": True,
        "rayClusterConfig": cluster,
    }


def _head(config: ClusterConfig) -> dict[str, Any]:
    head = config.deploy.head
    ports = {"gcs": 6379, "dashboard": 8265, "client": 10001, "serve": config.http.port, "metrics": METRICS}
    spec = _pod(config, "ray-head", _resources(head.cpus, head.memory, 0), ports)
    return {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", "object-store-memory": OBJECT_STORE},
        "template": {"metadata": {"labels": {PART_OF: config.deploy.name}}, "spec": spec},
    }


def _workers(config: ClusterConfig, node: NodeConfig) -> dict[str, Any]:
    pool = next(pool for pool in config.pools if pool.name == node.pool)
    ports = {"serve": config.http.port, "metrics": METRICS}
    spec = _pod(config, "ray-worker", _resources(node.cpus, node.memory, node.gpus), ports)
    spec["automountServiceAccountToken"] = False
    if node.node_selector:
        spec["nodeSelector"] = dict(node.node_selector)
    if node.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    group: dict[str, Any] = {
        "groupName": node.pool,
        "replicas": node.min,
        "minReplicas": node.min,
        "maxReplicas": node.max,
        "rayStartParams": {"object-store-memory": OBJECT_STORE},
        "template": {"metadata": {"labels": {PART_OF: config.deploy.name}}, "spec": spec},
    }
    if pool.node_labels:
        group["labels"] = dict(pool.node_labels)
    return group


def _pod(config: ClusterConfig, container: str, resources: dict[str, Any], ports: dict[str, int]) -> dict[str, Any]:
    """Return the spec of a pod, without probes.

    KubeRay adds probes to every pod, one of them of the proxy: a pod gets requests once it can serve them.
    """
    deploy = config.deploy
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    environment = dict(ENVIRONMENT)
    if config.http.api_keys_file is not None:
        folder = str(PurePosixPath(config.http.api_keys_file).parent)
        volumes.append({"name": "api-keys", "secret": {"secretName": API_KEYS}})
        mounts.append({"name": "api-keys", "mountPath": folder, "readOnly": True})
    if deploy.model_claim is not None:
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": deploy.model_claim}})
        mounts.append({"name": "models", "mountPath": "/models"})
        environment["HF_HOME"] = "/models"
    return {
        "restartPolicy": "Never",  # the autoscaler mistakes a restarted pod for another node
        "terminationGracePeriodSeconds": _grace_seconds(config),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": container,
                "image": deploy.image,
                "env": [{"name": name, "value": value} for name, value in environment.items()],
                "envFrom": [{"secretRef": {"name": HUB, "optional": True}}],
                "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
                "resources": resources,
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _resources(cpus: int, memory: str, gpus: int) -> dict[str, Any]:
    limits = {"cpu": str(cpus), "memory": memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {"requests": dict(limits), "limits": limits}


def _grace_seconds(config: ClusterConfig) -> int:
    """Return a time in which all running requests can end."""
    return int(config.http.drain_timeout_s) + 60


# -- protection and monitoring -----------------------------------------------------------------------------------------


def _disruption_budget(name: str, node: NodeConfig) -> dict[str, Any]:
    selector = {"matchLabels": {PART_OF: name, GROUP: node.pool}}
    return _document(
        "policy/v1", "PodDisruptionBudget", f"{name}-{node.pool}", {"maxUnavailable": 1, "selector": selector}
    )


def _network_policy(config: ClusterConfig) -> dict[str, Any]:
    """Return the rules for connections to the pods.

    Among themselves the pods need every port: Ray's ports, and those of KV transfers. The rest of the cluster reaches
    the API alone. The operator reaches the head's dashboard, through which it deploys the application.
    """
    ours = {"podSelector": {"matchLabels": {PART_OF: config.deploy.name}}}
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    return {
        "podSelector": ours["podSelector"],
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [ours]},
            {"from": [{"namespaceSelector": {}}], "ports": [_tcp(config.http.port)]},
            {"from": [monitoring], "ports": [_tcp(METRICS)]},
            {"from": [operator], "ports": [_tcp(8265)]},
        ],
    }


def _tcp(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}


def _pod_monitor(name: str) -> dict[str, Any]:
    """Return the monitor of Ray's own metrics, on every node."""
    return {
        "selector": {"matchLabels": {PART_OF: name}},
        "podMetricsEndpoints": [{"port": "metrics", "interval": "15s"}],
    }


def _scrape(config: ClusterConfig) -> dict[str, Any]:
    """Return the scrape of the service.

    Each answer covers all replicas and ingresses, whichever pod gives it. A ServiceMonitor would scrape every pod
    behind the service and count everything once per pod.
    """
    name = config.deploy.name
    return {
        "jobName": "crossdock",
        "scrapeInterval": "15s",
        "metricsPath": "/metrics",
        "staticConfigs": [{"targets": [f"{name}-serve-svc:{config.http.port}"], "labels": {"service": name}}],
    }
