"""Ship KV pages between two processes on one GPU over NIXL, and compare what arrived."""

import json
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the source, which is a process of its own

import torch
from gpu.cases import Bench, Case, Section, UnavailableError
from gpu.rows import Figures
from torch import Tensor

from crossdock.kvtransfer.calls import ChunkCall, ExpectCall, FinishCall, GrantCall, ShipCall
from crossdock.kvtransfer.dock import Dock
from crossdock.kvtransfer.events import Arrived, Event, Failed, Released
from crossdock.kvtransfer.layout import LayerShape, PoolLayout, PoolSpec
from crossdock.kvtransfer.nixl import NixlTransport
from crossdock.kvtransfer.records import GroupPages
from crossdock.kvtransfer.transport import Memory, TransportUnavailable

_TIMEOUT_S = 30.0  # of one transfer
_REPEATS = 5


def transfers(bench: Bench) -> Iterator[Case]:
    """Yield transfers of scattered pages."""
    page_bytes, num_pages = bench.sizes.page_transfer
    yield Case(f"NIXL, {num_pages} pages of {page_bytes} bytes", partial(_nixl, bench, page_bytes, num_pages))


def _nixl(bench: Bench, page_bytes: int, num_pages: int) -> Figures:
    try:
        NixlTransport().close()
    except TransportUnavailable as error:
        raise UnavailableError(str(error)) from error
    command = [sys.executable, __file__, bench.device.name, str(page_bytes), str(num_pages)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert child.stdin is not None
    assert child.stdout is not None
    dock = None
    try:  # the child first: no process may fork once NIXL's agent is open
        dock, events, pool = _open(bench.device.name, page_bytes, num_pages, "target")
        blob = bytes.fromhex(child.stdout.readline())
        expected = _content(bench.device.name, page_bytes, num_pages)
        differing = 0
        for repeat in range(_REPEATS + 1):
            request = f"r{repeat}"
            dock.call(ExpectCall(request, 1, (blob,), _TIMEOUT_S))
            pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(repeat))
            pool.zero_()
            bench.device.wait()
            dock.call(GrantCall(request, 1, 0, (GroupPages(0, tuple(pages.tolist())),)))
            if repeat == 0:
                child.stdin.write(dock.blob.hex() + "\n")
            child.stdin.write("go\n")
            _wait_for(events, Arrived)
            arrived = pool.view(num_pages, page_bytes)[pages.to(pool.device)]
            differing += int((arrived != expected).any(1).sum())
        seconds = json.loads(child.stdout.readline())
        child.stdin.close()
        child.wait(timeout=_TIMEOUT_S)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        if dock is not None:
            dock.close()
    median = statistics.median(seconds[1:])  # the first transfer makes the connection
    return {
        "gb_per_s": num_pages * page_bytes / median / 1e9,
        "us_per_page": median / num_pages * 1e6,
        "pages_that_differ": differing,
    }


def _content(device: str, page_bytes: int, num_pages: int) -> Tensor:
    """Return the bytes that the source's pages hold, [pages, bytes]: the same in both processes, and no two alike."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(0, 256, (num_pages, page_bytes), dtype=torch.uint8, device=device, generator=generator)


def _open(device: str, page_bytes: int, num_pages: int, role: str) -> tuple[Dock, "queue.SimpleQueue[Event]", Tensor]:
    pool = torch.zeros(num_pages * page_bytes, dtype=torch.uint8, device=device)
    layers = (LayerShape(1, page_bytes // 4, page_bytes // 4),)
    spec = PoolSpec.whole(PoolLayout(layers, 1, 2), f"page {page_bytes}", "float16", num_pages)
    memory = Memory(pool.data_ptr(), pool.nbytes, 0 if device == "cuda" else None)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    dock = Dock(NixlTransport(), memory, spec, role, events.put, max_write_bytes=1 << 30)
    return dock, events, pool


def _wait_for(events: "queue.SimpleQueue[Event]", kind: type[Any]) -> Any:
    until = time.monotonic() + _TIMEOUT_S
    while True:
        event = events.get(timeout=max(until - time.monotonic(), 0.01))
        if isinstance(event, kind):
            return event
        if isinstance(event, Failed):
            raise RuntimeError(f"{event.reason.value}: {event.detail}")


def source(device: str, page_bytes: int, num_pages: int) -> None:
    """Send the pages as often as asked, and print the seconds of each transfer."""
    dock, events, pool = _open(device, page_bytes, num_pages, "source")
    pool.copy_(_content(device, page_bytes, num_pages).view(-1))
    if device == "cuda":
        torch.cuda.synchronize()
    print(dock.blob.hex(), flush=True)
    blob = bytes.fromhex(sys.stdin.readline())
    seconds = []
    for repeat in range(_REPEATS + 1):
        sys.stdin.readline()
        started = time.monotonic()
        request, groups = f"r{repeat}", (GroupPages(0, tuple(range(num_pages))),)
        dock.call(ShipCall(request, 1, (blob,), _TIMEOUT_S))
        dock.call(ChunkCall(request, groups, num_pages))
        dock.call(FinishCall(request, groups, num_pages, b"first token"))
        released = _wait_for(events, Released)
        assert released.arrived
        seconds.append(time.monotonic() - started)
    print(json.dumps(seconds), flush=True)
    sys.stdin.read()
    dock.close()


SECTIONS = [Section("transfer", 60.0, transfers)]

if __name__ == "__main__":
    source(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
