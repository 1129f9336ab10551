"""An ingress that starts on a real cluster: once it is ready all its paths answer, and it knows of an earlier pause."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cluster.ports import free_port
from tests.cluster.serve.pools.served_pools import config_of, deployed
from tests.waiting import eventually
from tests.workers.lora_oracle import tuned

PROMPT = {"prompt": "Once", "max_tokens": 4, "min_tokens": 4, "temperature": 0}
FIRST_ANSWERS = (
    ("GET", "/metrics", None),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "one", "lora_path": "one"}),
    ("GET", "/v1/responses/resp_absent", None),
    ("GET", "/v1/replicas", None),
    ("POST", "/pause?mode=keep", {}),
    ("POST", "/resume", {}),
    ("GET", "/is_sleeping", None),
)


class Served(NamedTuple):
    url: str
    firsts: dict[str, int]  # statuses of the first answers, by path

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """Return an answer; None: nothing listens, or the connection broke."""
        try:
            return httpx.request(method, self.url + path, timeout=240, **options)
        except httpx.TransportError:
            return None

    def status(self, path: str) -> int:
        answer = self.ask("GET", path)
        return 0 if answer is None else answer.status_code

    def has(self, path: str, value: dict[str, bool]) -> bool:
        answer = self.ask("GET", path)
        return answer is not None and answer.status_code == 200 and answer.json() == value


@pytest.fixture(scope="module")
def served(ray_cluster: None, small_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of one ingress, which a client has asked as soon as it was ready."""
    folder = tmp_path_factory.mktemp("adapters")
    tuned(AutoModelForCausalLM.from_pretrained(small_model_dir, dtype=torch.float32), folder / "one", 1)
    settings = {"http.rollouts": True, "engine.enable_lora": True, "http.lora_folder": str(folder)}
    config = config_of(small_model_dir, free_port(), ({"name": "mixed"},), settings)
    found = Served(f"http://127.0.0.1:{config.http.port}", {})
    stops = threading.Event()

    def ask_at_once() -> None:
        while found.status("/ready") != 200:
            if stops.wait(0.02):  # without a pause the questions take a core from the start
                return
        for method, path, body in FIRST_ANSWERS:
            answer = found.ask(method, path, json=body)
            found.firsts[path] = 0 if answer is None else answer.status_code

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask_at_once)
        try:
            with deployed(config, 1):
                asking.result(240)
                yield found
        finally:
            stops.set()


def test_paths_that_ask_other_ingresses_answer_once_the_server_is_ready(served: Served) -> None:
    assert served.firsts == {path: 404 if "absent" in path else 200 for _, path, _ in FIRST_ANSWERS}


def kill_ingress(port: int) -> None:
    """End the process that listens at a port as `kill -9` does, and wait until it is gone."""
    [process] = [each for each in psutil.process_iter() if listens(each, port)]
    process.kill()
    process.wait(240)


def listens(process: psutil.Process, port: int) -> bool:
    try:
        found = process.net_connections("tcp")
    except psutil.Error:
        return False
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)


@pytest.mark.parametrize(
    ("stop", "question", "go_on"),
    [("/pause?mode=keep", "is_paused", "/resume"), ("/sleep?level=1", "is_sleeping", "/wake_up")],
)
def test_pause_and_sleep_survive_the_loss_of_the_only_ingress(
    served: Served, stop: str, question: str, go_on: str
) -> None:
    """A trainer that asks would go on. Nothing is generated until an operator says so."""
    before = served.ask("POST", "/v1/completions", json=PROMPT)
    assert before is not None
    assert served.has(f"/{question}", {question: False})
    assert served.status("/ready") == 200
    stopped = served.ask("POST", stop)
    assert stopped is not None
    assert stopped.status_code == 200, stopped.text
    assert served.status("/ready") == 503
    kill_ingress(httpx.URL(served.url).port or 0)
    eventually(lambda: served.status("/health") == 200, "no ingress comes up again")
    assert served.has(f"/{question}", {question: True})
    assert served.has("/is_paused", {"is_paused": True})
    assert served.status("/ready") == 503
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(served.ask, "POST", "/v1/completions", json=PROMPT)
        gone_on = served.ask("POST", go_on)
        assert gone_on is not None
        assert gone_on.status_code == 200, gone_on.text
        answer = waiting.result(240)
    assert answer is not None
    assert answer.json()["choices"] == before.json()["choices"]
    assert served.status("/ready") == 200
