"""Measure the memory of this process and all its children, as Linux counts it, and what the machine has left."""

from pathlib import Path

_PROC = Path("/proc")


def used_by_family(pid: int) -> int:
    """Return the bytes that a process and all its descendants hold; memory that several share counts once.

    A process that ends meanwhile counts as 0.
    """
    try:
        rollup = (_PROC / str(pid) / "smaps_rollup").read_text()
        threads = list((_PROC / str(pid) / "task").iterdir())
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return 0
    return _kib(rollup, "Pss") + sum(used_by_family(int(child)) for child in children)


def left() -> int:
    """Return the bytes that new work can have without swapping, within the limit of the container."""
    free = _kib((_PROC / "meminfo").read_text(), "MemAvailable")
    limit, current = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(current.read_text()))
    return free


def _kib(text: str, key: str) -> int:
    """Return the bytes of a line such as `Pss: 12 kB`."""
    line = next(line for line in text.splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) << 10
