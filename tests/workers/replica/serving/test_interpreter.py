"""The interpreter of a process that serves."""

import gc
import platform
import subprocess
import sys

import pytest

from crossdock.workers.replica.serving.interpreter import NEW_OBJECTS, SWITCH_S, prepare_interpreter


def test_interpreter_for_serving_switches_soon_and_skips_what_is_loaded() -> None:
    before, interval, threshold = gc.get_freeze_count(), sys.getswitchinterval(), gc.get_threshold()
    loaded = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    try:
        prepare_interpreter()
        assert gc.get_freeze_count() >= before + len(loaded)
        assert sys.getswitchinterval() <= 2 * SWITCH_S < interval
        assert gc.get_threshold()[0] == NEW_OBJECTS
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
        sys.setswitchinterval(interval)


FREED = """
from pathlib import Path
from crossdock.workers.replica.serving.interpreter import prepare_interpreter

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

start = [bytes(10_000) for _ in range(10_000)]
start = start[-1:]  # at the end of the heap: glibc alone returns nothing that lies before
before = resident()
prepare_interpreter()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_memory_that_the_start_freed_goes_back_to_the_machine() -> None:
    run = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 80 << 20
