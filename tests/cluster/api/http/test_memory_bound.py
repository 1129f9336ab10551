"""Clients with the largest legal bodies, which read slowly: the memory of the ingress's process stays below a bound."""

import json
import multiprocessing
import select
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.serve.memory import used_by_family
from tests.cluster.api.http.memory_server import serve
from tests.waiting import eventually

MIB = 1 << 20
JSON = {"content-type": "application/json"}
NUM_CLIENTS = 64
CONFIG = HttpConfig(max_body_bytes=4 * MIB, request_memory_bytes=64 * MIB)
MOST_HELD = 8  # requests: each counts 8 MiB
# Two copies of the body that is being parsed, 128 KiB of each that arrives, and what the allocator keeps.
BESIDE = 8 * MIB + NUM_CLIENTS * MIB // 8 + 16 * MIB


def opened(port: int, request: bytes) -> socket.socket:
    """Send a request on a connection with a small window, of which nothing is read."""
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.connect(("127.0.0.1", port))
    wire.settimeout(60)
    wire.sendall(request)
    return wire


def test_largest_bodies_of_64_clients_stay_within_the_bound_and_leave_nothing() -> None:
    """Without the bound they hold twice their bytes: 512 MiB."""
    unread = {"role": "user", "content": "Hi", "name": "x" * (4 * MIB - 1000)}
    content = json.dumps({"messages": [unread], "max_tokens": 2}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(CONFIG, theirs))
    process.start()
    try:
        assert ours.poll(120)
        port = ours.recv()
        pid = process.pid
        assert pid is not None
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            for _ in range(3):  # what the first large bodies leave in the allocator is no fault of the later ones
                body = json.dumps({"messages": [unread], "max_tokens": 1}).encode()
                assert http.post("/v1/chat/completions", content=body, headers=JSON).status_code == 200
            before = used_by_family(pid)
            with ThreadPoolExecutor(NUM_CLIENTS) as pool:
                wires = list(pool.map(lambda _: opened(port, request), range(NUM_CLIENTS)))
            eventually(lambda: len(select.select(wires, [], [], 0)[0]) >= NUM_CLIENTS - MOST_HELD)
            answered = select.select(wires, [], [], 0)[0]
            assert {wire.recv(12) for wire in answered} == {b"HTTP/1.1 429"}
            assert len(answered) < NUM_CLIENTS
            eventually(lambda: used_by_family(pid) - before < CONFIG.request_memory_bytes + BESIDE)
            assert http.get("/health").status_code == 200
            for wire in wires:
                wire.close()
            eventually(lambda: used_by_family(pid) - before < 0.05 * before + 4 * MIB)
    finally:
        ours.send("stop")
        process.join(30)
        process.kill()
