"""Kubernetes objects of a deployment: KubeRay's RayService, and the objects that `protection.py` adds."""

from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.deploy.nodes import NodeConfig
from crossdock.cluster.deploy.protection import (
    DASHBOARD,
    METRICS,
    PART_OF,
    disruption_budget,
    document,
    network_policies,
    pod_monitor,
    scrape,
)
from crossdock.cluster.deploy.serve import serve_config
from crossdock.cluster.deploy.yaml import Literal, to_yaml
from crossdock.cluster.serve.ray_environment import ENVIRONMENT

API_KEYS = "crossdock-api-keys"  # Secret with one entry, the file of keys
REDIS_PASSWORD = "crossdock-redis"  # Secret with `password`
HUB = "crossdock-hub"  # optional Secret with HF_TOKEN, for models that require one
OBJECT_STORE = str(80 << 20)  # bytes; small, because tokens travel in messages and KV pages in separate memory
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"  # where programs look for the token of their pod


def kuberay(config: ClusterConfig) -> list[dict[str, Any]]:
    """Return the documents of a deployment.

    Raises:
        ValueError: a pool has no nodes, there is no image, or API keys stand in the configuration itself.
    """
    require_nodes(config)
    if config.deploy.image is None:
        raise ValueError("deploy.image: Kubernetes runs an image; null is for ray up's machines alone")
    name = config.deploy.name
    return [
        document("ray.io/v1", "RayService", name, _ray_service(config)),
        *(disruption_budget(name, node) for node in config.deploy.nodes),
        *network_policies(config),
        document("monitoring.coreos.com/v1", "PodMonitor", f"{name}-ray", pod_monitor(name)),
        document("monitoring.coreos.com/v1alpha1", "ScrapeConfig", name, scrape(config)),
    ]


def require_nodes(config: ClusterConfig) -> None:
    """Raise a ValueError that names a pool without nodes."""
    named = {node.pool for node in config.deploy.nodes}
    for pool in config.pools:
        if pool.name not in named:
            raise ValueError(f"deploy.nodes: pool {pool.name!r} has none; describe its machines")


# -- the cluster -------------------------------------------------------------------------------------------------------


def _ray_service(config: ClusterConfig) -> dict[str, Any]:
    deploy = config.deploy
    cluster: dict[str, Any] = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},  # without a token, any process that reaches a port of Ray's could run code
        "headGroupSpec": _head(config),
        "workerGroupSpecs": [_workers(config, node) for node in deploy.nodes],
    }
    if deploy.is_autoscaled:
        cluster["enableInTreeAutoscaling"] = True
        token = {"name": "account", "mountPath": _ACCOUNT, "readOnly": True}
        cluster["autoscalerOptions"] = {"version": "v2", "idleTimeoutSeconds": 300, "volumeMounts": [token]}
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
    ports = {"gcs": 6379, "dashboard": DASHBOARD, "client": 10001, "serve": config.http.port, "metrics": METRICS}
    spec = _pod(config, "ray-head", _resources(head.cpus, head.memory, 0), ports)
    if config.deploy.is_autoscaled:
        spec["volumes"].append(_account())
    return {
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", "object-store-memory": OBJECT_STORE},
        "template": {"metadata": {"labels": {PART_OF: config.deploy.name}}, "spec": spec},
    }


def _account() -> dict[str, Any]:
    """Return a volume with what Kubernetes mounts into pods by itself: here into the autoscaler's container alone."""
    name = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [name]}},
    ]
    return {"name": "account", "projected": {"sources": sources}}


def _workers(config: ClusterConfig, node: NodeConfig) -> dict[str, Any]:
    pool = next(pool for pool in config.pools if pool.name == node.pool)
    ports = {"serve": config.http.port, "metrics": METRICS}
    spec = _pod(config, "ray-worker", _resources(node.cpus, node.memory, node.gpus), ports)
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
    if deploy.cache_claim is not None:
        volumes.append({"name": "cache", "persistentVolumeClaim": {"claimName": deploy.cache_claim}})
        mounts.append({"name": "cache", "mountPath": "/cache"})
        environment["CROSSDOCK_CACHE"] = "/cache/crossdock"
    return {
        "automountServiceAccountToken": False,  # Ray runs the code of who reaches it
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
