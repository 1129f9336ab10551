"""Kubernetes objects beside the RayService: network policies of its pods, a disruption budget, and a scrape."""

from typing import Any
from urllib.parse import urlsplit

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.deploy.nodes import NodeConfig

PART_OF = "app.kubernetes.io/part-of"  # on every pod of a deployment; KubeRay sets other labels of that prefix
GROUP = "ray.io/group"  # label that KubeRay sets: the worker group of a pod
METRICS = 8080  # port of Ray's own metrics of a node
DASHBOARD = 8265  # port of the head's dashboard, which runs what it is told
_REDIS = "crossdock-redis"  # of manifests/redis
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16")  # clouds' metadata too


def document(api_version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return a Kubernetes object."""
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def disruption_budget(name: str, node: NodeConfig) -> dict[str, Any]:
    """Return the budget of a pool: one of its pods may be away at a time."""
    selector = {"matchLabels": {PART_OF: name, GROUP: node.pool}}
    return document(
        "policy/v1", "PodDisruptionBudget", f"{name}-{node.pool}", {"maxUnavailable": 1, "selector": selector}
    )


def network_policies(config: ClusterConfig) -> list[dict[str, Any]]:
    """Return the policies for the pods: who may connect to them, and where they may connect.

    Among themselves the pods need every port: Ray's ports, and those of KV transfers. The rest of the cluster reaches
    the API alone. The operator reaches the head's dashboard, through which it deploys the application. Policies add up:
    one of your own can allow more.
    """
    deploy = config.deploy
    ours = {"podSelector": {"matchLabels": {PART_OF: deploy.name}}}
    operator = {
        **_namespace(deploy.operator_namespace),  # in one entry: of this namespace and with this label
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    pods = {
        "podSelector": ours["podSelector"],
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [ours]},
            {"from": [{"namespaceSelector": {}}], "ports": [_tcp(config.http.port)]},
            {"from": [_namespace("monitoring")], "ports": [_tcp(METRICS)]},
            {"from": [operator], "ports": [_tcp(DASHBOARD)]},
        ],
        "egress": [{"to": [ours]}, *_destinations(config)],
    }
    policies = [document("networking.k8s.io/v1", "NetworkPolicy", deploy.name, pods)]
    if deploy.is_autoscaled:
        head = {
            "podSelector": {"matchLabels": {PART_OF: deploy.name, "ray.io/node-type": "head"}},
            "policyTypes": ["Egress"],
            "egress": [{"ports": [_tcp(443), _tcp(6443)]}],  # the autoscaler asks Kubernetes' API, which has no label
        }
        policies.append(document("networking.k8s.io/v1", "NetworkPolicy", f"{deploy.name}-head", head))
    return policies


def _destinations(config: ClusterConfig) -> list[dict[str, Any]]:
    """Return the destinations of the pods beside each other: only those that the configuration names."""
    rules: list[dict[str, Any]] = [{"ports": [{"protocol": "UDP", "port": 53}, _tcp(53)]}]  # names
    if config.deploy.redis is not None:
        host, _, port = config.deploy.redis.rpartition(":")
        own = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": _REDIS}}}]
        rules.append({**({"to": own} if host == _REDIS else {}), "ports": [_tcp(int(port))]})
    if config.model.path is not None and not config.model.path.startswith(("/", "~", ".")):
        public = {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(_PRIVATE)}}
        rules.append({"to": [public], "ports": [_tcp(443)]})  # the hub that the model is fetched from
    if config.http.otlp_endpoint is not None:
        collector = urlsplit(config.http.otlp_endpoint)
        rules.append({"ports": [_tcp(collector.port or (443 if collector.scheme == "https" else 80))]})
    return rules


def _namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _tcp(port: int) -> dict[str, Any]:
    return {"protocol": "TCP", "port": port}


def pod_monitor(name: str) -> dict[str, Any]:
    """Return the monitor of Ray's own metrics, on every node."""
    return {
        "selector": {"matchLabels": {PART_OF: name}},
        "podMetricsEndpoints": [{"port": "metrics", "interval": "15s"}],
    }


def scrape(config: ClusterConfig) -> dict[str, Any]:
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
