"""The memory of this machine, as Linux counts it. No torch."""

from pathlib import Path

_PROC = Path("/proc")


def free_on_host() -> int:
    """Return the bytes that new work can have without swapping, within the limit of the container."""
    free = bytes_of(Path("/proc/meminfo"), "MemAvailable")
    limit, current = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(current.read_text()))
    return free


def bytes_of(file: Path, key: str) -> int:
    """Return the bytes of a line such as `Pss: 12 kB` of a file of /proc. OSError: its process has ended."""
    line = next(line for line in file.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) << 10


def used_by_family(pid: int) -> int:
    """Return the bytes that a process and all its descendants hold; memory that several share counts once.

    A process that ends meanwhile counts as 0.
    """
    try:
        held = bytes_of(_PROC / str(pid) / "smaps_rollup", "Pss")
        threads = list((_PROC / str(pid) / "task").iterdir())
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return 0
    return held + sum(used_by_family(int(child)) for child in children)
