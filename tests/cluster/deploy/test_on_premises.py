"""`ray up` on machines of your own: the cluster file names them by address, each starts Ray with its pool's labels."""

import subprocess
from typing import Any

import pytest
from ray.autoscaler._private.util import prepare_config, validate_config

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.config_file import load
from crossdock.cluster.deploy.kuberay import kuberay
from crossdock.cluster.deploy.rayup import ray_up
from crossdock.cluster.deploy.serve import serve_config

POOLS = [
    {"name": "prefill", "num_cpus": 8, "num_gpus": 1, "node_labels": {"ray.io/accelerator-type": "H100"}},
    {"name": "decode", "replicas": 2, "num_cpus": 4, "num_gpus": 1},
]
NODES = [
    {"pool": "prefill", "cpus": 12, "gpus": 1, "memory": "96Gi", "addresses": ["10.0.0.2"]},
    {"pool": "decode", "cpus": 6, "gpus": 2, "memory": "48Gi", "addresses": ["10.0.0.3", "10.0.0.4"]},
]
LOCAL = {"type": "local", "head_ip": "10.0.0.1"}


def config(**deploy: Any) -> ClusterConfig:
    given = {"provider": LOCAL, "ssh_private_key": "~/.ssh/id", "nodes": NODES} | deploy
    return load(None, {"pools": POOLS, "deploy": given})


def started(cluster: dict[str, Any], kind: str, address: str) -> str:
    """Run the commands that start Ray, on a machine of this address with a `ray` that prints its environment and its
    arguments. Return what `ray start` prints."""
    script = "; ".join(cluster[f"{kind}_start_ray_commands"])
    ray = 'ray() { echo "$RAY_AUTH_MODE $RAY_enable_autoscaler_v2 $@"; }; '
    hostname = f"hostname() {{ echo '172.17.0.1 {address} '; }}; "
    environment = {"RAY_HEAD_IP": "10.0.0.1", "RAY_enable_autoscaler_v2": "1", "PATH": "/usr/bin:/bin"}
    command = ["bash", "-c", ray + hostname + script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_machine_starts_ray_with_what_its_pool_says() -> None:
    cluster = ray_up(config())
    assert cluster["provider"] == LOCAL | {"worker_ips": ["10.0.0.2", "10.0.0.3", "10.0.0.4"]}
    assert cluster["max_workers"] == 3
    assert "available_node_types" not in cluster, "Ray's local provider refuses them"
    joined = "1 start --address=10.0.0.1:6379"
    h100 = "--num-cpus=12 --num-gpus=1 --labels=ray.io/accelerator-type=H100"
    assert started(cluster, "worker", "10.0.0.2").strip().startswith(joined)
    assert started(cluster, "worker", "10.0.0.2").endswith(h100)
    for address in NODES[1]["addresses"]:
        assert started(cluster, "worker", address).endswith("--num-cpus=6 --num-gpus=2")
    with pytest.raises(subprocess.CalledProcessError):
        started(cluster, "worker", "10.0.0.20")
    assert started(cluster, "head", "10.0.0.1").endswith("--num-cpus=0 --num-gpus=0"), "no replica runs on the head"


def test_head_runs_the_first_version_of_the_autoscaler() -> None:
    """The second one takes the head for a worker, and starts one worker too few (Ray 2.60)."""
    assert started(ray_up(config()), "head", "10.0.0.1").strip().startswith("0 start --head")


def test_cluster_file_passes_rays_schema_and_its_local_provider() -> None:
    for image in ("crossdock:cuda", None):
        prepared = prepare_config(ray_up(config(image=image)))
        validate_config(prepared)
        (kind,) = prepared["available_node_types"].values()
        assert kind["min_workers"] == kind["max_workers"] == 3


def test_machine_without_containers_is_given_the_environment() -> None:
    contained, bare = ray_up(config()), ray_up(config(image=None))
    assert contained["docker"]["image"] == "crossdock:cpu"
    assert "-e RAY_AUTH_MODE=token" in contained["docker"]["run_options"]
    assert "docker" not in bare
    assert started(bare, "worker", "10.0.0.2").startswith("token 1 start")
    assert started(bare, "head", "10.0.0.1").startswith("token 0 start")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"provider": {"type": "local"}}, "deploy.provider: type local needs head_ip"),
        ({"provider": LOCAL | {"worker_ips": ["10.0.0.2"]}}, "name those by nodes.addresses"),
        ({"ssh_private_key": None}, "deploy.ssh_private_key: provider local needs one"),
        ({"provider": {"type": "aws"}}, "pool 'prefill' has addresses; deploy.provider must be of type local"),
        ({"provider": LOCAL | {"head_ip": "10.0.0.3"}}, "10.0.0.3 is named twice"),
        ({"nodes": NODES[:1]}, "pool 'decode' has none"),
        ({"nodes": [NODES[0], {**NODES[1], "addresses": []}]}, "pool 'decode' has no addresses"),
    ],
)
def test_machines_that_are_named_wrongly_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ray_up(config(**changes))


def test_all_machines_that_are_named_run() -> None:
    with pytest.raises(ValueError, match="addresses: all 2 of them run; leave out min and max"):
        config(nodes=[NODES[0], {**NODES[1], "max": 1}])
    again = config().model_dump(mode="json")
    assert ClusterConfig.model_validate(again) == config(), "the printed configuration can be read again"


def test_kubernetes_needs_an_image() -> None:
    with pytest.raises(ValueError, match=r"deploy\.image: Kubernetes runs an image"):
        kuberay(config(image=None))


def test_serve_lets_the_scaler_resize_pools_that_may_grow() -> None:
    """Serve refuses it otherwise."""
    (fixed,) = serve_config(config())["applications"]
    assert "external_scaler_enabled" not in fixed
    elastic = load(None, {"pools": [{"name": "mixed", "max_replicas": 2}]})
    assert serve_config(elastic)["applications"][0]["external_scaler_enabled"] is True
