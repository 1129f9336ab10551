"""An engine that is ready to serve, and what its replica says about it. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.report.profile import SchedulingProfile


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that has started, with the profile and the machine that its replica advertises."""

    engine: Engine
    profile: SchedulingProfile
    checkpoint: str  # names the weights' files
    machine: dict[str, Any]  # see `describe_machine`
    folder: Path | None = None  # of these files; None: the device is emulated
