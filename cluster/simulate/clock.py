"""The simulated time, and the events to come."""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass(slots=True)
class Clock:
    """Events in order of time. Of the same moment, ends of steps come first, then the others in order of entry."""

    now: float = 0.0  # seconds
    _events: list[tuple[float, bool, int, Callable[[float], None]]] = field(default_factory=list)
    _count: int = 0

    def at(self, time: float, event: Callable[[float], None], is_step: bool = False) -> None:
        """Call `event` with the time, at `time` seconds. `is_step`: the event is the end of a step."""
        self._count += 1
        heappush(self._events, (time, not is_step, self._count, event))

    def time(self) -> float:
        """Return the time, in seconds, as a clock of an engine does."""
        return self.now

    @property
    def is_due(self) -> bool:
        """Return whether any event is left."""
        return bool(self._events)

    def stop(self) -> None:
        """Forget all events that are left, so that `run` returns."""
        self._events.clear()

    def run(self) -> None:
        """Run events until none is left."""
        while self._events:
            self.now, _, _, event = heappop(self._events)
            event(self.now)
