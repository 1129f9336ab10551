"""The sections of each call, in the order in which they are measured."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from gpu import attention, checks, engines, features, limit, others, served, steps, transfer
from gpu.cases import Bench, Case, Section
from gpu.rows import Figures

_CALLS = {
    "truth": [*engines.SECTIONS, *limit.SECTIONS, features.SAMPLING, *attention.SECTIONS],
    "features": [*features.SECTIONS, *transfer.SECTIONS, engines.SHAPES],
    "servers": [*served.SECTIONS, *features.BESIDE_SERVERS],
    "kernels": [*checks.SECTIONS, *steps.SECTIONS],
    "others": [*attention.TILES, *others.SECTIONS],
}


def of(calls: Sequence[str]) -> list[Section]:
    """Return the sections of these calls; first the machine and its limits."""
    machine = Section("machine", 30.0, _machine)
    return [machine, attention.CEILINGS, *(section for call in calls for section in _CALLS.get(call, []))]


def _machine(bench: Bench) -> Iterator[Case]:
    yield Case("device", partial(describe, bench))


def describe(bench: Bench) -> Figures:
    """Return the device, the versions of packages, and the commit that is measured."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers", "numpy")}
    return {
        "device": bench.device.describe(),
        **packages,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _commit() -> str:
    """Return the checkout's commit, or "unknown": a copy of the files has none."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
