"""Limits of a key over sockets at two ingresses that can ask each other."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from crossdock.cluster.api.http import limits
from crossdock.cluster.api.http.limits import READS_PER_MINUTE
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.scripted_api import ScriptedDispatcher, Serve, refused, two_ingresses
from tests.waiting import eventually

KEYS = [{"key": "running", "max_concurrent_requests": 2}]


@pytest.fixture
def ingresses(engine: ScriptedDispatcher, tokenizer: ModelTokenizer) -> Iterator[list[httpx.Client]]:
    with two_ingresses(engine, tokenizer, api_keys=KEYS) as ingresses:
        yield ingresses


def post(http: httpx.Client, key: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "Hi", "max_tokens": 1, **fields}
    return http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


def test_running_requests_count_wherever_they_run(ingresses: list[httpx.Client], engine: ScriptedDispatcher) -> None:
    gate = threading.Event()

    def held(submission: Any) -> Iterator[Any]:
        while not gate.is_set():
            yield 0.01
        yield from engine.story(submission)

    engine.script = held  # type: ignore[assignment]
    begun = [threading.Thread(target=post, args=(http, "running")) for http in ingresses]
    for thread in begun:
        thread.start()
    eventually(lambda: engine.running == 2)
    for http in ingresses:
        with httpx.Client(base_url=http.base_url, timeout=240) as other:
            assert "2 requests at once" in refused(post(other, "running"), 429)["message"]
    gate.set()
    for thread in begun:
        thread.join()
    assert post(ingresses[0], "running").status_code == 200


def test_reads_of_a_key_are_limited(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MINUTE", 1e6)  # else a slow machine reads no faster than the limit allows
    http = serve(api_keys=("a", "b"))

    def get(key: str) -> httpx.Response:
        return http.get("/v1/models", headers={"authorization": f"Bearer {key}"})

    answers = [get("a") for _ in range(READS_PER_MINUTE)]
    assert {answer.status_code for answer in answers} == {200}
    assert "GET" in refused(get("a"), 429)["message"]
    assert get("b").status_code == 200
    assert http.get("/health").status_code == 200
