"""An answer that is costly to find, and that all who ask within a short time share."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


@dataclass(slots=True)
class SharedAnswer(Generic[_Value]):
    """Asks once at a time, and not again while the last answer is newer than `holds_s` seconds. A failure is no answer:
    the next call asks again."""

    ask: Callable[[], Awaitable[_Value]]
    spawn: Callable[..., "asyncio.Task[_Value]"]  # runs a coroutine outside of the HTTP request that needs it
    holds_s: float
    _asking: "asyncio.Task[_Value] | None" = None
    _answered_at: float = field(default=-inf)

    async def get(self) -> _Value:
        """Return the answer. Exceptions of `ask` are raised."""
        now = asyncio.get_running_loop().time()
        if self._asking is None or (self._asking.done() and now - self._answered_at >= self.holds_s):
            self._asking = self.spawn(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> _Value:
        answer = await self.ask()
        self._answered_at = asyncio.get_running_loop().time()
        return answer
