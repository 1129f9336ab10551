"""How fast are KV pages transferred between two processes on this machine, by transport and size of page?

    python benchmarks/kvtransfer.py --repeats 9 --mebibytes 32          # three transports, five sizes: 2 minutes

Prints GB/s (median and best), µs per page, CPU seconds per GB and the milliseconds of the last page; then the time of
one chunk, and the CPU share of a dock that is idle or waits.

A page is one descriptor here (equal shards). Source and target pages are scattered, so that no two can be merged. Each
repeat is a whole transfer between two docks: its seconds are from the first write until the target (TCP) or UCX (NIXL)
reports that all pages have arrived.
"""

import argparse
import json
import os
import queue
import random
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from crossdock.kvtransfer.calls import ChunkCall, ExpectCall, FinishCall, GrantCall, ShipCall
from crossdock.kvtransfer.dock import Dock
from crossdock.kvtransfer.events import Arrived, Committed, Event, Released
from crossdock.kvtransfer.layout import LayerShape, PoolLayout, PoolSpec
from crossdock.kvtransfer.records import GroupPages
from crossdock.kvtransfer.transport import Memory, Transport, TransportUnavailable

SMOLLM2 = PoolLayout((LayerShape(3, 64, 64),) * 30, 16, 2)
CHUNK_PAGES = 32  # 512 tokens
PAGE_BYTES = [4 << 10, 16 << 10, 64 << 10, SMOLLM2.page_bytes, 1 << 20]
TRANSPORTS = ["tcp", "nixl tcp", "nixl tcp,cma"]


def make_transport(kind: str) -> Transport:
    if kind == "tcp":
        from crossdock.kvtransfer.tcp import TcpTransport

        return TcpTransport()
    from crossdock.kvtransfer.nixl import NixlTransport

    return NixlTransport(ucx_tls=kind.removeprefix("nixl "), ucx_net_devices="lo")


def open_dock(kind: str, page_bytes: int, num_pages: int, role: str) -> tuple[Dock, "queue.SimpleQueue[Event]", Any]:
    layers = (LayerShape(1, page_bytes // 4, page_bytes // 4),)
    spec = PoolSpec.whole(PoolLayout(layers, 1, 2), f"page {page_bytes}", "float16", num_pages)
    pool = np.ones(num_pages * page_bytes, dtype=np.uint8)  # ones: so that the kernel maps the memory
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    options = {"max_write_bytes": 1 << 30}
    return Dock(make_transport(kind), Memory.of(pool.data), spec, role, events.put, **options), events, pool


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_source(kind: str, page_bytes: int, num_pages: int, repeats: int) -> None:
    """Send the pages of every repeat and print a line of figures. Runs in the child process."""
    dock, events, _pool = open_dock(kind, page_bytes, 2 * num_pages, "source")
    print(dock.blob.hex(), flush=True)
    blob = bytes.fromhex(sys.stdin.readline())
    seconds, cpu, handover = [], [], []
    for repeat in range(repeats + 1):  # the first one makes the connection
        request, begin = f"r{repeat}", cpu_seconds()
        pages = random.Random(repeat).sample(range(0, 2 * num_pages, 2), num_pages)
        dock.call(ShipCall(request, 1, (blob,), 60.0))
        dock.call(ChunkCall(request, (GroupPages(0, tuple(pages[:-1])),), num_pages - 1))
        sys.stdin.readline()  # the other side has committed
        time.sleep(0.005)
        finished = time.monotonic()
        dock.call(FinishCall(request, (GroupPages(0, tuple(pages)),), num_pages, b"first token"))
        while not isinstance(event := events.get(), Released):
            pass
        assert event.arrived
        seconds.append(event.figures.hidden_seconds)
        cpu.append(cpu_seconds() - begin)
        handover.append(time.monotonic() - finished)
    time.sleep(0.3)
    begin = cpu_seconds()
    time.sleep(1.0)
    idle = cpu_seconds() - begin
    dock.call(ShipCall("open", 1, (blob,), 60.0))
    time.sleep(0.3)
    begin = cpu_seconds()
    time.sleep(1.0)
    figures = {"seconds": seconds[1:], "cpu": cpu[1:], "handover": handover[1:], "idle": idle}
    print(json.dumps({**figures, "waiting": cpu_seconds() - begin}), flush=True)
    dock.close()


def measure(kind: str, page_bytes: int, num_pages: int, repeats: int) -> dict[str, Any]:
    """Receive the pages of a source in a child process. Return the source's figures."""
    command = [sys.executable, __file__, "--source", kind, str(page_bytes), str(num_pages), str(repeats)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert child.stdin
    assert child.stdout
    dock, events, _pool = open_dock(kind, page_bytes, 2 * num_pages, "target")
    try:
        blob = bytes.fromhex(child.stdout.readline())
        for repeat in range(repeats + 1):
            request = f"r{repeat}"
            dock.call(ExpectCall(request, 1, (blob,), 60.0))
            pages = random.Random(-1 - repeat).sample(range(0, 2 * num_pages, 2), num_pages)
            dock.call(GrantCall(request, 1, 0, (GroupPages(0, tuple(pages)),)))
            if repeat == 0:
                child.stdin.write(dock.blob.hex() + "\n")
            while not isinstance(events.get(timeout=60), Committed):
                pass
            child.stdin.write("committed\n")
            while not isinstance(events.get(timeout=60), Arrived):
                pass
        figures: dict[str, Any] = json.loads(child.stdout.readline())
        return figures
    finally:
        child.stdin.close()
        child.wait(timeout=30)
        child.stdout.close()
        dock.close()


def report(kind: str, repeats: int, mebibytes: int) -> None:
    try:
        make_transport(kind).close()
    except TransportUnavailable as error:
        print(f"{kind:<14}{error}")
        return
    for page_bytes in PAGE_BYTES:
        num_pages = max(2, min(4096, (mebibytes << 20) // page_bytes))
        figures = measure(kind, page_bytes, num_pages, repeats)
        num_bytes = page_bytes * (num_pages - 1)
        seconds, best = statistics.median(figures["seconds"]), min(figures["seconds"])
        cpu, handover = statistics.median(figures["cpu"]), statistics.median(figures["handover"])
        print(
            f"{kind:<14}{page_bytes:>9}{num_pages:>7}{num_bytes / seconds / 1e9:>8.2f}{num_bytes / best / 1e9:>7.2f}"
            f"{seconds / (num_pages - 1) * 1e6:>9.1f}{cpu / num_bytes * 1e9:>10.2f}{handover * 1e3:>8.2f} ms",
            flush=True,
        )
    figures = measure(kind, SMOLLM2.page_bytes, CHUNK_PAGES + 1, repeats)
    chunk = statistics.median(figures["seconds"]) * 1e3
    idle, waiting = figures["idle"] * 100, figures["waiting"] * 100
    print(f"{kind:<14}a chunk of 512 tokens of SmolLM2-135M ({CHUNK_PAGES} pages): {chunk:.1f} ms")
    print(f"{kind:<14}CPU: {idle:.1f} % of a core idle, {waiting:.1f} % while a transfer waits", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--mebibytes", type=int, default=32, help="per transfer")
    parser.add_argument("--source", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--transport", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.source:
        kind, *numbers = arguments.source
        run_source(kind, *map(int, numbers))
    elif arguments.transport:
        report(arguments.transport, arguments.repeats, arguments.mebibytes)
    else:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {arguments.mebibytes} MiB per transfer")
        head = f"{'transport':<14}{'page':>9}{'pages':>7}{'GB/s':>8}{'best':>7}{'us/page':>9}{'CPU s/GB':>10}"
        print(f"{head}{'last page':>11}", flush=True)
        for kind in TRANSPORTS:  # a process each: UCX reads its settings once
            subprocess.run([sys.executable, *sys.argv, "--transport", kind], check=True)


if __name__ == "__main__":
    main()
