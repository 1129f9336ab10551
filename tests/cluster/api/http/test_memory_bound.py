"""Clients with the largest legal bodies, which read slowly: the memory of the ingress's process stays below a bound."""

import json
import multiprocessing
import select
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.workers.model.memory.host_memory import used_by_family
from tests.cluster.api.http.memory_server import serve
from tests.cluster.api.unread import unread
from tests.waiting import eventually

MIB = 1 << 20
JSON = {"content-type": "application/json"}
NUM_CLIENTS = 64
KEPT = 16 * MIB  # by the allocator


def counted(config: HttpConfig) -> int:
    """Return how much memory of an ingress 64 clients can take: what counts, and what is in no request yet.

    That is two copies of the body that is being parsed, and 128 KiB of each that arrives.
    """
    return config.request_memory_bytes + 2 * config.max_body_bytes + NUM_CLIENTS * MIB // 8 + KEPT


@pytest.mark.parametrize(
    "config",
    [
        HttpConfig(max_body_bytes=4 * MIB, request_memory_bytes=64 * MIB),
        pytest.param(HttpConfig(), marks=pytest.mark.soak),  # 20 MiB and 2 GiB: it takes 3 GiB of the machine
    ],
    ids=["4 MiB", "largest"],
)
def test_bodies_of_64_clients_stay_within_the_bound_and_leave_nothing(config: HttpConfig) -> None:
    """Without the bound they hold twice their bytes. Prints the memory of the process before, held, and after."""
    message = {"role": "user", "content": "Hi", "name": "x" * (config.max_body_bytes - 4096)}
    content = json.dumps({"messages": [message], "max_tokens": 2}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
    most_held = config.request_memory_bytes // (2 * len(content))
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(config, theirs))
    process.start()
    try:
        assert ours.poll(120)
        port = ours.recv()
        pid = process.pid
        assert pid is not None
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=240) as http:
            for _ in range(3):  # what the first large bodies leave in the allocator is no fault of the later ones
                body = json.dumps({"messages": [message], "max_tokens": 1}).encode()
                assert http.post("/v1/chat/completions", content=body, headers=JSON).status_code == 200
            before = used_by_family(pid)
            with ThreadPoolExecutor(NUM_CLIENTS) as pool:
                wires = list(pool.map(lambda _: unread(port, request), range(NUM_CLIENTS)))
            eventually(lambda: len(select.select(wires, [], [], 0)[0]) >= NUM_CLIENTS - most_held)
            answered = select.select(wires, [], [], 0)[0]
            assert {wire.recv(12) for wire in answered} == {b"HTTP/1.1 429"}
            assert len(answered) == NUM_CLIENTS - most_held
            eventually(lambda: used_by_family(pid) - before < counted(config))
            held = used_by_family(pid)
            assert http.get("/health").status_code == 200
            for wire in wires:
                wire.close()
            eventually(lambda: used_by_family(pid) - before < 0.05 * before + 4 * MIB)
            after = used_by_family(pid)
            sizes = f"MiB: {before // MIB} before, {held // MIB} held, {after // MIB} after"
            sys.stdout.write(f"{len(answered)} refused; {sizes}\n")
    finally:
        ours.send("stop")
        process.join(240)
        process.kill()
