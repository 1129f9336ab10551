"""Does any stream break when replicas, nodes or Ray's GCS fail, or the application is upgraded?

    python benchmarks/chaos.py --faults 40 --seconds 660 --seed 0       # at most about 11 minutes

Prints a row per kind of fault: how often it happened, the streams that ended meanwhile, the broken ones, the longest
gap between two tokens, and the seconds until the pools were whole again.

Prefill and decode replicas run on Ray nodes of their own on this machine (`ray.cluster_utils.Cluster`: a raylet each),
the ingress on the head's. Clients stream without a pause and compare every token with the answer to the same prompt
before any fault. A fault begins when the pools are whole again after the last one. During a repair, the remaining
replicas hang or more clients leave, at random.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_SERVE_CONTROL_LOOP_INTERVAL_S="0.05",
    OMP_WAIT_POLICY="PASSIVE",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
)

import httpx
import psutil
import ray
import torch
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from tables import markdown

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.config_file import load
from crossdock.cluster.deploy.serve import serve_config
from crossdock.workers.model.checkpoint import default_model_dir

DECODES = 2
PROMPTS = 24
TOKENS = 40


def tiny_model(folder: Path) -> Path:
    """Make a random model of two layers with the default model's tokenizer. Its answers need no meaning here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    source = default_model_dir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, folder / file.name)
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


class NodeFleet:
    """A Ray cluster of one node for the head and ingress, and one for each replica."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ.update(RAY_gcs_storage="rocksdb", RAY_gcs_storage_path=str(folder / "gcs"))
        self.model = tiny_model(folder / "model")
        memory = {"object_store_memory": 80 << 20}
        head = {"num_cpus": 0, "labels": {"pool": "front"}, "include_dashboard": False, **memory}
        self.cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self.nodes = {f"decode-{number}": self._add("decode") for number in range(DECODES)}
        self.nodes["prefill-0"] = self._add("prefill")
        ray.init(address=self.cluster.address, log_to_driver=False, configure_logging=False)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=HTTPOptions(host="127.0.0.1", port=port))
        self.budget = 256
        self.deploy(self.budget)
        self.wait_until_whole(240)

    def lose_node(self, pool: str, rng: random.Random) -> None:
        """End the raylet and all processes of one node of the pool at once; another node takes its place."""
        name = rng.choice([name for name in self.nodes if name.startswith(pool)])
        self.cluster.remove_node(self.nodes[name], allow_graceful=False)
        time.sleep(0.5)
        self.nodes[name] = self._add(pool)

    def _add(self, pool: str) -> Any:
        return self.cluster.add_node(num_cpus=1, labels={"pool": pool}, object_store_memory=80 << 20)

    def config(self, budget: int) -> ClusterConfig:
        pools = [
            {"name": "prefill", "num_cpus": 1, "node_labels": {"pool": "prefill"}},
            {"name": "decode", "num_cpus": 1, "replicas": DECODES, "node_labels": {"pool": "decode"}},
        ]
        return load(
            None,
            {
                "model.path": str(self.model),
                "model.served_name": "tiny",
                "model.dtype": "float32",
                "http.port": int(self.url.rpartition(":")[2]),
                "http.replicas": 2,
                "engine.kv_cache_memory": "64MiB",
                "engine.max_num_batched_tokens": budget,
                "engine.admission": "queue",
                "transfer.deadline_s": 4,
                "transfer.grace_s": 0.2,
                "pools": pools,
            },
        )

    def deploy(self, budget: int) -> None:
        """Deploy as `serve deploy` does. Returns when Serve has the new configuration."""
        document = serve_config(self.config(budget))
        front = {"num_cpus": 0, "label_selector": {"pool": "front"}}
        document["applications"][0]["deployments"] = [{"name": "ingress", "ray_actor_options": front}]
        self.budget = budget
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(document))

    # -- state ---------------------------------------------------------------------------------------------------------

    def replicas(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = httpx.get(f"{self.url}/v1/replicas", timeout=10).json()["data"]
        except (httpx.HTTPError, ValueError, KeyError):
            return []
        return found

    def is_whole(self) -> bool:
        """Return whether every ingress lists every replica, with the newest configuration.

        Serve's proxy chooses the ingress; six requests are enough to reach both.
        """
        for _ in range(6):
            replicas = self.replicas()
            pools = collections.Counter(replica["pool"] for replica in replicas)
            budgets = {replica["profile"]["max_num_batched_tokens"] for replica in replicas}
            if pools != {"prefill": 1, "decode": DECODES} or budgets != {self.budget}:
                return False
        return True

    def wait_until_whole(self, seconds: float = 120) -> float:
        """Return the seconds until the pools were whole. Raises TimeoutError after `seconds`."""
        began = time.monotonic()
        while not self.is_whole():
            if time.monotonic() - began > seconds:
                raise TimeoutError(f"not whole in {seconds:.0f} s: {serve.status()}")
            time.sleep(0.2)
        return time.monotonic() - began

    def processes(self, pool: str) -> list[psutil.Process]:
        """Return the living processes of the replicas of a pool."""
        name = f"ServeReplica:crossdock:{pool}"
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = " ".join(process.info["cmdline"] or ())
            if name in line and process.info["status"] != psutil.STATUS_ZOMBIE and self._is_ours(process):
                found.append(process)
        return found

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            parents = {parent.pid for parent in process.parents()}
        except psutil.NoSuchProcess:
            return False
        return os.getpid() in parents

    def owned_pages(self) -> int:
        return sum(replica["pages"]["owned"] + replica["pages"]["quarantined"] for replica in self.replicas())

    def close(self) -> None:
        serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()


@dataclass(slots=True)
class Clients:
    """Clients that stream without a pause, and the count of what happened to their streams."""

    url: str
    expected: dict[int, list[int]] = field(default_factory=dict)
    done: int = 0
    left: int = 0
    problems: list[str] = field(default_factory=list)
    longest_gap: float = 0.0
    in_flight: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def prompt(self, number: int) -> list[int]:
        length = (16, 40, 90, 250, 600)[number % 5]
        return [(number * 977 + 31 * place * place + 7 * place) % 40_000 + 100 for place in range(length)]

    def stream(self, number: int, leave_after: int | None = None) -> list[int]:
        """Return the tokens of one stream. `leave_after`: close it after so many.

        Raises:
            RuntimeError: the server answered with an error, or the stream ended too early.
        """
        body = {"model": "tiny", "prompt": self.prompt(number), "max_tokens": TOKENS, "ignore_eos": True}
        body |= {"stream": True, "temperature": 0, "return_token_ids": True}
        tokens: list[int] = []
        last = time.monotonic()
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=90) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.read().decode()[:200]}")
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if not data.startswith("{"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or ()
                now = time.monotonic()
                self.longest_gap, last = max(self.longest_gap, now - last), now
                if leave_after is not None and len(tokens) >= leave_after:
                    return tokens
        if len(tokens) != TOKENS:
            raise RuntimeError(f"the stream ended after {len(tokens)} tokens")
        return tokens

    def learn(self) -> None:
        for number in range(PROMPTS):
            self.expected[number] = self.stream(number)

    def start(self, clients: int, seed: int) -> None:
        for number in range(clients):
            thread = threading.Thread(target=self._run, args=(random.Random(f"{seed} {number}"),), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            number = rng.randrange(PROMPTS)
            self.in_flight += 1
            try:
                tokens = self.stream(number)
            except Exception as error:
                self.problems.append(f"{type(error).__name__}: {error}")
                time.sleep(0.2)
            else:
                self.done += 1
                if tokens != self.expected[number]:
                    self.problems.append(f"other tokens for prompt {number}")
            finally:
                self.in_flight -= 1


# -- faults ------------------------------------------------------------------------------------------------------------


def kill(pool: str) -> Callable[[NodeFleet, Clients, random.Random], None]:
    def fault(fleet: NodeFleet, clients: Clients, rng: random.Random) -> None:
        rng.choice(fleet.processes(pool)).kill()

    return fault


def hang(pool: str) -> Callable[[NodeFleet, Clients, random.Random], None]:
    def fault(fleet: NodeFleet, clients: Clients, rng: random.Random) -> None:
        with suppress(psutil.NoSuchProcess, IndexError):  # during a repair there may be none
            process = rng.choice(fleet.processes(pool))
            process.send_signal(signal.SIGSTOP)
            time.sleep(rng.choice([0.5, 2, 6]))
            process.send_signal(signal.SIGCONT)

    return fault


def lose_node(pool: str) -> Callable[[NodeFleet, Clients, random.Random], None]:
    def fault(fleet: NodeFleet, clients: Clients, rng: random.Random) -> None:
        fleet.lose_node(pool, rng)

    return fault


def restart_gcs(fleet: NodeFleet, clients: Clients, rng: random.Random) -> None:
    fleet.cluster.head_node.kill_gcs_server()
    time.sleep(rng.choice([0.5, 2]))
    fleet.cluster.head_node.start_gcs_server()


def upgrade(fleet: NodeFleet, clients: Clients, rng: random.Random) -> None:
    """Deploy another token budget, so that every replica of every deployment is replaced, one by one."""
    fleet.deploy(256 if fleet.budget != 256 else 192)


def leave(fleet: NodeFleet, clients: Clients, rng: random.Random) -> None:
    """Close four streams before their first token, or later."""
    for _ in range(4):
        try:
            clients.stream(rng.randrange(PROMPTS), leave_after=rng.choice([0, 1, 5, 20]))
        except Exception as error:
            clients.problems.append(f"{type(error).__name__}: {error}")
        clients.left += 1


FAULTS = {
    "prefill replica killed": (kill("prefill"), 4),
    "decode replica killed": (kill("decode"), 6),
    "prefill replica hangs 0.5 to 6 s": (hang("prefill"), 3),
    "decode replica hangs 0.5 to 6 s": (hang("decode"), 3),
    "prefill node lost": (lose_node("prefill"), 1),
    "decode node lost": (lose_node("decode"), 2),
    "GCS killed and restarted": (restart_gcs, 1),
    "rolling upgrade": (upgrade, 1),
    "four clients leave": (leave, 5),
}
DURING_REPAIR = [name for name in FAULTS if "hangs" in name or "leave" in name]


@dataclass(slots=True)
class FaultTally:
    """The effects of one kind of fault."""

    faults: int = 0
    during_repair: int = 0  # of these, during the repair of another fault; their effects count for both
    streams: int = 0  # that ended during the fault and its repair
    problems: list[str] = field(default_factory=list)
    repair: list[float] = field(default_factory=list)  # seconds until the pools were whole
    longest_gap: float = 0.0


@contextmanager
def counted(clients: Clients, outcome: FaultTally) -> Iterator[None]:
    """Add what happens to the streams meanwhile to the tally."""
    done, problems, gap = clients.done, len(clients.problems), clients.longest_gap
    clients.longest_gap = 0.0
    yield
    outcome.faults += 1
    outcome.streams += clients.done - done
    outcome.problems += clients.problems[problems:]
    outcome.longest_gap = max(outcome.longest_gap, clients.longest_gap)
    clients.longest_gap = max(clients.longest_gap, gap)


def afflict(fleet: NodeFleet, clients: Clients, name: str, rng: random.Random, outcomes: dict[str, FaultTally]) -> None:
    """Cause one fault and wait until the pools are whole again."""
    with counted(clients, outcomes[name]):
        FAULTS[name][0](fleet, clients, rng)
        began = time.monotonic()
        time.sleep(0.3)  # until Serve has noticed a loss
        while not fleet.is_whole():
            if time.monotonic() - began > 240:
                raise TimeoutError(f"not whole in 240 s: {serve.status()}")
            time.sleep(0.2)
            if name not in DURING_REPAIR:
                other = rng.choice(DURING_REPAIR)
                with counted(clients, outcomes[other]):
                    FAULTS[other][0](fleet, clients, rng)
                outcomes[other].during_repair += 1
        outcomes[name].repair.append(time.monotonic() - began)


@contextmanager
def fleet_under_load(num_clients: int, seed: int) -> Iterator[tuple[NodeFleet, Clients]]:
    folder = Path(tempfile.mkdtemp(prefix="cd-chaos-", dir="/tmp"))
    fleet = NodeFleet(folder)
    clients = Clients(fleet.url)
    try:
        clients.learn()
        clients.start(num_clients, seed)
        yield fleet, clients
    finally:
        clients.stop()
        fleet.close()
        shutil.rmtree(folder, ignore_errors=True)


def wait_until_idle(fleet: NodeFleet, seconds: float = 30) -> int:
    """Return the pages that are still owned or may still be written to when no request is in flight."""
    deadline = time.monotonic() + seconds
    while (owned := fleet.owned_pages()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return owned


def report(outcomes: dict[str, FaultTally], clients: Clients, pages_left: int) -> None:
    heads = ("fault", "times", "of these during a repair", "streams that ended meanwhile", "broken", "longest gap")
    print("\n" + markdown([(*heads, "whole again, median", "longest"), *table_rows(outcomes)]))
    faults = sum(outcome.faults for outcome in outcomes.values())
    print(f"{faults} faults, {clients.done} streams, {len(clients.problems)} broken, {pages_left} pages left")
    for problem in collections.Counter(clients.problems).most_common(10):
        print(problem)


def table_rows(outcomes: dict[str, FaultTally]) -> Iterator[list[str]]:
    for name, outcome in outcomes.items():
        if outcome.faults:
            counts = (outcome.faults, outcome.during_repair, outcome.streams, len(outcome.problems))
            repair = outcome.repair
            seconds = (f"{median(repair):.1f} s", f"{max(repair):.1f} s") if repair else ("", "")
            yield [name, *map(str, counts), f"{outcome.longest_gap:.1f} s", *seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no fault later than this")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(FAULTS), help="faults of one kind")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    names = [given.only] if given.only else list(FAULTS)
    weights = [FAULTS[name][1] for name in names]
    outcomes = {name: FaultTally() for name in names}
    began = time.monotonic()
    with fleet_under_load(given.clients, given.seed) as (fleet, clients):
        print(f"whole after {time.monotonic() - began:.0f} s", flush=True)
        for number in range(given.faults):
            if time.monotonic() - began > given.seconds:
                break
            name = names[number % len(names)] if number < len(names) else rng.choices(names, weights)[0]
            afflict(fleet, clients, name, rng, outcomes)
            repair = outcomes[name].repair[-1]
            print(f"{number + 1:4} {name}: whole in {repair:.1f} s; {len(clients.problems)} problems", flush=True)
        clients.stop()
        left = wait_until_idle(fleet)
    report(outcomes, clients, left)
    if given.json:
        figures = {name: asdict(outcome) for name, outcome in outcomes.items()}
        given.json.write_text(json.dumps({"outcomes": figures, "streams": clients.done, "pages_left": left}))


if __name__ == "__main__":
    main()
