"""Wait until a condition holds, or fail when a deadline has passed. No machine should be too slow for the deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 240.0  # a slow and busy machine took more than a minute for what takes an idle one 3 s
_PAUSE_S = 0.01
_SHARE = 0.02  # of the wait so far: a long wait asks less often, so that it takes little time from what it waits for
_LONGEST_PAUSE_S = 0.1
SCRAPE_PAUSE_S = 0.3  # between two scrapes: each has all replicas and ingresses write their metrics


class Clock:
    """A clock that stands still until a test sets it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def eventually(
    holds: Callable[[], T],
    what: Callable[[], object] | str = "",
    seconds: float = PATIENCE_S,
    pause_s: float = _PAUSE_S,
) -> T:
    """Return the first true value of `holds`. `what`: what to say when the deadline passes.

    `pause_s`: least seconds between two questions, for a question that takes many processes' time.
    """
    began = time.monotonic()
    while not (value := holds()):
        waited = time.monotonic() - began
        assert waited < seconds, (what() if callable(what) else what) or "the condition never held"
        time.sleep(max(pause_s, min(_PAUSE_S + _SHARE * waited, _LONGEST_PAUSE_S)))
    return value


async def until(holds: Callable[[], bool | Awaitable[bool]], seconds: float = PATIENCE_S) -> None:
    """Do the same among the tasks of an event loop. `holds` may return an awaitable."""
    began = time.monotonic()
    while not (await found if isinstance(found := holds(), Awaitable) else found):
        waited = time.monotonic() - began
        assert waited < seconds, "the condition never held"
        await asyncio.sleep(min(_PAUSE_S / 10 + _SHARE * waited, _LONGEST_PAUSE_S))
