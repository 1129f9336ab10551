"""The memory of this machine, as Linux counts it. No torch."""

from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")  # a container sees its own group here
_LIMITS = (  # of version 2 and of version 1: the limit, the use, and the use that Linux takes back first
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def free_on_host() -> int:
    """Return the bytes that new work can have without swapping, within the limit of the container.

    Files in the page cache count as use of a container. Files that no process read lately are free, as for Kubernetes.
    """
    free = bytes_of(Path("/proc/meminfo"), "MemAvailable")
    for limit, used, parts, cached in _LIMITS:
        if (_CGROUP / limit).exists() and (most := (_CGROUP / limit).read_text().strip()) != "max":
            lines = (line.split() for line in (_CGROUP / parts).read_text().splitlines())
            free = min(free, int(most) - int((_CGROUP / used).read_text()) + int(dict(lines)[cached]))
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
