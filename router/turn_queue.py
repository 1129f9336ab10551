"""The turns of suspect requests: one is tried at a time, so that one that ends replicas takes no others with it.

Sans-IO: the dispatcher drives this on an event loop, the simulator on simulated time.
"""

from dataclasses import dataclass, field
from math import inf

MOST_WAIT_S = 10.0
"""Seconds in which every suspect gets its turn.

Many requests are suspect at once where a replica with a long queue dies: then turns are short, and a few suspects are
tried beside each other."""

_LEAST_TURN_S = 0.1


@dataclass(slots=True, eq=False)
class TurnQueue:
    """The suspect requests of one ingress. The driver calls `begin` after `enter` and `leave`, and at `ends_at`."""

    longest_s: float  # of one turn
    holder: str | None = None  # the request whose turn it is
    ends_at: float = inf  # seconds: when the turn ends by itself
    _waiting: dict[str, float] = field(default_factory=dict)  # by request: since when; the first gets the next turn

    def enter(self, request_id: str, now: float) -> None:
        """Queue a suspect request. `begin` returns it when its turn begins."""
        self._waiting[request_id] = now

    def leave(self, request_id: str) -> bool:
        """Let a request wait no longer, or end its turn: it has a token, or has ended. Return whether a turn ended."""
        if self.holder != request_id:
            self._waiting.pop(request_id, None)
            return False
        self.holder = None
        self.ends_at = inf
        return True

    def begin(self, now: float) -> str | None:
        """Return the request whose turn begins now; None: another's turn goes on, or none waits.

        The turn ends with `leave`, or at `ends_at`.
        """
        if self.holder is not None and now < self.ends_at:
            return None
        self.holder = next(iter(self._waiting), None)
        if self.holder is None:
            self.ends_at = inf
            return None
        del self._waiting[self.holder]
        oldest = now - next(iter(self._waiting.values()), now)
        self.ends_at = now + turn_seconds(self.longest_s, len(self._waiting), oldest)
        return self.holder


def turn_seconds(longest: float, num_waiting: int, oldest: float) -> float:
    """Return how long a turn may last while others wait, the oldest for `oldest` seconds."""
    if not num_waiting:
        return longest
    return min(longest, max(_LEAST_TURN_S, (MOST_WAIT_S - oldest) / num_waiting))
