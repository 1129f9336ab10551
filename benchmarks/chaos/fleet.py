"""A Ray cluster on this machine with the application under test: two ingresses, and pools of every role."""

import collections
import ctypes
import os
import random
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
import torch
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve._private.common import DeploymentID
from ray.serve.config import ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from streams import MAX_MODEL_LEN, POISON, VOCABULARY

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.config_file import load
from crossdock.cluster.watch.scrape import Scrape
from crossdock.workers.model.weights.checkpoint import default_model_dir
from crossdock.workers.schedule.request.submission import Adapter

APP = "crossdock"
INGRESSES = 2
_STARTING_S = 240.0  # until the pools are whole, at most: many processes import torch on few cores
_NO_STEPS = 10**14  # steps after this one are none
_PR_SET_CHILD_SUBREAPER = 36


def tiny_model(folder: Path, tokenizer: Any = None, num_heads: int = 4) -> Path:
    """Make a random model of two layers. Its answers need no meaning here. `tokenizer`: None is the default model's.

    With few tokens to choose from, a step spends its time on what is tested here, not on choosing.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        for file in default_model_dir().iterdir():
            if file.suffix != ".safetensors" and file.name != "config.json":
                shutil.copy(file, folder / file.name)
    else:
        tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY if tokenizer is None else len(tokenizer),
        eos_token_id=None if tokenizer is None else tokenizer.eos_token_id,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        max_position_embeddings=4096,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def make_adapters(model: Path, folder: Path) -> list[Adapter]:
    """Write six random adapters for all linears of a model of `tiny_model`, each under a name of its own."""
    from transformers import AutoModelForCausalLM

    from tests.workers.lora_oracle import tuned  # needs peft

    module = AutoModelForCausalLM.from_pretrained(model)
    return [tuned(module, folder / f"adapter-{seed}", seed).adapter for seed in range(6)]


class NodeFleet:
    """A Ray cluster of one node for the head and the ingresses, and others for the replicas of each pool."""

    def __init__(self, folder: Path, model: Path, pools: dict[str, int], settings: dict[str, Any]) -> None:
        """`pools`: replicas by pool. `settings`: of the configuration, by dotted path, beside those of `config`."""
        adopt_orphans()
        self.model, self.pools, self.settings, self.budget = model, pools, settings, 256
        self.shared_memory = set(os.listdir("/dev/shm"))
        os.environ.update(RAY_gcs_storage="rocksdb", RAY_gcs_storage_path=str(folder / "gcs"))
        os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"  # of Serve's processes
        memory = {"object_store_memory": 80 << 20}
        head = {"num_cpus": 0, "labels": {"pool": "front"}, "include_dashboard": False, **memory}
        self.cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self.nodes = {name: self._add(name.split("-")[0]) for name in ("prefill-0", "decode-0", "decode-1")}
        ray.init(address=self.cluster.address, log_to_driver=False, configure_logging=False)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._incarnations: set[str] = set()  # of the replicas; the answer leaves out the steps of those named
        serve.start(proxy_location=ProxyLocation.Disabled)
        self.deploy(self.budget)

    def lose_node(self, rng: random.Random) -> None:
        """End the raylet and all processes of one node of replicas at once; another node takes its place."""
        name = rng.choice(list(self.nodes))
        self.cluster.remove_node(self.nodes[name], allow_graceful=False)
        time.sleep(0.5)
        self.nodes[name] = self._add(name.split("-")[0])

    def _add(self, pool: str) -> Any:
        num_cpus = self.pools[pool] + 1  # one more, for an upgrade
        return self.cluster.add_node(num_cpus=num_cpus, labels={"pool": pool}, object_store_memory=80 << 20)

    def config(self, budget: int) -> ClusterConfig:
        pools = [
            {"name": name, "num_cpus": 1, "replicas": replicas, "node_labels": {"pool": name}}
            for name, replicas in self.pools.items()
        ]
        given = {
            "model.path": str(self.model),
            "model.served_name": "tiny",
            "model.dtype": "float32",
            "model.max_model_len": MAX_MODEL_LEN,
            "http.port": self.port,
            "http.replicas": INGRESSES,
            "http.direct": True,
            "http.drain_timeout_s": 20,
            "engine.max_num_batched_tokens": budget,
            "engine.fault_token_ids": list(POISON),
            "transfer.host": "127.0.0.1",
            "transfer.deadline_s": 4,
            "transfer.grace_s": 0.2,
            "pools": pools,
        }
        return load(None, given | self.settings)

    def deploy(self, budget: int) -> None:
        """Deploy as `serve deploy` does. Returns when Serve has the new configuration."""
        quick = {"health_check_period_s": 1.0}  # Serve notices a lost replica after a second, instead of up to ten
        front = {"num_cpus": 0, "label_selector": {"pool": "front"}}
        application = {
            "name": APP,
            "import_path": "faulty:build",
            "args": self.config(budget).model_dump(mode="json", exclude_unset=True),
            "external_scaler_enabled": True,  # so that `resize` may
            "deployments": [
                {"name": "ingress", "ray_actor_options": front, **quick},
                *({"name": name, **quick} for name in self.pools),
            ],
        }
        document = {"proxy_location": "Disabled", "applications": [application]}
        document["logging_config"] = {"enable_access_log": False}
        self.budget = budget
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(document))

    def resize(self, pool: str, replicas: int) -> None:
        """Change the size of a pool as a scaler would: Serve drains what it stops."""
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        ray.get(controller.update_deployment_replicas.remote(DeploymentID(pool, APP), replicas))

    def assign_role(self, pool: str, replica: str, role: str) -> None:
        handle = serve.get_deployment_handle(pool, APP)
        handle.options(session_id=replica).assign_role.remote(role).result(timeout_s=10)

    # -- state ---------------------------------------------------------------------------------------------------------

    def replicas(self) -> list[dict[str, Any]]:
        """Return the state of each replica that the asked ingress knows; empty where no answer comes in time."""
        seen = [("after", f"{incarnation}:{_NO_STEPS}") for incarnation in self._incarnations]
        try:
            found: list[dict[str, Any]] = httpx.get(f"{self.url}/v1/replicas", params=seen, timeout=7).json()["data"]
        except (httpx.HTTPError, ValueError, KeyError):
            return []
        self._incarnations = {replica["incarnation"] for replica in found}
        return found

    def listed(self) -> collections.Counter[str]:
        return collections.Counter(replica["pool"] for replica in self.replicas())

    def num_listeners(self) -> int:
        """Return how many ingresses listen on the port."""
        wanted = f":{self.port:04X}"
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        return sum(line.split()[1].endswith(wanted) and line.split()[3] == "0A" for line in lines)

    def is_whole(self) -> bool:
        """Return whether both ingresses listen, and list every replica, with the newest configuration.

        The kernel chooses the ingress; six connections reach both, but for one time in thirty-two.
        """
        if self.num_listeners() < INGRESSES:
            return False
        for _ in range(6):
            replicas = self.replicas()
            budgets = {replica["profile"]["max_num_batched_tokens"] for replica in replicas}
            if collections.Counter(replica["pool"] for replica in replicas) != self.pools or budgets != {self.budget}:
                return False
        return True

    def wait_until_whole(self, seconds: float = _STARTING_S) -> float:
        """Return the seconds until the pools were whole. Raises TimeoutError after `seconds`."""
        began = time.monotonic()
        while not self.is_whole():
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not whole in {seconds:.0f} s: {self.listed()}, {serve.status()}")
            time.sleep(0.3)
        return time.monotonic() - began

    def processes(self, deployment: str) -> list[psutil.Process]:
        """Return the living processes of the replicas of a deployment, oldest first."""
        found = []
        for process in psutil.Process().children(recursive=True):
            try:
                line = " ".join(process.cmdline())
                if f"ServeReplica:{APP}:{deployment}" in line and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return sorted(found, key=lambda process: process.create_time())

    # -- the end -------------------------------------------------------------------------------------------------------

    def wait_until_idle(self, seconds: float = 60) -> dict[str, int]:
        """Return the requests that still run and the pages that are not free, `seconds` after the last stream."""
        deadline = time.monotonic() + seconds
        while True:
            left: collections.Counter[str] = collections.Counter()
            for replica in self.replicas():
                left["pages"] += replica["pages"]["owned"] + replica["pages"]["quarantined"]
                left["requests at replicas"] += sum(replica["requests"].values())
            left["requests at ingresses"] = self._at_ingresses()
            if not left.total() or time.monotonic() > deadline:
                return dict(left)
            time.sleep(0.5)

    def _at_ingresses(self) -> int:
        try:
            text = httpx.get(f"{self.url}/metrics", timeout=30).text
        except httpx.HTTPError:
            return -1
        return int(Scrape.parse(text, 0.0).total("crossdock_ingress_requests") or 0)

    def close(self) -> list[str]:
        """End everything. Return what is left: processes, a listening port, files in /dev/shm."""
        serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()
        deadline = time.monotonic() + 20
        while (left := self._leftovers()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left

    def _leftovers(self) -> list[str]:
        left = [f"port {self.port}"] if self.num_listeners() else []
        for process in psutil.Process().children(recursive=True):
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"process {process.pid}: {' '.join(process.cmdline())[:100]}")
            except psutil.NoSuchProcess:
                continue
        return left + [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self.shared_memory]


def adopt_orphans() -> None:
    """Become the parent of all processes below this one whose own parent ends, so that none escapes the last check."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("prctl failed")
