"""The cluster file of `ray up`: one node type for the head and one for each pool, on any cloud that Ray supports."""

from typing import Any

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.deploy.kuberay import OBJECT_STORE
from crossdock.cluster.deploy.nodes import NodeConfig
from crossdock.cluster.serve.ray_environment import ENVIRONMENT

_TOKEN = "~/.ray/auth_token"  # made by `ray get-auth-token --generate`, the same on every node


def ray_up(config: ClusterConfig) -> dict[str, Any]:
    """Return the cluster in the format of Ray's cluster schema. `serve deploy` then deploys the application."""
    deploy = config.deploy
    mounts = {_TOKEN: _TOKEN}
    if config.http.api_keys_file is not None:
        mounts[config.http.api_keys_file] = "~/.crossdock/api-keys.yaml"
    environment = ENVIRONMENT | {"RAY_AUTH_MODE": "token"}
    options = ["--ulimit nofile=65536:65536", "--shm-size=1g", *(f"-e {k}={v}" for k, v in environment.items())]
    head = {"resources": {"CPU": 0}, "node_config": dict(deploy.head.node_config)}  # no replica runs on the head
    started = f"--object-store-memory={OBJECT_STORE}"
    return {
        "cluster_name": deploy.name,
        "max_workers": sum(node.max for node in deploy.nodes),
        "idle_timeout_minutes": 5,
        "provider": dict(deploy.provider),
        "auth": {"ssh_user": deploy.ssh_user},
        "docker": {"image": deploy.image, "container_name": "crossdock", "run_options": options},
        "file_mounts": mounts,
        "head_node_type": "head",
        "available_node_types": {"head": head} | {node.pool: _node_type(config, node) for node in deploy.nodes},
        "head_start_ray_commands": [
            "ray stop",
            # Applications are deployed through the dashboard. Only `ray dashboard` reaches it, over SSH.
            "ray start --head --port=6379 --dashboard-host=127.0.0.1 "
            f"--autoscaling-config=~/ray_bootstrap_config.yaml {started}",
        ],
        "worker_start_ray_commands": ["ray stop", f"ray start --address=$RAY_HEAD_IP:6379 {started}"],
    }


def _node_type(config: ClusterConfig, node: NodeConfig) -> dict[str, Any]:
    pool = next(pool for pool in config.pools if pool.name == node.pool)
    return {
        "resources": {"CPU": node.cpus} | ({"GPU": node.gpus} if node.gpus else {}),
        "labels": dict(pool.node_labels),
        "min_workers": node.min,
        "max_workers": node.max,
        "node_config": dict(node.node_config),
    }
