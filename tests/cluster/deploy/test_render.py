"""`crossdock deploy render`: the committed manifests are its output, and match their configuration."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from crossdock.cluster.cli import app
from crossdock.cluster.config_file import load
from crossdock.cluster.deploy.command import Target, rendered
from crossdock.cluster.deploy.kuberay import kuberay
from crossdock.cluster.deploy.protection import GROUP, PART_OF
from crossdock.cluster.deploy.rayup import ray_up
from crossdock.cluster.deploy.serve import serve_config

MANIFESTS = Path(__file__).parents[3] / "manifests"
FLEET = MANIFESTS / "fleet/crossdock.yaml"
COMMITTED = [
    ("cpu/crossdock.yaml", Target.KUBERAY, "cpu/rayservice.yaml"),
    ("single-node/crossdock.yaml", Target.KUBERAY, "single-node/rayservice.yaml"),
    ("fleet/crossdock.yaml", Target.KUBERAY, "fleet/rayservice.yaml"),
    ("fleet/crossdock.yaml", Target.RAY_UP, "ray-cluster.yaml"),
    ("crossdock.yaml", Target.SERVE, "serve.yaml"),
]


@pytest.mark.parametrize(("config", "target", "manifest"), COMMITTED)
def test_committed_manifest_is_the_output_of_render(config: str, target: Target, manifest: str) -> None:
    shown = rendered(MANIFESTS / config, target)
    assert (MANIFESTS / manifest).read_text() == shown, (
        f"crossdock deploy render {config} --target {target} > {manifest}"
    )


@pytest.mark.parametrize(("overlay", "warns"), [("cpu", True), ("fleet", False)])
def test_rendering_for_kubernetes_without_keys_warns(overlay: str, warns: bool) -> None:
    """There the API listens on every address: the manifest for a demonstration has no keys."""
    result = CliRunner().invoke(app, ["deploy", "render", str(MANIFESTS / overlay / "crossdock.yaml")])
    assert result.exit_code == 0
    assert ("warning: no http.api_keys_file" in result.stderr) == warns
    assert "warning" not in result.stdout


def fleet(**changes: Any) -> Any:
    return load(FLEET, {name.replace("__", "."): value for name, value in changes.items()})


def service(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return next(document["spec"] for document in documents if document["kind"] == "RayService")


def test_nodes_have_the_labels_and_gpus_that_replicas_need() -> None:
    """For every pool, on both kinds of cluster."""
    config = fleet()
    groups = {group["groupName"]: group for group in service(kuberay(config))["rayClusterConfig"]["workerGroupSpecs"]}
    types = ray_up(config)["available_node_types"]
    for pool in config.pools:
        assert pool.node_labels
        assert pool.num_gpus
        assert groups[pool.name]["labels"] == types[pool.name]["labels"] == pool.node_labels
        limits = groups[pool.name]["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert float(limits["nvidia.com/gpu"]) >= pool.num_gpus
        assert types[pool.name]["resources"]["GPU"] >= pool.num_gpus


def test_encode_pool_has_a_deployment_and_nodes_like_any_other() -> None:
    pools = [{"name": "encode", "num_gpus": 0, "num_cpus": 4}, {"name": "mixed", "num_gpus": 1}]
    nodes = [{"pool": "encode", "cpus": 6, "memory": "16Gi"}, {"pool": "mixed", "cpus": 8, "gpus": 1, "memory": "32Gi"}]
    config = load(None, {"model.path": "org/pictures", "pools": pools, "deploy.nodes": nodes})
    encode, mixed = service(kuberay(config))["rayClusterConfig"]["workerGroupSpecs"]
    assert [encode["groupName"], mixed["groupName"]] == ["encode", "mixed"]
    limits = [group["template"]["spec"]["containers"][0]["resources"]["limits"] for group in (encode, mixed)]
    assert [limit.get("nvidia.com/gpu") for limit in limits] == [None, "1"]
    (application,) = serve_config(config)["applications"]
    assert application["args"]["pools"][0]["role"] == "encode"


def test_head_runs_no_replica_and_no_ingress() -> None:
    """Streams survive the loss of the head: no process that they pass through is on it."""
    spec = service(kuberay(fleet()))
    assert spec["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert spec["excludeHeadPodFromServeSvc"]
    assert ray_up(fleet())["available_node_types"]["head"]["resources"] == {"CPU": 0}
    application = yaml.safe_load(spec["serveConfigV2"])["applications"][0]
    overrides = {
        deployment["name"]: deployment["ray_actor_options"]["num_cpus"] for deployment in application["deployments"]
    }
    assert overrides == {"ingress": 1}
    assert all(pool["num_cpus"] > 0 for pool in application["args"]["pools"])


def test_application_arguments_are_the_configuration_without_deploy() -> None:
    config = fleet()
    args = serve_config(config)["applications"][0]["args"]
    assert "deploy" not in args
    again = load(None, args)
    assert again == config.model_copy(update={"deploy": again.deploy})


def test_pod_has_longer_than_the_drain_timeout_to_end() -> None:
    documents = kuberay(fleet(http__drain_timeout_s=900))
    cluster = service(documents)["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > 900


def test_disruption_budgets_and_network_policy_select_the_pods() -> None:
    documents = kuberay(fleet())
    cluster = service(documents)["rayClusterConfig"]
    labels = [group["template"]["metadata"]["labels"] for group in cluster["workerGroupSpecs"]]
    assert all(label == {PART_OF: "crossdock"} for label in labels)
    budgets = [doc["spec"]["selector"]["matchLabels"] for doc in documents if doc["kind"] == "PodDisruptionBudget"]
    assert budgets == [{PART_OF: "crossdock", GROUP: pool} for pool in ("prefill", "decode")]
    policy = policies(documents)["crossdock"]
    assert policy["podSelector"]["matchLabels"] == {PART_OF: "crossdock"}


OURS = {"podSelector": {"matchLabels": {PART_OF: "crossdock"}}}
REDIS = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "crossdock-redis"}}}
PRIVATE = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"]


def namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def policies(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {doc["metadata"]["name"]: doc["spec"] for doc in documents if doc["kind"] == "NetworkPolicy"}


@pytest.mark.parametrize("overlay", ["cpu", "single-node", "fleet"])
def test_only_clients_prometheus_operator_and_the_cluster_itself_reach_its_pods(overlay: str) -> None:
    """Clients the API, Prometheus Ray's metrics, and the operator, in its own namespace, the dashboard."""
    documents = list(yaml.safe_load_all((MANIFESTS / overlay / "rayservice.yaml").read_text()))
    found = policies(documents)
    operator = namespace("kuberay-operator") | {
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    }
    assert found["crossdock"]["ingress"] == [
        {"from": [OURS]},
        {"from": [{"namespaceSelector": {}}], "ports": tcp(8000)},
        {"from": [namespace("monitoring")], "ports": tcp(8080)},
        {"from": [operator], "ports": tcp(8265)},
    ]
    assert found["crossdock"]["policyTypes"] == ["Ingress", "Egress"]
    assert not any(rule for name, spec in found.items() if name != "crossdock" for rule in spec.get("ingress", ()))
    elsewhere = policies(kuberay(fleet(deploy__operator_namespace="default")))["crossdock"]["ingress"]
    assert elsewhere[-1] == {"from": [operator | namespace("default")], "ports": tcp(8265)}


def test_pods_connect_to_what_the_configuration_names_alone() -> None:
    """Each other, names, and where they are configured Redis, the model's hub in the Internet, and the collector."""
    names = {"ports": [{"protocol": "UDP", "port": 53}, *tcp(53)]}
    hub = {"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": PRIVATE}}], "ports": tcp(443)}
    redis = {"to": [REDIS], "ports": tcp(6379)}
    egress = policies(kuberay(fleet()))["crossdock"]["egress"]
    assert egress == [{"to": [OURS]}, names, redis, hub]
    changed = fleet(
        model__path="/models/a",
        deploy__redis="elsewhere.example:7000",
        http__otlp_endpoint="http://otel:4318/v1/traces",
    )
    egress = policies(kuberay(changed))["crossdock"]["egress"]
    assert egress == [{"to": [OURS]}, names, {"ports": tcp(7000)}, {"ports": tcp(4318)}]
    cpu = policies(kuberay(load(MANIFESTS / "cpu/crossdock.yaml")))
    assert cpu["crossdock"]["egress"] == [{"to": [OURS]}, names], "the image has the model"


def test_kubernetes_api_is_open_to_the_autoscaler_alone() -> None:
    """Its network for the head, where nodes join and leave; its token for the autoscaler's container."""
    elastic, fixed = kuberay(fleet()), kuberay(load(MANIFESTS / "single-node/crossdock.yaml"))
    assert policies(elastic)["crossdock-head"] == {
        "podSelector": {"matchLabels": {PART_OF: "crossdock", "ray.io/node-type": "head"}},
        "policyTypes": ["Egress"],
        "egress": [{"ports": tcp(443, 6443)}],
    }
    assert policies(fixed).keys() == {"crossdock"}
    for documents in (elastic, fixed):
        cluster = service(documents)["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = group["template"]["spec"]
            assert pod["automountServiceAccountToken"] is False
            mounts = [mount["mountPath"] for each in pod["containers"] for mount in each["volumeMounts"]]
            assert not any("serviceaccount" in path for path in mounts)
            accounts = [volume for volume in pod["volumes"] if "serviceAccountToken" in json.dumps(volume)]
            assert len(accounts) == (documents is elastic and group is cluster["headGroupSpec"])
    (mount,) = service(elastic)["rayClusterConfig"]["autoscalerOptions"]["volumeMounts"]
    assert mount == {
        "name": "account",
        "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount",
        "readOnly": True,
    }


def test_tokens_are_on_in_all_manifests_that_start_ray() -> None:
    """Without one, every process that reaches a port of Ray runs code."""
    found = 0
    for path in sorted(MANIFESTS.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document and document.get("kind") == "RayService":
                assert document["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}, path
                found += 1
            if document and "head_start_ray_commands" in document:
                assert "-e RAY_AUTH_MODE=token" in document["docker"]["run_options"]
                assert document["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
                found += 1
    assert found == 4


def test_api_keys_file_is_mounted_where_the_configuration_names_it() -> None:
    config = fleet(http__api_keys_file="/run/keys/all.yaml")
    for group in service(kuberay(config))["rayClusterConfig"]["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        mount = next(mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "api-keys")
        assert mount == {"name": "api-keys", "mountPath": "/run/keys", "readOnly": True}
    assert "/run/keys/all.yaml" in ray_up(config)["file_mounts"]


def test_autoscaler_is_enabled_when_node_counts_may_change() -> None:
    assert service(kuberay(fleet()))["rayClusterConfig"]["enableInTreeAutoscaling"]
    single = service(kuberay(load(MANIFESTS / "single-node/crossdock.yaml")))
    assert "enableInTreeAutoscaling" not in single["rayClusterConfig"]
    assert ray_up(fleet())["max_workers"] == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deploy.nodes": [{"pool": "prefil", "cpus": 1, "memory": "1Gi"}]}, "deploy.nodes: there is no pool 'prefil'"),
        (
            {"deploy.nodes": [{"pool": "decode", "cpus": 64, "memory": "1Gi"}]},
            "have gpus: 0; one of its replicas needs 1",
        ),
        ({"deploy.nodes": [{"pool": "decode", "cpus": 1, "gpus": 1, "memory": "1Gi"}]}, "pools.decode.num_cpus"),
        (
            {
                "pools.decode.tensor_parallel_size": 2,
                "deploy.nodes": [{"pool": "decode", "cpus": 64, "gpus": 1, "memory": "1Gi"}],
            },
            "have gpus: 1; one of its replicas needs 2 .*2 ranks, which placement STRICT_PACK keeps together",
        ),
        (
            {
                "pools.decode.tensor_parallel_size": 2,
                "pools.decode.placement": "STRICT_SPREAD",
                "deploy.nodes": [{"pool": "decode", "cpus": 64, "gpus": 1, "memory": "1Gi"}],
            },
            "there are 1 of pool 'decode'; one of its replicas needs 2, one for each rank",
        ),
        ({"deploy.nodes": [{"pool": "decode", "cpus": 8, "gpus": 1, "memory": "lots"}]}, "deploy.nodes.0.memory"),
        ({"deploy.name": "Über"}, "deploy.name"),
        ({"deploy.imag": "x"}, "deploy.imag: no such setting; did you mean image?"),
        (
            {"deploy.nodes": [{"pool": "decode", "cpus": 8, "gpus": 1, "memory": "1Gi", "min": 3, "max": 2}]},
            r"min \(3\) must be at most max \(2\)",
        ),
    ],
)
def test_deployment_that_cannot_work_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(FLEET, changes)


def test_pool_without_nodes_and_key_in_the_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"deploy.nodes: pool 'decode' has none"):
        kuberay(fleet(deploy__nodes=[{"pool": "prefill", "cpus": 8, "gpus": 1, "memory": "1Gi"}]))
    open_ = fleet(http__api_keys=["hunter2"])
    for render in (kuberay, serve_config):
        with pytest.raises(ValueError, match=r"http\.api_keys_file") as error:
            render(open_)
        assert "hunter2" not in str(error.value)
    path = tmp_path / "crossdock.yaml"
    path.write_text("http: {api_keys: [hunter2]}")
    result = CliRunner().invoke(app, ["deploy", "render", str(path), "--target", "serve"])
    assert result.exit_code == 2
    assert "hunter2" not in result.output


def test_render_in_another_directory_prints_the_same() -> None:
    """Rendering depends on the file alone: the same on a laptop and in CI."""
    code = "import sys; from crossdock.cluster.cli import main; sys.argv[0] = 'crossdock'; main()"
    command = [sys.executable, "-c", code, "deploy", "render", str(FLEET)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", timeout=120)
    assert shown.stdout == (MANIFESTS / "fleet/rayservice.yaml").read_text(), "the command prints what it renders"
    assert json.dumps(list(yaml.safe_load_all(shown.stdout)))  # no aliases, dates or other YAML beyond JSON
    assert "&id" not in shown.stdout
    assert copy.deepcopy(kuberay(fleet())) == list(yaml.safe_load_all(shown.stdout))


def test_gpus_that_configuration_leaves_open_follow_the_nodes() -> None:
    """Pods may start before those with GPUs: the application must not take their absence for a cluster of CPUs."""
    pools = [{"name": "prefill"}, {"name": "decode"}]
    nodes = [
        {"pool": "prefill", "cpus": 4, "gpus": 2, "memory": "8Gi"},
        {"pool": "decode", "cpus": 4, "memory": "8Gi"},
    ]
    (application,) = serve_config(load(None, {"pools": pools, "deploy": {"nodes": nodes}}))["applications"]
    assert [pool["num_gpus"] for pool in application["args"]["pools"]] == [1, 0]
    (application,) = serve_config(load(None, {"pools": pools}))["applications"]
    assert all("num_gpus" not in pool for pool in application["args"]["pools"])


def test_compiled_kernels_outlive_a_pod_that_has_a_volume() -> None:
    spec = service(kuberay(fleet()))["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    (container,) = spec["containers"]
    cache = next(each["value"] for each in container["env"] if each["name"] == "CROSSDOCK_CACHE")
    volume = next(mount["name"] for mount in container["volumeMounts"] if cache.startswith(mount["mountPath"] + "/"))
    assert any("persistentVolumeClaim" in each for each in spec["volumes"] if each["name"] == volume)
