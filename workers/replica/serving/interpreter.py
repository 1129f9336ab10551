"""The process that serves: short turns for its threads, a small search for garbage, no memory left from its start."""

import gc
import os
import sys
import time
from pathlib import Path

from crossdock.workers.model.weights.heap import trim_heap

SWITCH_S = 0.001
"""Seconds that a thread may hold the interpreter while others wait for it; Python's default is 5 ms. A step of the
engine, or a message of tokens, needs the interpreter many times, and a busy thread beside it delays each of them."""

NEW_OBJECTS = 20_000
"""New objects after which Python looks for garbage among them; its default is 700, which a step of 1,024 streams makes
several times. That took a tenth of the step (`benchmarks/host_time.py`, Zen 3, 2026-11-25)."""


def prepare_interpreter() -> None:
    """Set up the interpreter for serving, once all libraries, the tokenizer and the model are loaded.

    The garbage collector does not look at these objects again, which took 0.1 to 1 s each time. Memory that the start
    has freed goes back to the machine: 116 MiB of a replica's heap after calibration.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    trim_heap()
    sys.setswitchinterval(SWITCH_S)


def wait_quietly(num_threads: int) -> None:
    """Let waiting OpenMP threads sleep. Call before torch is imported, which brings OpenMP.

    The engine shares its cores with the ingress, and spinning threads starve both: a 50 ms step became 1.2 s. Set here
    and not by Ray's runtime environment, which starts a process of its own for these variables.
    """
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", OMP_NUM_THREADS=str(num_threads))


def process_age() -> float:
    """Return the seconds since this process was started, as Linux counts them; 0 where Linux does not."""
    try:
        started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # in ticks since the boot
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")
