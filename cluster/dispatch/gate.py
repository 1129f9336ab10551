"""Holds requests while an operator has paused generation: new ones wait before they are placed."""

import asyncio
from typing import Literal, TypeAlias

from crossdock.router.actions import ReplicaLost

PauseMode: TypeAlias = Literal["abort", "wait", "keep"]
"""What happens to the requests that run: they end now, they run to their ends, or they stop and go on later."""

MOST_WAIT_S = 1800.0  # of a request at the gate; trainers wait so long for an update of weights


class GenerationPaused(ReplicaLost):
    """Generation was paused for as long as a request may wait."""


class Gate:
    """The requests of one ingress that have passed, by id, and whether more may. Belongs to one event loop."""

    def __init__(self) -> None:
        self.cut: set[str] = set()  # requests that have passed and are to end now
        self._inside: set[str] = set()
        self._begins, self._places = asyncio.Event(), asyncio.Event()
        self._left = asyncio.Event()  # a request has ended
        self._is_learnt = False  # closed as replicas report, without an operator's call to this ingress
        self.open()

    @property
    def is_open(self) -> bool:
        return self._begins.is_set()

    def open(self) -> None:
        """Let requests begin and attempts be placed."""
        self._is_learnt = False
        self._begins.set()
        self._places.set()

    async def enter(self, request_id: str) -> None:
        """Wait until requests may begin, and count one as inside. GenerationPaused: it took too long."""
        await _opened(self._begins)
        self._inside.add(request_id)

    def leave(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._inside.discard(request_id)
        self.cut.discard(request_id)
        self._left.set()

    async def place(self) -> None:
        """Wait until an attempt at a request that is inside may be placed. GenerationPaused: it took too long."""
        await _opened(self._places)

    def close(self, mode: PauseMode) -> None:
        """Let no request begin. In mode `keep`, those inside are not placed again; in mode `abort` they are `cut`."""
        self._is_learnt = False
        self._begins.clear()
        if mode == "keep":
            self._places.clear()
        if mode == "abort":
            self.cut |= self._inside

    def learn(self, *, is_paused: bool) -> None:
        """Close because replicas report a pause that this ingress was not told of: it has begun since. Open again once
        they report none. What an operator's call has closed stays closed."""
        if is_paused and self.is_open:
            self.close("keep")
            self._is_learnt = True
        elif not is_paused and self._is_learnt:
            self.open()

    async def wait_until_empty(self) -> None:
        """Wait until all requests inside have ended."""
        while self._inside:
            self._left.clear()
            await self._left.wait()


async def _opened(event: asyncio.Event) -> None:
    if event.is_set():  # the usual case; a clock for each request would cost more than all of this file
        return
    try:
        async with asyncio.timeout(MOST_WAIT_S):
            await event.wait()
    except TimeoutError:
        raise GenerationPaused(f"Generation has been paused for {MOST_WAIT_S:.0f} s") from None
