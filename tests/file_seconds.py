"""Write the seconds and the memory of each test file of a run: one line for a file, when its last test has ended."""

import os
import time
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

TO = "CROSSDOCK_TESTS_SECONDS"  # names the file to append to: path, wall seconds, CPU seconds, MiB; tabs between


class _Spent:
    """Wall seconds, and CPU seconds of this process and of ended children, since the object was made."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.monotonic(), _cpu()

    def since(self) -> tuple[float, float]:
        return time.monotonic() - self.wall, _cpu() - self.cpu


_start: list[_Spent] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    if not _start:
        _start.append(_Spent())
    result = yield
    if nextitem is None or nextitem.path != item.path:
        wall, cpu = _start.pop().since()
        mib = psutil.Process().memory_info().rss >> 20
        if to := os.environ.get(TO):
            path = item.path.relative_to(Path(__file__).parents[1])
            with open(to, "a") as file:
                file.write(f"{path}\t{wall:.2f}\t{cpu:.2f}\t{mib}\n")
    return result


def _cpu() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
