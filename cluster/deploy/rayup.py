"""The cluster file of `ray up`: in a cloud a node type for the head and one for each pool, or machines of your own."""

from collections.abc import Mapping
from typing import Any

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.deploy.kuberay import OBJECT_STORE, require_nodes
from crossdock.cluster.deploy.nodes import NodeConfig
from crossdock.cluster.serve.ray_environment import ENVIRONMENT

_TOKEN = "~/.ray/auth_token"  # made by `ray get-auth-token --generate`, the same on every node
_ENVIRONMENT = ENVIRONMENT | {"RAY_AUTH_MODE": "token"}
_HEAD = (  # applications are deployed through the dashboard, which only `ray dashboard` reaches, over SSH
    "ray start --head --port=6379 --dashboard-host=127.0.0.1 --autoscaling-config=~/ray_bootstrap_config.yaml "
    f"--object-store-memory={OBJECT_STORE}"
)
_WORKER = f"ray start --address=$RAY_HEAD_IP:6379 --object-store-memory={OBJECT_STORE}"


def ray_up(config: ClusterConfig) -> dict[str, Any]:
    """Return the cluster in the format of Ray's cluster schema. `serve deploy` then deploys the application.

    Raises:
        ValueError: the machines are your own, and the configuration does not say which; or they are a cloud's, and it
            names some by address.
    """
    deploy = config.deploy
    mounts = {_TOKEN: _TOKEN}
    if config.http.api_keys_file is not None:
        mounts[config.http.api_keys_file] = "~/.crossdock/api-keys.yaml"
    auth = {"ssh_user": deploy.ssh_user}
    if deploy.ssh_private_key is not None:
        auth["ssh_private_key"] = deploy.ssh_private_key
    cluster: dict[str, Any] = {
        "cluster_name": deploy.name,
        "max_workers": sum(node.max for node in deploy.nodes),
        "idle_timeout_minutes": 5,
        "provider": dict(deploy.provider),
        "auth": auth,
    }
    if deploy.image is not None:
        options = ["--ulimit nofile=65536:65536", "--shm-size=1g", *(f"-e {k}={v}" for k, v in _ENVIRONMENT.items())]
        cluster["docker"] = {"image": deploy.image, "container_name": "crossdock", "run_options": options}
    cluster["file_mounts"] = mounts
    return cluster | (_on_premises(config) if deploy.provider.get("type") == "local" else _in_a_cloud(config))


def _in_a_cloud(config: ClusterConfig) -> dict[str, Any]:
    deploy = config.deploy
    if named := [node.pool for node in deploy.nodes if node.addresses]:
        raise ValueError(f"deploy.nodes: pool {named[0]!r} has addresses; deploy.provider must be of type local then")
    head = {"resources": {"CPU": 0}, "node_config": dict(deploy.head.node_config)}  # no replica runs on the head
    return {
        "head_node_type": "head",
        "available_node_types": {"head": head} | {node.pool: _node_type(config, node) for node in deploy.nodes},
        **_commands(config, _HEAD, _WORKER),
    }


def _node_type(config: ClusterConfig, node: NodeConfig) -> dict[str, Any]:
    return {
        "resources": {"CPU": node.cpus} | ({"GPU": node.gpus} if node.gpus else {}),
        "labels": _labels(config, node),
        "min_workers": node.min,
        "max_workers": node.max,
        "node_config": dict(node.node_config),
    }


def _on_premises(config: ClusterConfig) -> dict[str, Any]:
    """Return the machines by address. Ray's local provider has one node type for all: each starts Ray with what its
    pool's machines have, which it finds by its own address."""
    deploy = config.deploy
    require_nodes(config)
    if "head_ip" not in deploy.provider or "worker_ips" in deploy.provider:
        raise ValueError("deploy.provider: type local needs head_ip, and no worker_ips: name those by nodes.addresses")
    if deploy.ssh_private_key is None:
        raise ValueError("deploy.ssh_private_key: provider local needs one; the head reaches the machines with it")
    if missing := [node.pool for node in deploy.nodes if not node.addresses]:
        raise ValueError(f"deploy.nodes: pool {missing[0]!r} has no addresses; provider local needs them")
    addresses = [address for node in deploy.nodes for address in node.addresses]
    if twice := [each for each in addresses if [*addresses, deploy.provider["head_ip"]].count(each) > 1]:
        raise ValueError(f"deploy.nodes: {twice[0]} is named twice; a machine is the head, or of one pool")
    cases = " ".join(f"{_pattern(node)}) resources='{_resources(config, node)}';;" for node in deploy.nodes)
    worker = f'case " $(hostname -I) " in {cases} *) exit 1;; esac; {_WORKER} $resources'
    # Version 2, Ray's default, takes the head for one of these machines, and so leaves one of them out (Ray 2.60).
    head = f"export RAY_enable_autoscaler_v2=0; {_HEAD} --num-cpus=0 --num-gpus=0"
    return {"provider": {**deploy.provider, "worker_ips": addresses}, **_commands(config, head, worker)}


def _pattern(node: NodeConfig) -> str:
    """Return the shell pattern of a list of addresses with one of this pool's machines."""
    return "|".join(f'*" {address} "*' for address in node.addresses)


def _resources(config: ClusterConfig, node: NodeConfig) -> str:
    labels = ",".join(f"{key}={value}" for key, value in _labels(config, node).items())
    return f"--num-cpus={node.cpus} --num-gpus={node.gpus}" + (f" --labels={labels}" if labels else "")


def _labels(config: ClusterConfig, node: NodeConfig) -> Mapping[str, str]:
    return dict(next(pool.node_labels for pool in config.pools if pool.name == node.pool))


def _commands(config: ClusterConfig, head: str, worker: str) -> dict[str, Any]:
    """Return the commands that start Ray. A container has the environment that Ray needs; a machine is given it."""
    if config.deploy.image is None:
        environment = "ulimit -n 65536; export " + " ".join(f"{key}={value}" for key, value in _ENVIRONMENT.items())
        head, worker = f"{environment}; {head}", f"{environment}; {worker}"
    return {"head_start_ray_commands": ["ray stop", head], "worker_start_ray_commands": ["ray stop", worker]}
