"""The phases of a start as lines for the terminal, each with its seconds. Pure: notices and time come in."""

from collections.abc import Iterator, Mapping
from typing import Any

_OF_REPLICAS = {  # as replicas name them, in order
    "process": "processes of replicas run",
    "libraries": "libraries are imported",
    "weights": "weights are read",
    "kernels": "kernels are compiled, and logits are checked",
    "steps": "steps are measured",
    "ready": "replicas are ready",
}


class StartPhases:
    """Turns what is known of a start into lines: a phase is told when all replicas have ended it."""

    def __init__(self, num_replicas: int, now: float) -> None:
        self._num_replicas = num_replicas
        self._begun = self._last = now
        self._told: set[str] = set()

    def ended(self, phase: str, now: float) -> str:
        """Return the line of a phase that has just ended."""
        seconds = now - self._last
        self._last = now
        return f"{now - self._begun:6.1f} s  {phase} ({seconds:.1f} s)"

    def of_replicas(self, starts: Mapping[str, Mapping[str, Any]], now: float) -> Iterator[str]:
        """Yield the lines of phases that all replicas have ended since the last call.

        `starts`: the notices of replicas that start. A replica whose device is emulated has fewer phases.
        """
        if len(starts) < self._num_replicas:
            return
        for phase, text in _OF_REPLICAS.items():
            if phase not in self._told and all(phase in each["ages"] for each in starts.values()):
                self._told.add(phase)
                yield self.ended(text, now)

    def now_in(self, starts: Mapping[str, Mapping[str, Any]]) -> str:
        """Describe what replicas do now, for a display that changes: the next phase, and how many have ended it."""
        for phase, text in _OF_REPLICAS.items():
            if phase not in self._told:
                count = sum(phase in each["ages"] for each in starts.values())
                return f"{text}: {count} of {self._num_replicas}" if self._num_replicas > 1 else f"until {text}"
        return ""
