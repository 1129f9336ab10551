"""`ray up` brings up the cluster of our manifest, on machines that it reaches by SSH alone."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from tests.cluster.deploy import streaming_clients
from tests.cluster.deploy.machines import HOME, KEY, NETWORK, Machine, machines, why_not
from tests.waiting import eventually
from tests.workers.architectures import build

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
HEAD, WORKERS = f"{NETWORK}.2", [f"{NETWORK}.3", f"{NETWORK}.4"]
SECRET = "sk-ray-up-soak"
CLUSTER = f"{HOME}/ray-cluster.yaml"
TOKEN = "~/.ray/auth_token"
MANIFESTS = Path(__file__).parents[3] / "manifests"


def cluster_file() -> dict[str, Any]:
    """Return the manifest for machines of your own, with these two workers, which are of one pool."""
    cluster: dict[str, Any] = yaml.safe_load((MANIFESTS / "ray-cluster-local.yaml").read_text())
    starts = cluster["worker_start_ray_commands"]
    cases = " ".join(
        f"*' {address} '*) resources='--num-cpus=2 --num-gpus=0 --labels=shelf=left';;" for address in WORKERS
    )
    starts[-1] = re.sub(r" in .* \*\) exit 1;;", f" in {cases} *) exit 1;;", starts[-1], flags=re.DOTALL)
    return cluster | {
        "max_workers": len(WORKERS),
        "provider": {"type": "local", "head_ip": HEAD, "worker_ips": WORKERS},
        "auth": {"ssh_user": "root", "ssh_private_key": KEY},
        "file_mounts": {TOKEN: TOKEN, "/tmp/keys/api-keys.yaml": "~/.crossdock/api-keys.yaml"},
    }


def serve_file(budget: int) -> dict[str, Any]:
    """Return the manifest of the application with two replicas and two ingresses. `budget`: max_num_batched_tokens."""
    document: dict[str, Any] = yaml.safe_load((MANIFESTS / "serve.yaml").read_text())
    document["http_options"]["host"] = "0.0.0.0"
    (application,) = document["applications"]
    application["args"] = {
        "model": {"path": "/tmp/model", "served_name": "small", "dtype": "float32"},
        "engine": {"kv_cache_memory": "40MiB", "max_num_batched_tokens": budget, "admission": "queue"},
        "pools": [{"name": "mixed", "replicas": 2, "num_cpus": 1, "node_labels": {"shelf": "left"}}],
        "http": {"host": "0.0.0.0", "replicas": 2, "api_keys_file": "/tmp/keys/api-keys.yaml"},
    }
    application["deployments"] = [{"name": "ingress", "ray_actor_options": {"num_cpus": 1}}]
    return document


@pytest.fixture
def cluster(tmp_path: Path, tokenizers: dict[str, PreTrainedTokenizerFast]) -> Iterator[dict[str, Machine]]:
    """A laptop and three machines that have the model, and as yet no Ray."""
    model = tmp_path / "model"
    tokenizers["byte_level"].save_pretrained(model)
    build("llama", {}).save_pretrained(model)
    environment = {
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.1",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # a worker waits so long for its head; by default a minute
    }
    with machines(tmp_path, ["laptop", "head", "one", "two"], environment) as made:
        for machine in made.values():
            shutil.copytree(model, machine.folder / "model")
        keys = made["laptop"].home / ".crossdock"
        keys.mkdir()
        (keys / "api-keys.yaml").write_text(yaml.safe_dump([{"key": SECRET}]))
        yield made


def budgets(laptop: Machine) -> dict[str, int]:
    """Return max_num_batched_tokens of each replica, as one of the ingresses knows it."""
    answer = laptop.run(f"curl -sS -H 'Authorization: Bearer {SECRET}' http://{WORKERS[0]}:8000/v1/replicas || true")
    try:
        return {each["replica"]: each["profile"]["max_num_batched_tokens"] for each in json.loads(answer)["data"]}
    except (ValueError, LookupError):  # Serve's proxy is not up, or has no ingress yet
        return {}


def wait_for_budget(laptop: Machine, budget: int, seconds: float = 240) -> dict[str, int]:
    """Wait until there are two replicas and both have this budget."""
    deadline = time.monotonic() + seconds
    while len(found := budgets(laptop)) != 2 or set(found.values()) != {budget}:
        assert time.monotonic() < deadline, (
            f"{found}\n{laptop.run(f'ray exec {CLUSTER} {chr(34)}serve status{chr(34)}')}"
        )
        time.sleep(0.5)
    return found


def test_cluster_comes_up_over_ssh_serves_upgrades_without_losing_a_stream_and_goes_down(
    cluster: dict[str, Machine], tmp_path: Path
) -> None:
    laptop, began = cluster["laptop"], time.monotonic()

    def note(what: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s  {what}", flush=True)  # noqa: T201  # shown by pytest -s

    bystander = tmp_path / "raylet"  # `ray stop` ends every process of this name that it finds
    bystander.symlink_to("/bin/sleep")
    ours = subprocess.Popen([bystander, "900"])
    theirs = subprocess.Popen(cluster["head"].command("cp /bin/sleep /tmp/raylet; exec /tmp/raylet 900"))
    try:
        (laptop.home / "ray-cluster.yaml").write_text(yaml.safe_dump(cluster_file()))
        laptop.run("ray get-auth-token --generate")
        eventually(lambda: cluster["head"].processes("/tmp/raylet"))
        laptop.run(f"ray up --yes --no-config-cache {CLUSTER}")
        note("ray up --yes ray-cluster.yaml: the head is up")
        assert not cluster["head"].processes("/tmp/raylet"), "this is how ray stop ends what is not its own"
        theirs.wait(240)
        assert ours.poll() is None

        with subprocess.Popen(laptop.command(f"exec ray dashboard {CLUSTER}"), stdin=subprocess.PIPE) as forward:
            try:
                deploy(laptop, 128)
                before = wait_for_budget(laptop, 128)
                note("serve deploy serve.yaml: two replicas answer")
                assert completion_tokens(laptop) == 8
                note("curl http://10.77.0.3:8000/v1/completions: 8 tokens")
                replicas = [cluster[name].processes("ray::ServeReplica:crossdock:mixed") for name in ("one", "two")]
                assert sum(map(len, replicas)) == 2
                assert not cluster["head"].processes("ray::ServeReplica")
                outcome = upgraded(laptop, before, note)
            finally:
                forward.kill()
        assert outcome["problems"] == []
        assert outcome["ended"] >= 4
        laptop.run(f"ray down --yes {CLUSTER}")
        note("ray down --yes ray-cluster.yaml: the head is down")
        assert not cluster["head"].processes("gcs_server")
        wait_until_ended(cluster, "ray::ServeReplica")
        note("the workers: their replicas have ended")
        wait_until_ended(cluster, "ray::")
        note("the workers: Ray has ended")
        assert ours.poll() is None
    finally:
        ours.kill()
        ours.wait()
        theirs.kill()
        theirs.wait()


def completion_tokens(laptop: Machine) -> int:
    """Return how many tokens a completion has that one of the ingresses serves."""
    body = json.dumps({"model": "small", "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True})
    headers = f"-H 'Authorization: Bearer {SECRET}' -H 'Content-Type: application/json'"
    answer = json.loads(laptop.run(f"curl -sSf {headers} -d '{body}' http://{WORKERS[0]}:8000/v1/completions"))
    return int(answer["usage"]["completion_tokens"])


def wait_until_ended(cluster: dict[str, Machine], name: str, seconds: float = 180) -> None:
    """Wait until no worker has a process of this name."""
    ended = lambda: not any(cluster[worker].processes(name) for worker in ("one", "two"))  # noqa: E731
    eventually(ended, f"{name} goes on without a head", seconds)


def deploy(laptop: Machine, budget: int) -> None:
    """Deploy the application through the forwarded port of the dashboard."""
    (laptop.home / "serve.yaml").write_text(yaml.safe_dump(serve_file(budget)))
    laptop.run("until curl -s http://127.0.0.1:8265 > /dev/null; do sleep 0.2; done", 60)
    laptop.run("RAY_AUTH_MODE=token serve deploy -a http://127.0.0.1:8265 serve.yaml")


def upgraded(laptop: Machine, before: dict[str, int], note: Any) -> dict[str, Any]:
    """Replace both replicas while clients stream through both proxies. Return what the clients saw."""
    (laptop.home / "clients.py").write_text(Path(streaming_clients.__file__).read_text())
    urls = " ".join(f"http://{address}:8000" for address in WORKERS)
    command = laptop.command(f"python clients.py {SECRET} {urls}")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
        time.sleep(5)
        deploy(laptop, 160)
        after = wait_for_budget(laptop, 160)
        note("serve deploy of a new configuration, under load: two other replicas answer")
        assert not after.keys() & before.keys()
        time.sleep(5)
        printed, _ = clients.communicate(timeout=240)
    outcome: dict[str, Any] = json.loads(printed)
    note(f"{outcome['ended']} streams ended in full, problems: {outcome['problems']}")
    return outcome
