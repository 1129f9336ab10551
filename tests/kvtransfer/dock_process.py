"""A dock in its own process: lines of JSON on stdin are calls; answers and events are lines on stdout.

Run by `DockProcess` in conftest.py with its configuration as the argument.
"""

import json
import os
import queue
import resource
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from crossdock.kvtransfer.calls import DockCall
from crossdock.kvtransfer.dock import Dock
from crossdock.kvtransfer.events import Event, Reason
from crossdock.kvtransfer.layout import LayerShape, PoolSpec
from crossdock.kvtransfer.transport import Memory, Transport, TransportEvent, WriteFailed

from .shards import shard_model


class Delayed:
    """A transport whose writes begin only after `release`: a writer that the network, or the scheduler, delays."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._held: list[tuple[int, tuple[Any, ...]]] = []
        self._numbers: dict[int, int] = {}
        self._released = threading.Event()
        self._num_writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, *args: Any) -> int:
        self._num_writes += 1
        self._held.append((self._num_writes, args))
        return self._num_writes

    def poll(self, seconds: float) -> list[TransportEvent]:
        if self._released.is_set():
            while self._held:
                number, args = self._held.pop(0)
                self._numbers[self._transport.write(*args)] = number
        events = self._transport.poll(min(seconds, 0.01))
        return [
            type(event)(self._numbers.pop(event.write), *([event.detail] if isinstance(event, WriteFailed) else []))
            if hasattr(event, "write")
            else event
            for event in events
        ]

    def release(self) -> None:
        self._released.set()


def make_transport(kind: str) -> Any:
    if kind == "tcp":
        from crossdock.kvtransfer.tcp import TcpTransport

        return TcpTransport()
    from crossdock.kvtransfer.nixl import NixlTransport

    # nixl imports torch to find the CUDA version it was built for, which takes 1 to 5 s per process.
    sys.modules["torch"] = None  # type: ignore[assignment]
    return NixlTransport(ucx_tls=kind.removeprefix("nixl "), ucx_net_devices="lo")


class Pool:
    """Pages of uniform layers. Their content follows from (seed, page number) alone: in every shard, the same head of
    the same layer has the same numbers."""

    def __init__(self, config: dict[str, Any]) -> None:
        layers = (LayerShape(*config["layer"]),) * config["num_layers"]
        shards = shard_model(layers, config["tp"], config["pp"])
        self.spec = PoolSpec(
            config["model"], "uint16", 2, config["page_size"], layers, shards, config["rank"], config["num_pages"]
        )
        self.array = np.zeros((config["num_pages"], self.spec.page_bytes // 2), dtype=np.uint16)
        self.memory = Memory.of(self.array.data.cast("B"))

    def content(self, seed: int, number: int) -> NDArray[np.uint16]:
        layer = self.spec.layers[0]
        cell = self.spec.page_size * (layer.key_dim + layer.value_dim)
        shape = (layer.num_kv_heads, len(self.spec.layers), cell)
        base = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
        whole = ((base * 40503 + seed * 7919 + number * 104729) >> 3).astype(np.uint16)
        shard = self.spec.shard
        start, stop = shard.heads[0]
        return whole[start:stop, shard.first_layer : shard.first_layer + len(shard.heads)].reshape(-1)

    def fill(self, seed: int, pages: Sequence[int], first: int = 0) -> None:
        for number, page in enumerate(pages, first):
            self.array[page] = self.content(seed, number)

    def equal(self, seed: int, pages: Sequence[int], first: int = 0) -> list[bool]:
        return [bool((self.array[p] == self.content(seed, n)).all()) for n, p in enumerate(pages, first)]

    def zero(self) -> None:
        self.array[:] = 0

    def are_zero(self, pages: Sequence[int]) -> bool:
        return not self.array[list(pages)].any()


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with these lines
    config = json.loads(sys.argv[1])
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def write_lines() -> None:
        while (line := lines.get()) is not None:
            out.write(json.dumps(line, default=_plain) + "\n")

    writer = threading.Thread(target=write_lines)
    writer.start()

    def on_event(event: Event) -> None:
        lines.put({"event": type(event).__name__, **asdict(event)})

    pool = Pool(config)
    transport = make_transport(config["transport"])
    if config["delayed"]:
        transport = Delayed(transport)
    options = {"grace_seconds": config["grace_seconds"], "max_write_bytes": config["max_write_bytes"]}
    dock = Dock(transport, pool.memory, pool.spec, config["role"], on_event, **options)
    lines.put({"answer": dock.blob.hex()})
    for line in sys.stdin:
        command, arguments = json.loads(line)
        lines.put({"answer": _call(command, arguments, dock, pool, transport)})
    dock.close()
    lines.put(None)
    writer.join()


def _call(command: str, arguments: dict[str, Any], dock: Dock, pool: Pool, transport: Any) -> Any:
    match command:
        case "call":
            return dock.call(msgspec.convert(arguments, DockCall))
        case "counts":
            return asdict(dock.counts())
        case "cpu_seconds":
            usage = resource.getrusage(resource.RUSAGE_SELF)
            return usage.ru_utime + usage.ru_stime
        case "fill" | "equal" | "are_zero" | "zero":
            return getattr(pool, command)(**arguments)
        case "release":
            return transport.release()
        case _:
            return getattr(dock, command)(**arguments)


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    assert isinstance(value, Reason)
    return value.value


main()
