"""How fast are KV pages transferred between two processes on this machine, by transport and size of page?

    python benchmarks/kvtransfer.py --repeats 9 --mebibytes 32          # three transports, five sizes: 2 minutes
    python benchmarks/kvtransfer.py --files FOLDER                      # pages of a tier in files: 10 s

Prints GB/s (median and best), µs per page, CPU seconds per GB and the milliseconds of the last page; then the time of
one chunk, and the CPU share of a dock that is idle or waits.

Each repeat is a whole transfer between two docks (page_transfers.py): its seconds are from the first write until the
target (TCP) or UCX (NIXL) reports that all pages have arrived.

`--files` reads files of one page each, by `preadv` as tiers do, and by NIXL's plugin POSIX, one and 32 at a time: GB/s
and CPU seconds per GB (medians), of files that Linux has in memory and of files that it has not.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

import numpy as np
from page_transfers import cpu_seconds, make_transport, receive

from crossdock.kvtransfer.layout import LayerShape, PoolLayout
from crossdock.kvtransfer.transport import TransportUnavailable

SMOLLM2 = PoolLayout((LayerShape(3, 64, 64),) * 30, 16, 2)
CHUNK_PAGES = 32  # 512 tokens
PAGE_BYTES = [4 << 10, 16 << 10, 64 << 10, SMOLLM2.page_bytes, 1 << 20]
TRANSPORTS = ["tcp", "nixl tcp", "nixl tcp,cma"]


def report(kind: str, repeats: int, mebibytes: int) -> None:
    try:
        make_transport(kind).close()
    except TransportUnavailable as error:
        print(f"{kind:<14}{error}")
        return
    for page_bytes in PAGE_BYTES:
        num_pages = max(2, min(4096, (mebibytes << 20) // page_bytes))
        figures = receive(kind, page_bytes, num_pages, repeats)
        num_bytes = page_bytes * (num_pages - 1)
        seconds, best = statistics.median(figures["seconds"]), min(figures["seconds"])
        cpu, handover = statistics.median(figures["cpu"]), statistics.median(figures["handover"])
        print(
            f"{kind:<14}{page_bytes:>9}{num_pages:>7}{num_bytes / seconds / 1e9:>8.2f}{num_bytes / best / 1e9:>7.2f}"
            f"{seconds / (num_pages - 1) * 1e6:>9.1f}{cpu / num_bytes * 1e9:>10.2f}{handover * 1e3:>8.2f} ms",
            flush=True,
        )
    figures = receive(kind, SMOLLM2.page_bytes, CHUNK_PAGES + 1, repeats)
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
    parser.add_argument("--transport", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.files:
        report_files(arguments.files, arguments.repeats, arguments.mebibytes)
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
