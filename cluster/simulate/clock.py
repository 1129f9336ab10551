"""The simulated time: what happens next."""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass(slots=True)
class Clock:
    """Events in order of time; of the same moment, ends of steps first, then as they were entered."""

    now: float = 0.0  # seconds
    _events: list[tuple[float, bool, int, Callable[[float], None]]] = field(default_factory=list)
    _count: int = 0

    def at(self, time: float, event: Callable[[float], None], is_step: bool = False) -> None:
        self._count += 1
        heappush(self._events, (time, not is_step, self._count, event))

    @property
    def is_due(self) -> bool:
        """Whether anything is left to happen."""
        return bool(self._events)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, _, event = heappop(self._events)
            event(self.now)
