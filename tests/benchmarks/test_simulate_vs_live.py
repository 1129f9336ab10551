"""Compare what the benchmark measures of a server with what the server did."""

import json
from types import ModuleType
from typing import Any

import httpx
import pytest

from tests.benchmarks.scripts import script

simulate_vs_live = script("routing/simulate_vs_live")


def test_seconds_outside_are_those_of_the_server_without_those_in_which_a_client_is_made(
    simulate_vs_live: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client takes 8 s to be made, an answer 1 s, of which the replica has 1/4 s."""
    now = [0.0]

    def answer(request: httpx.Request) -> httpx.Response:
        now[0] += 1.0
        if request.method == "POST":
            return httpx.Response(200, text="data: {}\n\n")
        return httpx.Response(200, text=json.dumps({"requests": [{"first_token_s": 0.25}]}))

    class SlowlyMade(httpx.Client):
        def __init__(self, **settings: Any) -> None:
            now[0] += 8.0
            super().__init__(**{**settings, "transport": httpx.MockTransport(answer)})

    def get(address: str, timeout: float) -> httpx.Response:
        with SlowlyMade(timeout=timeout) as client:
            return client.get(address)

    monkeypatch.setattr(simulate_vs_live.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(simulate_vs_live.httpx, "Client", SlowlyMade)
    monkeypatch.setattr(simulate_vs_live.httpx, "get", get)
    assert simulate_vs_live.latency_outside("http://server", "a") == 0.75
