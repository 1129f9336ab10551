"""Remember the seconds of CPU kernels for this machine, in the cache directory, and check them at each later start.

One process of a machine measures at a time. The others wait for its file, so that replicas which start together choose
alike, and no measurement competes with another.
"""

import fcntl
import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO

import torch

from crossdock.kernels.cache import cache_dir, read_cached, write_cached
from crossdock.kernels.cpu.build import cpu_flags
from crossdock.kernels.cpu.choice import KernelChoice, choose, sampled_rows
from crossdock.kernels.cpu.measure import SAMPLE_S, Cells, measure
from crossdock.kernels.cpu.measured import Measured, Table, fits, joined
from crossdock.kernels.options import Kernel

logger = logging.getLogger(__name__)

_SAME_START_S = 60.0  # a file that is younger comes from a replica of the same start, and is not checked
_LONGEST_WAIT_S = 60.0  # for other processes to measure: each takes seconds, unless it is stopped
_POLL_S = 0.05
_NOT_KEPT = "the seconds of kernels that are measured now are not kept for later starts: %s"


def measured_choice(
    name: str,
    key: Mapping[str, object],
    kernels: Sequence[Kernel],
    rows: Sequence[int],
    cells: Callable[[Sequence[int]], Cells],
    max_kernels: int = 2,
) -> KernelChoice:
    """Return the choice between `kernels` for these numbers of rows, and log it.

    A start that finds seconds of an earlier one measures a sample again. If that calls for clearly another choice, or
    if the machine was busy when they were measured, all of them are measured again.

    Args:
        name: for the log.
        key: names what is measured, as JSON values.
        cells: makes the calls for some of `rows`.
        max_kernels: see `choose`.
    """
    whole = {"name": name, **key, "kernels": list(kernels), "rows": list(rows)}
    now = partial(_measured_now, name, kernels, rows, cells, max_kernels)
    measured = _remembered(whole, now)
    choice = choose(measured.seconds, rows, max_kernels)
    table = measured.seconds.items()
    shown = ", ".join(f"{kernel} {'/'.join(f'{1e3 * s:.3g}' for s in seconds)}" for kernel, seconds in table)
    busy = "; the machine was busy, so the next start measures again" if measured.is_disturbed else ""
    logger.info("%s: %s (ms for %s rows: %s)%s", name, choice, "/".join(map(str, rows)), shown, busy)
    return choice


def _measured_now(
    name: str,
    kernels: Sequence[Kernel],
    rows: Sequence[int],
    cells: Callable[[Sequence[int]], Cells],
    max_kernels: int,
    earlier: Measured | None,
) -> Measured:
    """Return `earlier` unless a sample contradicts it, else what is measured now, joined with `earlier`."""
    if earlier is not None and not earlier.is_disturbed:
        choice = choose(earlier.seconds, rows, max_kernels)
        few = sampled_rows(choice, rows)
        sample = measure(kernels, few, cells(few), SAMPLE_S)
        if sample.is_disturbed or fits(sample.seconds, few, earlier.seconds, rows, choice):
            return earlier  # CPU time says too little against seconds
        logger.info("%s: %s was chosen at an earlier start and is slower now; all is measured again", name, choice)
    now = measure(kernels, rows, cells(rows))
    return now if earlier is None else joined(earlier, now, rows, max_kernels)


def _remembered(key: Mapping[str, object], now: Callable[[Measured | None], Measured]) -> Measured:
    """Return the seconds under `key` for this machine: those of a replica of the same start, or else those of `now`.

    `now` takes the seconds of an earlier start, None if there are none.
    """
    whole = {**key, **kernels_and_cpu(), "threads": torch.get_num_threads()}
    text = json.dumps(whole, sort_keys=True)
    path = cache_dir() / "kernels" / f"seconds-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if _is_of_this_start(path) and (measured := _read(path, text)) is not None:
        return measured
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_alone = stack.enter_context(_turn(path.with_name("measure.lock")))
        except OSError as error:
            logger.info(_NOT_KEPT, error)
            return now(_read(path, text))
        earlier = _read(path, text)
        if _is_of_this_start(path) and earlier is not None:  # another process measured while this one waited
            return earlier
        measured = now(earlier)
        if not is_alone:
            measured = replace(measured, is_disturbed=True)
        try:
            write_cached(path, text, asdict(measured))
        except OSError as error:
            logger.info(_NOT_KEPT, error)
        return measured


@contextmanager
def _turn(path: Path) -> Iterator[bool]:
    """Wait until no other process of this machine measures, but not for ever. Yields whether none does."""
    with path.open("w") as lock:
        is_alone, end = False, time.monotonic() + _LONGEST_WAIT_S
        with suppress(OSError):  # some network file systems have no locks: then others may measure at the same time
            while not (is_alone := _is_locked(lock)) and time.monotonic() < end:
                time.sleep(_POLL_S)
        yield is_alone


def _is_locked(lock: IO[str]) -> bool:
    """Try to lock the file. Linux frees the lock when it is closed, also if the process dies."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_of_this_start(path: Path) -> bool:
    try:
        return 0 <= time.time() - path.stat().st_mtime < _SAME_START_S
    except OSError:
        return False


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


def _read(path: Path, key: str) -> Measured | None:
    """Return what a file holds; None if there is none, or not a whole one."""
    try:
        value = read_cached(path, key)
        table: Table = {kernel: [float(s) for s in seconds] for kernel, seconds in value["seconds"].items()}
        is_disturbed = bool(value["is_disturbed"])
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    is_whole = table and all(0 < s < math.inf for seconds in table.values() for s in seconds)
    return Measured(table, is_disturbed) if is_whole else None
