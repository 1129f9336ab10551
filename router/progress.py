"""Whether a request moves: what its replicas last answered about it, and since when they have answered the same."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

Numbers = Sequence[int | str]
"""How far a replica is with a request: numbers of any kind, of which one differs whenever the request has moved."""


@dataclass(slots=True)
class ProgressWatch:
    """The answers of the replicas of one attempt."""

    asked: list[str] = field(default_factory=list)  # replicas whose answer is awaited
    unchanged_since: float = inf  # seconds; infinity before the first answer
    _numbers: dict[str, Numbers | None] = field(default_factory=dict)  # by replica: the last answer

    def take_asked(self) -> list[str]:
        """Return the replicas that have not answered, and await none of them any more."""
        asked, self.asked = self.asked, []
        return asked

    def answered(self, replica: str, numbers: Numbers | None, now: float) -> bool:
        """Take in an answer; None: the replica does not have the request. Return whether None came twice in a row."""
        self.asked.remove(replica)
        is_first = replica not in self._numbers
        if not is_first and self._numbers[replica] == numbers:
            return numbers is None
        self._numbers[replica] = numbers
        if not is_first or self.unchanged_since == inf:
            self.unchanged_since = now
        return False
