"""A deadline for the steps of a replica on GPUs, kept by the host.

A GPU that hangs without an error holds the thread that waits for it, while the process answers health checks.

A rank that hangs holds the others inside NCCL, where the host waits for the GPU and no call returns. NCCL's own
watchdog would end the process by an abort: no handler runs, and the reason is in no log of ours. That watchdog does
not see collectives that a CUDA graph replays.
"""

import threading
import time
from collections.abc import Callable


class StepDeadline:
    """Calls `on_late` once, on a thread of its own, if no step ends for `seconds` while one is in flight."""

    def __init__(self, seconds: float, on_late: Callable[[], None], clock: Callable[[], float] = time.monotonic):
        self._seconds = seconds
        self._on_late = on_late
        self._clock = clock
        self._num_in_flight = 0
        self._since = 0.0  # when the oldest step in flight began or the one before it ended, whichever was later
        self._changed = threading.Condition()
        threading.Thread(target=self._watch, name="step deadline", daemon=True).start()

    def begin(self) -> None:
        with self._changed:
            if not self._num_in_flight:
                self._since = self._clock()
                self._changed.notify()
            self._num_in_flight += 1

    def end(self) -> None:
        with self._changed:
            self._num_in_flight -= 1
            self._since = self._clock()

    def left(self) -> float | None:
        """Return the seconds until the step in flight is late; None: no step is in flight."""
        return self._since + self._seconds - self._clock() if self._num_in_flight else None

    def _watch(self) -> None:
        with self._changed:
            while (left := self.left()) is None or left > 0:
                self._changed.wait(left)
        self._on_late()
