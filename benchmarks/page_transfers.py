"""How fast are KV pages transferred between two processes on this machine, by transport and size of page?

    python benchmarks/page_transfers.py --repeats 9 --mebibytes 32          # three transports, five sizes: 2 minutes
    python benchmarks/page_transfers.py --checksum                          # each size without and with checksums
    python benchmarks/page_transfers.py --predicted 172032                  # are seconds of a transfer predicted well?

Prints GB/s (median and best), µs per page, CPU seconds per GB at the source and at the target, and the milliseconds of
the last page; then the time of one chunk, and the CPU share of a dock that is idle or waits.

`--predicted` names the bytes of a page. Prompts of 512 to 8,192 tokens in random order, without and with checksums: a
transfer is predicted as a replica advertises it, which has learnt from those before: seconds of its own, and of its
bytes. CPU seconds, since other processes have the cores too.

Each repeat is a whole transfer between the docks of two processes: this one receives, a child sends. Its seconds are
from the first write until the target (TCP) or UCX (NIXL) reports that all pages have arrived. A page is one descriptor
(equal shards). Source and target pages are scattered, so that no two can be merged.
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
from collections.abc import Callable
from itertools import chain, product
from typing import Any

import numpy as np

from crossdock.kvtransfer.calls import ChunkCall, ExpectCall, FinishCall, GrantCall, ShipCall
from crossdock.kvtransfer.dock import Dock
from crossdock.kvtransfer.events import Arrived, Committed, Event, Failed, Released
from crossdock.kvtransfer.layout import LayerShape, PoolLayout, PoolSpec
from crossdock.kvtransfer.records import GroupPages
from crossdock.kvtransfer.transport import Memory, Transport, TransportUnavailable
from crossdock.workers.report.link import LinkFit

SMOLLM2 = PoolLayout((LayerShape(3, 64, 64),) * 30, 16, 2)
CHUNK_PAGES = 32  # 512 tokens
PAGE_BYTES = [4 << 10, 16 << 10, 64 << 10, SMOLLM2.page_bytes, 1 << 20]
TRANSPORTS = ["tcp", "nixl tcp", "nixl tcp,cma"]
TIMEOUT_S = 60.0  # of one transfer
Events = queue.SimpleQueue[Event]
Check = Callable[[Any, list[int], list[int]], None]  # of the pool, and the ids of source and target pages


def make_transport(kind: str) -> Transport:
    """Return a transport: `tcp`, `nixl`, or `nixl` and what UCX may use."""
    if kind == "tcp":
        from crossdock.kvtransfer.tcp import TcpTransport

        return TcpTransport()
    from crossdock.kvtransfer.nixl import NixlTransport

    tls = kind.removeprefix("nixl").strip()
    return NixlTransport(ucx_tls=tls, ucx_net_devices="lo") if tls else NixlTransport()


def content(device: str, page_bytes: int, num_pages: int) -> Any:
    """Return the bytes of the source's pool on a device of torch, [2 * pages, bytes]: no two pages are alike."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    return torch.randint(0, 256, (2 * num_pages, page_bytes), dtype=torch.uint8, device=device, generator=generator)


def open_dock(
    kind: str, page_bytes: int, num_pages: int, role: str, device: str, *, has_checksums: bool = False
) -> tuple[Dock, Events, Any]:
    """Return a dock with a pool of twice as many pages. `device`: torch's, or empty for memory without torch."""
    if device:
        pool = content(device, page_bytes, num_pages)
        if role == "target":
            pool.zero_()
        memory = Memory(pool.data_ptr(), pool.nbytes, 0 if device == "cuda" else None)
        if pool.is_cuda:
            pool[-1, -1].item()  # waits until the bytes are there: the transport reads them outside of any stream
    else:
        pool = np.ones(2 * num_pages * page_bytes, dtype=np.uint8)  # ones: so that the kernel maps the memory
        memory = Memory.of(pool.data)
    layers = (LayerShape(1, page_bytes // 4, page_bytes // 4),)
    spec = PoolSpec.whole(PoolLayout(layers, 1, 2), f"page {page_bytes}", "float16", 2 * num_pages)
    events: Events = queue.SimpleQueue()
    options = {"max_write_bytes": 1 << 30, "has_checksums": has_checksums}
    return Dock(make_transport(kind), memory, spec, role, events.put, **options), events, pool


def _pages(seed: int, num_pages: int) -> list[int]:
    return random.Random(seed).sample(range(0, 2 * num_pages, 2), num_pages)


def _wait_for(events: Events, kind: type[Any]) -> Any:
    """Return the next event of this kind. RuntimeError: the transfer has failed."""
    until = time.monotonic() + TIMEOUT_S
    while not isinstance(event := events.get(timeout=max(until - time.monotonic(), 0.01)), kind):
        if isinstance(event, Failed):
            raise RuntimeError(f"{event.reason.value}: {event.detail}")
    return event


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def send(kind: str, page_bytes: int, num_pages: int, repeats: int, device: str, has_checksums: bool) -> None:
    """Send the pages of every repeat and print a line of figures. Runs in the child process."""
    dock, events, _pool = open_dock(kind, page_bytes, num_pages, "source", device, has_checksums=has_checksums)
    print(dock.blob.hex(), flush=True)
    blob = bytes.fromhex(sys.stdin.readline())
    seconds, cpu, handover = [], [], []
    for repeat in range(repeats + 1):  # the first one makes the connection
        request, begin, pages = f"r{repeat}", cpu_seconds(), _pages(repeat, num_pages)
        dock.call(ShipCall(request, 1, (blob,), TIMEOUT_S))
        dock.call(ChunkCall(request, (GroupPages(0, tuple(pages[:-1])),), num_pages - 1))
        sys.stdin.readline()  # the other side has committed
        time.sleep(0.005)
        finished = time.monotonic()
        dock.call(FinishCall(request, (GroupPages(0, tuple(pages)),), num_pages, b"first token"))
        event = _wait_for(events, Released)
        assert event.arrived
        seconds.append(event.figures.hidden_seconds)
        cpu.append(cpu_seconds() - begin)
        handover.append(time.monotonic() - finished)

    def share() -> float:
        time.sleep(0.3)
        begin = cpu_seconds()
        time.sleep(1.0)
        return cpu_seconds() - begin

    figures: dict[str, Any] = {"seconds": seconds[1:], "cpu": cpu[1:], "handover": handover[1:], "idle": share()}
    dock.call(ShipCall("open", 1, (blob,), TIMEOUT_S))
    print(json.dumps({**figures, "waiting": share()}), flush=True)
    dock.close()


def receive(
    kind: str,
    page_bytes: int,
    num_pages: int,
    repeats: int,
    device: str = "",
    check: Check | None = None,
    *,
    has_checksums: bool = False,
) -> dict[str, Any]:
    """Receive the pages of a child's pool. Return the child's figures: seconds of all pages but one, and others.

    `check` is called with the pool after each transfer.
    """
    command = [sys.executable, __file__, "--send", kind, str(page_bytes), str(num_pages), str(repeats), device]
    command += ["--checksum"] * has_checksums
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert child.stdin is not None
    assert child.stdout is not None
    dock = None
    try:  # the child first: no process may fork once NIXL's agent is open
        dock, events, pool = open_dock(kind, page_bytes, num_pages, "target", device, has_checksums=has_checksums)
        cpu = []
        blob = bytes.fromhex(child.stdout.readline())
        for repeat in range(repeats + 1):
            request, pages = f"r{repeat}", _pages(-1 - repeat, num_pages)
            begin = cpu_seconds()
            dock.call(ExpectCall(request, 1, (blob,), TIMEOUT_S))
            dock.call(GrantCall(request, 1, 0, (GroupPages(0, tuple(pages)),)))
            if repeat == 0:
                child.stdin.write(dock.blob.hex() + "\n")
            _wait_for(events, Committed)
            child.stdin.write("committed\n")
            _wait_for(events, Arrived)
            cpu.append(cpu_seconds() - begin)
            if check is not None:
                check(pool, _pages(repeat, num_pages), pages)
        figures: dict[str, Any] = json.loads(child.stdout.readline())
        child.stdin.close()
        child.wait(timeout=TIMEOUT_S)
        return {**figures, "target_cpu": cpu[1:]}
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        if dock is not None:
            dock.close()


def report(kind: str, repeats: int, mebibytes: int, *, with_checksums: bool) -> None:
    try:
        make_transport(kind).close()
    except TransportUnavailable as error:
        print(f"{kind:<14}{error}")
        return
    for page_bytes, has_checksums in product(PAGE_BYTES, (False, True) if with_checksums else (False,)):
        num_pages = max(2, min(4096, (mebibytes << 20) // page_bytes))
        figures = receive(kind, page_bytes, num_pages, repeats, has_checksums=has_checksums)
        num_bytes = page_bytes * (num_pages - 1)
        seconds, best = statistics.median(figures["seconds"]), min(figures["seconds"])
        names = ("cpu", "target_cpu", "handover")
        cpu, target_cpu, handover = (statistics.median(figures[name]) for name in names)
        print(
            f"{kind:<14}{page_bytes:>9}{num_pages:>7}{num_bytes / seconds / 1e9:>8.2f}{num_bytes / best / 1e9:>7.2f}"
            f"{seconds / (num_pages - 1) * 1e6:>9.1f}{cpu / num_bytes * 1e9:>10.2f}"
            f"{target_cpu / num_bytes * 1e9:>10.2f}{handover * 1e3:>8.2f} ms{'  with checksums' * has_checksums}",
            flush=True,
        )
    figures = receive(kind, SMOLLM2.page_bytes, CHUNK_PAGES + 1, repeats)
    chunk = statistics.median(figures["seconds"]) * 1e3
    idle, waiting = figures["idle"] * 100, figures["waiting"] * 100
    print(f"{kind:<14}a chunk of 512 tokens of SmolLM2-135M ({CHUNK_PAGES} pages): {chunk:.1f} ms")
    print(f"{kind:<14}CPU: {idle:.1f} % of a core idle, {waiting:.1f} % while a transfer waits", flush=True)


def report_predicted(page_bytes: int, repeats: int) -> None:
    """Print by how much predicted CPU seconds of transfers over TCP differ from those of both sides."""
    for has_checksums in (False, True):
        transfers = list[tuple[int, float]]()  # pages, and CPU seconds of both sides
        for num_pages in (CHUNK_PAGES, 4 * CHUNK_PAGES, 16 * CHUNK_PAGES):
            figures = receive("tcp", page_bytes, num_pages, repeats, has_checksums=has_checksums)
            both = zip(figures["cpu"], figures["target_cpu"], strict=True)
            transfers += [(num_pages, source + target) for source, target in both]
        random.Random(0).shuffle(transfers)
        link = LinkFit()
        errors = dict[int, list[float]]()
        for num_pages, seconds in transfers:
            num_bytes = num_pages * page_bytes
            if link.cost.bytes_per_second:
                errors.setdefault(num_pages, []).append(abs(link.cost.seconds(num_bytes) - seconds) / seconds)
            link.observe(num_bytes, seconds)
        for num_pages, each in [*sorted(errors.items()), ("all", [*chain(*errors.values())])]:
            p50, p90 = 100 * np.quantile(each, [0.5, 0.9])
            named = "with checksums" if has_checksums else "without"
            print(f"{named:<15} {num_pages:>5} pages: {len(each)} transfers, off by p50 {p50:.1f} %, p90 {p90:.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--mebibytes", type=int, default=32, help="per transfer")
    parser.add_argument("--checksum", action="store_true", help="measure transfers with checksums too")
    parser.add_argument("--predicted", type=int, metavar="BYTES", help="how well are seconds of transfers predicted?")
    parser.add_argument("--transport", help=argparse.SUPPRESS)
    parser.add_argument("--send", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send:
        kind, *sizes, device = arguments.send
        send(kind, *map(int, sizes), device=device, has_checksums=arguments.checksum)
    elif arguments.predicted:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        report_predicted(arguments.predicted, arguments.repeats)
    elif arguments.transport:
        report(arguments.transport, arguments.repeats, arguments.mebibytes, with_checksums=arguments.checksum)
    else:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {arguments.mebibytes} MiB per transfer")
        head = f"{'transport':<14}{'page':>9}{'pages':>7}{'GB/s':>8}{'best':>7}{'us/page':>9}{'CPU s/GB':>10}"
        print(f"{head}{'target':>10}{'last page':>11}", flush=True)
        for kind in TRANSPORTS:  # a process each: UCX reads its settings once
            subprocess.run([sys.executable, *sys.argv, "--transport", kind], check=True)


if __name__ == "__main__":
    main()
