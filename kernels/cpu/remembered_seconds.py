"""Remember the seconds of CPU kernels: one file for each kind of machine, in the cache directory.

One process of a machine measures at a time. The others wait for the file, so that replicas which start together choose
alike, and no measurement competes with another.
"""

import fcntl
import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, ValidationError

from crossdock.kernels.cache import cache_dir, read_cached, write_cached
from crossdock.kernels.cpu.build import cpu_flags
from crossdock.kernels.cpu.choice import KernelChoice, choose, only
from crossdock.kernels.cpu.measure import Cells, Seconds, measure
from crossdock.kernels.options import Kernel

logger = logging.getLogger(__name__)

_KEPT_S = 7 * 86400.0  # then all is measured again: no wrong choice stays for ever
_DISTURBED_S = 86400.0  # … sooner, if the machine was busy; but not at each start, of which it would take seconds
_LONGEST_WAIT_S = 60.0  # for other processes to measure: each takes seconds, unless it is stopped
_POLL_S = 0.05


class _Kept(BaseModel):
    """One measurement, as the file has it."""

    model_config = ConfigDict(allow_inf_nan=False)

    seconds: dict[Kernel, list[PositiveFloat]]
    is_disturbed: bool
    measured_at: float  # seconds since 1970

    def counts(self) -> bool:
        """Return whether a start need not measure again."""
        return 0 <= time.time() - self.measured_at < (_DISTURBED_S if self.is_disturbed else _KEPT_S)


def measured_choice(
    name: str,
    key: Mapping[str, object],
    kernels: Sequence[Kernel],
    rows: Sequence[int],
    cells: Callable[[Sequence[int]], Cells],
) -> KernelChoice:
    """Return the choice between `kernels` for these numbers of rows, and log it.

    Seconds count for a week; those of a busy machine for a day. A single kernel is not measured.

    Args:
        name: for the log.
        key: names what is measured, as JSON values.
        cells: makes the calls for some of `rows`.
    """
    if len(kernels) == 1:
        return only(kernels[0])
    whole = {"name": name, **key, "kernels": list(kernels), "rows": list(rows), "threads": torch.get_num_threads()}
    kept = _remembered(json.dumps(whole, sort_keys=True), lambda: measure(kernels, rows, cells(rows)))
    choice = choose(kept.seconds, rows)
    table = kept.seconds.items()
    shown = ", ".join(f"{kernel} {'/'.join(f'{1e3 * s:.3g}' for s in seconds)}" for kernel, seconds in table)
    busy = "; the machine was busy, so a start after a day measures again" if kept.is_disturbed else ""
    logger.info("%s: %s (ms for %s rows: %s)%s", name, choice, "/".join(map(str, rows)), shown, busy)
    return choice


def _remembered(key: str, now: Callable[[], tuple[Seconds, bool]]) -> _Kept:
    """Return the seconds that the file has under `key` if they count, else what `now` measures, which is kept."""
    code = json.dumps(kernels_and_cpu(), sort_keys=True)
    path = cache_dir() / "kernels" / f"seconds-{hashlib.sha256(_cpu().encode()).hexdigest()[:16]}.json"
    end = time.monotonic() + _LONGEST_WAIT_S
    with ExitStack() as turn:
        lock: IO[str] | None = None
        with suppress(OSError):  # in a directory that can only be read there are no turns
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = turn.enter_context(path.with_name("measure.lock").open("w"))
        while True:
            is_mine = lock is None or _is_locked(lock)
            kept = _read(path, code).get(key)  # another process may have measured while this one waited
            if kept is not None and kept.counts():
                return kept
            if is_mine or time.monotonic() > end:
                break
            time.sleep(_POLL_S)
        seconds, is_disturbed = now()
        if is_disturbed and kept is not None and not kept.is_disturbed:
            return kept  # old seconds of an idle machine say more
        measured = _Kept(seconds=seconds, is_disturbed=is_disturbed, measured_at=time.time())
        try:
            others = {name: each.model_dump() for name, each in _read(path, code).items()}
            write_cached(path, code, {**others, key: measured.model_dump()})
        except OSError as error:
            logger.info("the seconds of kernels that are measured now are not kept for later starts: %s", error)
        return measured


def _is_locked(lock: IO[str]) -> bool:
    """Try to lock the file. Linux frees the lock when it is closed, also if the process dies."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have no locks
        return True
    return True


def kernels_and_cpu() -> dict[str, str]:
    """Return the CPU, the version of torch and a hash of the kernels, for which measured seconds are valid."""
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
    here = Path(__file__).parent
    names = ("decoder.py", "layer_steps.py", "linear.py", "cpu_attention.py", "stack_choice.py", "packed_linear.py")
    paths = [*sorted(here.glob("*.cpp")), *sorted(here.glob("*.h")), *(here / name for name in names)]
    sources = (path.read_bytes() for path in paths)
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]


def _read(path: Path, code: str) -> dict[str, _Kept]:
    """Return the measurements of a file that are whole, by key."""
    found = {}
    entries = read_cached(path, code)
    for key, value in entries.items() if isinstance(entries, dict) else ():
        with suppress(ValidationError):
            found[key] = _Kept.model_validate(value)
    return found
