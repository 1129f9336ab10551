"""Stops and resumes generation of the whole application, from any ingress."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.gate import PauseMode

HOLD_S = 1800.0  # for running requests to end
AskIngresses: TypeAlias = Callable[..., Awaitable[Sequence[Any]]]
"""Calls a method of every ingress, given its name, seconds and arguments. Returns the answers of those that live."""


class Rollouts:
    """The operators' calls that reach all ingresses and all replicas. One per ingress; belongs to its event loop."""

    def __init__(self, dispatcher: Dispatcher, ask_ingresses: AskIngresses | None = None) -> None:
        """`ask_ingresses` None: this is the only one."""
        self._dispatcher, self._ask_ingresses = dispatcher, ask_ingresses
        self._turn = asyncio.Lock()

    @property
    def is_paused(self) -> bool:
        return not self._dispatcher.gate.is_open

    async def pause(self, mode: PauseMode) -> None:
        """Stop generation everywhere; requests that come meanwhile wait. Returns once no replica computes a step."""
        async with self._turn:
            try:
                await self._everywhere("hold", mode)
                await self._dispatcher.tell_all("pause")
            except asyncio.CancelledError:
                await asyncio.shield(self._resume())
                raise

    async def resume(self) -> None:
        """Go on: requests that were stopped with the same tokens, and those that wait."""
        async with self._turn:
            await self._resume()

    async def _resume(self) -> None:
        await self._dispatcher.tell_all("resume")
        await self._everywhere("release")

    async def _everywhere(self, method: str, *arguments: Any) -> None:
        if self._ask_ingresses is not None:
            if not await self._ask_ingresses(method, HOLD_S, *arguments):
                raise RuntimeError(f"the ingresses have not all answered within {HOLD_S:.0f} s")
        elif method == "hold":
            await self._dispatcher.hold(*arguments)
        else:
            self._dispatcher.release()
