"""A scripted server in a thread."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from tests.cluster.bench.scripted import Scripted


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str]]:
    script = Scripted()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(script.api, log_level="warning", ws="none", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield script, f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()
