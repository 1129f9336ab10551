"""Write the seconds and the memory of each test file of a run: one line for a file, when its last test has ended."""

import contextlib
import os
import time
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

TO = "CROSSDOCK_TESTS_SECONDS"  # names the file to append to: path, wall seconds, CPU seconds, MiB; tabs between
_to = os.environ.pop(TO, None)  # a run of pytest that a test starts records nothing

_before: list[tuple[float, float]] = []  # wall and CPU seconds when the file before ended, or when the run began


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    if not _before:
        _before.append((time.monotonic(), _cpu()))
    result = yield
    if nextitem is None or nextitem.path != item.path:
        now = (time.monotonic(), _cpu())
        wall, cpu = (after - before for after, before in zip(now, _before.pop(), strict=True))
        _before.append(now)
        mib = psutil.Process().memory_info().rss >> 20
        if _to:
            path = item.path.relative_to(Path(__file__).parents[1])
            with open(_to, "a") as file:
                file.write(f"{path}\t{wall:.2f}\t{cpu:.2f}\t{mib}\n")
    return result


def _cpu() -> float:
    """Return the CPU seconds of this process and of all below it, also of those that have ended."""
    total, this = 0.0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # of a process: user, system; of its ended children: user, system
    return total
