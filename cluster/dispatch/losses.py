"""Tells in one sentence where the requests of a lost replica go on, once that is known."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

logger = logging.getLogger("ray.serve")

_SETTLED_S = 1.0  # after a loss, until its requests have mostly been placed again
_DEFAULT_START_S = 5.0  # of a replica, where none has told


@dataclass(slots=True)
class Loss:
    """A replica that was lost, and what became of its requests."""

    replica: str
    role: str
    reason: str
    num_requests: int
    went_on: Counter[str] = field(default_factory=Counter)  # requests by the replicas that go on with them

    def content(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, "went_on": dict(self.went_on)}

    def text(self) -> str:
        """Return the loss as a sentence for people."""
        return loss_text(self.replica, self.role, self.reason, self.num_requests, self.went_on)


def loss_text(replica: str, role: str, reason: str, num_requests: int, went_on: Counter[str]) -> str:
    """Return the sentence about a lost replica: which, of which role, and where its requests go on."""
    parts = [_requests(count, f"on at {name}") for name, count in sorted(went_on.items())]
    if (left := num_requests - went_on.total()) > 0:
        parts.append(f"{left} request{'s' * (left > 1)} wait{'s' * (left == 1)} for a replica, or ended")
    what = ", ".join(parts) or "it had no request"
    return f"replica {replica} ({role}) was lost: {reason}; {what}"


def _requests(count: int, where: str) -> str:
    return f"{count} request{'s' * (count > 1)} go{'es' * (count == 1)} {where}"


class Losses:
    """The replicas that an ingress has lost a moment ago. Belongs to one event loop."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._spawn = spawn
        self._unsettled: dict[str, Loss] = {}  # by replica
        self._none_since: float | None = None  # on the loop's clock; None: a replica is up, or none has been
        self._start_s = 0.0  # the longest start that a replica has told of
        self.on_settled: Callable[[Loss], None] = lambda loss: None

    def joined(self, start_s: float) -> None:
        """Note that a replica is up, whose start took `start_s` seconds; 0: it does not say."""
        self._start_s = max(self._start_s, start_s)
        self._none_since = None

    def lost(self, loss: Loss, *, is_last: bool) -> None:
        """Note that a replica was lost. `is_last`: no other is up."""
        if is_last and self._none_since is None:
            self._none_since = asyncio.get_running_loop().time()
        self._unsettled[loss.replica] = loss
        self._spawn(self._settle(loss))

    def went_on(self, replica: str, others: Sequence[str]) -> None:
        """Note that a request of a lost replica has been placed on others."""
        if (loss := self._unsettled.get(replica)) is not None and others:
            loss.went_on[others[-1]] += 1

    def seconds_until_up(self) -> float:
        """Return after how long a client should try again: until a replica has started, as long as an earlier start."""
        if self._none_since is None:
            return _DEFAULT_START_S if not self._start_s else 1.0
        waited = asyncio.get_running_loop().time() - self._none_since
        return max(1.0, (self._start_s or _DEFAULT_START_S) - waited)

    async def _settle(self, loss: Loss) -> None:
        await asyncio.sleep(_SETTLED_S)
        if self._unsettled.get(loss.replica) is loss:
            del self._unsettled[loss.replica]
        logger.warning("%s", loss.text())
        self.on_settled(loss)
