"""The clock of everything that an ingress waits for: it stands still while the event loop does not run."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

TICK_S = 0.2  # between two readings that are made for the clock's own sake
_MOST_S = 1.0  # most seconds between two readings, however long the process was stopped


@dataclass(slots=True)
class LoopClock:
    """Seconds in which this process could have heard from others.

    A process that was stopped, or whose event loop was blocked, must not blame others for its own silence. Their
    messages of that time are read before any deadline on this clock passes. Read the clock every `TICK_S`.
    """

    monotonic: Callable[[], float] = time.monotonic
    _read: float = field(init=False)
    _now: float = field(init=False)

    def __post_init__(self) -> None:
        self._read = self._now = self.monotonic()

    def now(self) -> float:
        """Return the time in seconds."""
        read = self.monotonic()
        self._now += min(read - self._read, _MOST_S)
        self._read = read
        return self._now
