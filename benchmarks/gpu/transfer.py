"""Ship KV pages between two processes on one GPU over NIXL, and compare what arrived."""

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from gpu.cases import Bench, Case, Section, UnavailableError
from gpu.rows import Figures
from page_transfers import content, make_transport, receive

from crossdock.kvtransfer.transport import TransportUnavailable

_REPEATS = 5


def transfers(bench: Bench) -> Iterator[Case]:
    """Yield transfers of scattered pages."""
    page_bytes, num_pages = bench.sizes.page_transfer
    yield Case(f"NIXL, {num_pages} pages of {page_bytes} bytes", partial(_nixl, bench, page_bytes, num_pages))


def _nixl(bench: Bench, page_bytes: int, num_pages: int) -> Figures:
    try:
        make_transport("nixl").close()
    except TransportUnavailable as error:
        raise UnavailableError(str(error)) from error
    expected, differing = content(bench.device.name, page_bytes, num_pages), 0

    def check(pool: Any, sent: list[int], received: list[int]) -> None:
        nonlocal differing
        differing += int((pool[received] != expected[sent]).any(1).sum())
        pool.zero_()
        bench.device.wait()

    figures = receive("nixl", page_bytes, num_pages, _REPEATS, bench.device.name, check)
    seconds = statistics.median(figures["seconds"])  # of all pages but the last
    return {
        "gb_per_s": (num_pages - 1) * page_bytes / seconds / 1e9,
        "us_per_page": seconds / (num_pages - 1) * 1e6,
        "pages_that_differ": differing,
    }


SECTIONS = [Section("transfer", 60.0, transfers)]
