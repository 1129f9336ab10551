"""An ingress with every route, in a process of its own that measures itself: memory, its event loop, its counters."""

import asyncio
import time
from asyncio.events import Handle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from pydantic_core import from_json

from crossdock.cluster.api.batches.space import Uploads
from crossdock.cluster.api.bounds import BODY_PARTS
from crossdock.cluster.api.heap import keep_one_heap
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.listener import listen
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.rollouts import Rollouts
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.api.one_model import one_model_api
from tests.cluster.api.scripted_api import ScriptedDispatcher
from tests.cluster.ports import free_port
from tests.cluster.small_tokenizers import byte_level

CONTEXT = 8192
_PARSED = b"[" + b",".join([b"[]"] * (BODY_PARTS - 1)) + b"]"  # as many lists as a body may have


@dataclass(frozen=True)
class Measured:
    """Hold what an ingress has used since `Ingress.begin`.

    `grown`: the most bytes of memory beyond those of the beginning. `longest_block`: CPU time of the longest callback
    of its event loop, in times that the parser takes for as many lists as a body may have. `what`: that callback.
    `held`: bytes of requests that still count, uploads too. `running`: requests in flight.
    """

    grown: int
    longest_block: float
    what: str
    held: int
    running: int


def every_route(tokenizer: ModelTokenizer, folder: Path) -> tuple[FastAPI, ScriptedDispatcher]:
    """Return an application with every route that a server can have."""
    engine = ScriptedDispatcher(tokenizer, CONTEXT)
    engine.num_replicas = 1  # type: ignore[attr-defined]

    async def replicas(seen: object, owner: object) -> list[Any]:
        return []

    engine.replicas = replicas  # type: ignore[attr-defined]

    def script(submission: Submission) -> Iterator[TokenDelta | Exception | float]:
        for delta in engine.story(submission):
            if isinstance(delta, TokenDelta) and submission.sampling.pooling is not None:
                delta.embedding = np.ones(8, "<f4").tobytes()
            yield delta

    engine.script = script
    return one_model_api(engine, tokenizer, config_at(folder), rollouts=Rollouts(Dispatcher("tiny"))), engine  # type: ignore[arg-type]


def config_at(folder: Path) -> HttpConfig:
    return HttpConfig.model_validate(
        {
            "max_body_bytes": 6 << 20,
            "request_memory_bytes": 64 << 20,
            "response_store_bytes": 1 << 20,
            "max_logprobs": -1,
            "trust_request_chat_template": True,
            "batch_folder": str(folder / "batches"),
            "batch_file_bytes": 8 << 20,
            "lora_folder": str(folder),
            "weights_folder": str(folder),
            "rollouts": True,
        }
    )


class Ingress:
    """The ingress, as the test sees it."""

    def __init__(self, port: int, orders: Connection) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._orders = orders

    def begin(self) -> None:
        """Measure from now on."""
        self._ask("begin")

    def measured(self) -> Measured:
        found: Measured = self._ask("measured")
        return found

    def _ask(self, order: str) -> Any:
        self._orders.send(order)
        return self._orders.recv()


@contextmanager
def measured_ingress(folder: Path) -> Iterator[Ingress]:
    ours, theirs = Pipe()
    process = get_context("spawn").Process(target=_serve, args=(folder, theirs))
    process.start()
    theirs.close()
    try:
        # EOFError: the process has ended.
        yield Ingress(ours.recv(), ours)
    finally:
        with suppress(OSError):
            ours.send("end")
        process.join(240)
        process.kill()


def _serve(folder: Path, orders: Connection) -> None:
    keep_one_heap()
    asyncio.run(_Serving(folder, orders).run())


class _Serving:
    """The other side of `Ingress`."""

    def __init__(self, folder: Path, orders: Connection) -> None:
        self._orders = orders
        uploads: list[Uploads] = []
        made = Uploads.__init__

        def kept(self: Uploads, most: int) -> None:
            made(self, most)
            uploads.append(self)

        Uploads.__init__ = kept  # type: ignore[method-assign]
        self._app, self._engine = every_route(ModelTokenizer(byte_level()), folder)
        self._uploads = uploads[0]._shares
        guards = (guard.keywords for guard in self._app.guards if isinstance(guard, partial))
        self._memory = next(keywords["memory"] for keywords in guards if "memory" in keywords)
        self._before = 0
        self._longest = 0.0
        self._what = ""

    async def run(self) -> None:
        port = free_port()
        server = await listen(self._app, "127.0.0.1", port)
        self._app.state.batches.start()
        unit = max(_seconds_of_parser() for _ in range(10))  # with a pass of the garbage collector, as others may have
        self._time_callbacks()
        self._orders.send(port)
        while (order := await asyncio.to_thread(self._orders.recv)) != "end":
            if order == "begin":
                Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
                self._before = _status("VmRSS")
                self._longest = 0.0
                self._orders.send(None)
                continue
            held = self._memory.num_used + self._uploads.num_used
            grown = _status("VmHWM") - self._before
            self._orders.send(Measured(grown, self._longest / unit, self._what, held, self._engine.running))
        await self._app.state.batches.close()
        await server.close(0)

    def _time_callbacks(self) -> None:
        """Note the CPU time of each callback of this thread's loop: that of other processes does not count."""
        run = Handle._run

        def timed(handle: Handle) -> None:
            began = time.thread_time()
            run(handle)
            seconds = time.thread_time() - began
            if seconds > self._longest:
                self._longest = seconds
                self._what = repr(handle)[:300]

        Handle._run = timed  # type: ignore[method-assign]


def _seconds_of_parser() -> float:
    began = time.thread_time()
    from_json(_PARSED)
    return time.thread_time() - began


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024
