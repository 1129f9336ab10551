"""A scripted server in a thread: one for the session, since its start and end take 0.3 s; each test sets its script."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from tests.cluster.bench.scripted import Scripted


class CurrentScript:
    """The ASGI application of the test that runs."""

    def __init__(self) -> None:
        self.script = Scripted()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.script.api(scope, receive, send)


@pytest.fixture(scope="session")
def scripted_server() -> Iterator[tuple[CurrentScript, str]]:
    current = CurrentScript()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(current, log_level="warning", ws="none", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        deadline = time.monotonic() + 240
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield current, f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture
def scripted(scripted_server: tuple[CurrentScript, str]) -> tuple[Scripted, str]:
    """A new script, and the address of its server."""
    current, url = scripted_server
    current.script = Scripted()
    return current.script, url
