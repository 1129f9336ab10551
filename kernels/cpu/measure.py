"""Measure CPU kernels at the start, and remember the seconds for this machine in the cache directory.

One process of a machine measures at a time. The others wait for its file, so that all replicas of a machine choose
alike, and no measurement competes with another.
"""

import fcntl
import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from crossdock.kernels.cache import cache_dir, read_cached, write_cached
from crossdock.kernels.cpu.build import cpu_flags
from crossdock.kernels.cpu.choice import KernelChoice, choose
from crossdock.kernels.options import Kernel

logger = logging.getLogger(__name__)

Table: TypeAlias = dict[Kernel, list[float]]
"""Seconds of each kernel, one number for each number of rows."""

_SECONDS = 0.4  # per table after its first pass, of the clock and of this process: others may have the cores
_MAX_SECONDS = 2.0
_MAX_PASSES = 7


@dataclass(frozen=True, slots=True)
class Timed:
    """Calls of equal work on different data. The least seconds of one, times `scale`, count towards a cell.

    A call should take less than a few milliseconds: then other processes interrupt few of them.
    """

    calls: Sequence[Callable[[], object]]
    scale: float = 1.0


Cells: TypeAlias = dict[tuple[Kernel, int], list[Timed]]
"""The calls of each kernel for each number of rows."""


def measured_choice(
    name: str,
    key: Mapping[str, object],
    kernels: Sequence[Kernel],
    rows: Sequence[int],
    cells: Callable[[], Cells],
    max_kernels: int = 2,
) -> KernelChoice:
    """Return the choice between `kernels` for these numbers of rows, and log it.

    Args:
        name: for the log.
        key: names what is measured, as JSON values.
        cells: makes the calls; called only if this machine has not measured them before.
        max_kernels: see `choose`.
    """
    whole = {"name": name, **key, "kernels": list(kernels), "rows": list(rows)}
    table = _remembered(whole, lambda: measure(kernels, rows, cells()))
    choice = choose(table, rows, max_kernels)
    shown = ", ".join(f"{kernel} {'/'.join(f'{1e3 * s:.3g}' for s in seconds)}" for kernel, seconds in table.items())
    logger.info("%s: %s (ms for %s rows: %s)", name, choice, "/".join(map(str, rows)), shown)
    return choice


def measure(kernels: Sequence[Kernel], rows: Sequence[int], cells: Cells) -> Table:
    """Return, for each cell, the sum of the least seconds of its calls times their scales.

    Kernels alternate, so that other load on the machine slows all of them alike.
    """
    least = {key: [math.inf] * len(calls) for key, calls in cells.items()}
    for calls in cells.values():
        for timed in calls:
            timed.calls[0]()  # prepares what is prepared once
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(_MAX_PASSES):
        for count in rows:
            for kernel in kernels:
                for j, timed in enumerate(cells[kernel, count]):
                    for call in timed.calls:
                        before = time.perf_counter()
                        call()
                        least[kernel, count][j] = min(least[kernel, count][j], time.perf_counter() - before)
        elapsed = time.perf_counter() - start
        if elapsed > _MAX_SECONDS or (elapsed > _SECONDS and time.process_time() - cpu_start > _SECONDS):
            break
    return {
        kernel: [
            sum(s * timed.scale for s, timed in zip(least[kernel, count], cells[kernel, count], strict=True))
            for count in rows
        ]
        for kernel in kernels
    }


def _remembered(key: Mapping[str, object], measure_now: Callable[[], Table]) -> Table:
    """Return the table under `key` for this machine; measure if no process of this machine has."""
    whole = {**key, **kernels_and_cpu(), "threads": torch.get_num_threads()}
    text = json.dumps(whole, sort_keys=True)
    path = cache_dir() / "kernels" / f"seconds-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if (table := _read(path, text)) is not None:
        return table
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name("measure.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the kernel if the process dies
            if (table := _read(path, text)) is None:
                table = measure_now()
                write_cached(path, text, table)
            return table
    except OSError as error:
        logger.info("the kernels are measured again at every start: %s", error)
        return measure_now()


def kernels_and_cpu() -> dict[str, str]:
    """Return what names this CPU and the kernels as they are now: seconds measured with others say nothing."""
    return {"cpu": _cpu(), "torch": torch.__version__, "code": _code()}


def _cpu() -> str:
    """Return the CPU's model and instruction sets."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = ("model name", "cpu family", "model", "CPU part", "CPU implementer")
    found = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in reversed(lines)}
    return " ".join([platform.machine(), *(found.get(name, "") for name in names), *sorted(cpu_flags())])


def _code() -> str:
    """Return a name for the kernels as they are now: other code has other seconds."""
    sources = (
        Path(__file__).with_name(name).read_bytes()
        for name in (
            *("decoder.cpp", "attention.cpp", "layer_steps.cpp", "decoder.py", "layer_steps.py", "linear.py"),
            *("cpu_attention.py", "stack_choice.py"),
        )
    )
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]


def _read(path: Path, key: str) -> Table | None:
    """Return the table in a file; None if there is none, or not a whole one."""
    try:
        table: Table = {kernel: [float(s) for s in seconds] for kernel, seconds in read_cached(path, key).items()}
    except (ValueError, TypeError, AttributeError):
        return None
    is_whole = table and all(0 < s < math.inf for seconds in table.values() for s in seconds)
    return table if is_whole else None
