"""How fast are KV pages transferred between two processes on this machine, by transport and size of page?

    python benchmarks/kvtransfer.py --repeats 9 --mebibytes 32          # three transports, five sizes: 2 minutes
    python benchmarks/kvtransfer.py --files FOLDER                      # pages of a tier in files: 10 s

Prints GB/s (median and best), µs per page, CPU seconds per GB and the milliseconds of the last page; then the time of
one chunk, and the CPU share of a dock that is idle or waits.

A page is one descriptor here (equal shards). Source and target pages are scattered, so that no two can be merged. Each
repeat is a whole transfer between two docks: its seconds are from the first write until the target (TCP) or UCX (NIXL)
reports that all pages have arrived.

`--files` reads files of one page each, by `preadv` as tiers do, and by NIXL's plugin POSIX, one and 32 at a time: GB/s
and CPU seconds per GB (medians), of files that Linux has in memory and of files that it has not.
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


def report_files(folder: str, repeats: int, mebibytes: int) -> None:
    """Print how fast files of one page each are read into memory: GB/s and CPU s/GB, of cached and of cold files."""
    from nixl._api import nixl_agent, nixl_agent_config

    size = SMOLLM2.page_bytes
    paths = [os.path.join(folder, f"page-{number}") for number in range((mebibytes << 20) // size)]
    pages = [np.ones(size, np.uint8) for _ in paths]
    for path, page in zip(paths, pages, strict=True):
        page.tofile(path)
    agent = nixl_agent("files", nixl_agent_config(backends=[]))
    agent.create_backend("POSIX", {})
    registered = agent.register_memory([(page.ctypes.data, size, 0, "") for page in pages], "DRAM", backends=["POSIX"])

    def by_preadv() -> None:
        for path, page in zip(paths, pages, strict=True):
            descriptor = os.open(path, os.O_RDONLY)
            os.preadv(descriptor, [page.data], 0)
            os.close(descriptor)

    def by_nixl(at_once: int) -> None:
        for start in range(0, len(paths), at_once):
            descriptors = [os.open(path, os.O_RDONLY) for path in paths[start : start + at_once]]
            files = agent.register_memory([(0, size, each, "") for each in descriptors], "FILE", backends=["POSIX"])
            own = [(page.ctypes.data, size, 0) for page in pages[start : start + at_once]]
            memory = agent.get_xfer_descs(own, "DRAM")
            handle = agent.initialize_xfer("READ", memory, files.trim(), "files", backends=["POSIX"])
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            assert state == "DONE", state
            agent.release_xfer_handle(handle)
            agent.deregister_memory(files, backends=["POSIX"])
            for each in descriptors:
                os.close(each)

    def forget() -> None:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    ways = {"preadv": by_preadv, "nixl 1": lambda: by_nixl(1), "nixl 32": lambda: by_nixl(32)}
    for is_cold in (False, True):
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, read in ways.items():
                if is_cold:
                    forget()
                started, cpu = time.perf_counter(), cpu_seconds()
                read()
                found[name].append((time.perf_counter() - started, cpu_seconds() - cpu))
        for name, each in found.items():
            seconds, cpu = (statistics.median(values) for values in zip(*each, strict=True))
            gigabytes = size * len(paths) / 1e9
            kind = "cold" if is_cold else "cached"
            print(f"{name:<8} {kind:<7} {gigabytes / seconds:6.2f} GB/s {cpu / gigabytes:6.2f} CPU s/GB", flush=True)
    agent.deregister_memory(registered, backends=["POSIX"])
    for path in paths:
        os.unlink(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--mebibytes", type=int, default=32, help="per transfer")
    parser.add_argument("--files", metavar="FOLDER", help="read files of pages there instead")
    parser.add_argument("--source", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--transport", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.files:
        report_files(arguments.files, arguments.repeats, arguments.mebibytes)
    elif arguments.source:
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
