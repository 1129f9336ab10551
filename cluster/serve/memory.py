"""Measure the memory of this process and all its children, as Linux counts it."""

from pathlib import Path

from crossdock.workers.model.memory.host_memory import bytes_of

_PROC = Path("/proc")


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
