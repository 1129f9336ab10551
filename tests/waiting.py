"""Wait until a condition holds, or fail when a deadline has passed. No machine should be too slow for the deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
_PAUSE_S = 0.01


def eventually(holds: Callable[[], T], what: Callable[[], object] | str = "", seconds: float = 60.0) -> T:
    """Return the first true value of `holds`. `what`: what to say when the deadline passes."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, (what() if callable(what) else what) or "the condition never held"
        time.sleep(_PAUSE_S)
    return value


async def until(holds: Callable[[], bool | Awaitable[bool]], seconds: float = 60.0) -> None:
    """Do the same among the tasks of an event loop. `holds` may return an awaitable."""
    deadline = time.monotonic() + seconds
    while not (await found if isinstance(found := holds(), Awaitable) else found):
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(_PAUSE_S / 10)
