"""Slots for work on pictures that API keys take in turns."""

import asyncio
from collections import Counter, OrderedDict, deque
from typing import Any, TypeAlias

from crossdock.workers.schedule.shares import Shares

_Waiting: TypeAlias = "OrderedDict[str, deque[asyncio.Future[None]]]"  # by host, the next one first


class Turns:
    """Slots that owners take in turns: a hundred pictures of one owner delay another's by one. For one event loop."""

    def __init__(self, num_slots: int, *, leaves_some: bool = False) -> None:
        """`leaves_some`: an owner has a share, so that others find some free; and so has a host within an owner's."""
        self._owners = Shares(num_slots)
        self._of_host: Counter[tuple[str, str]] = Counter()  # slots, by owner and host
        self._leaves_some = leaves_some
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()  # by owner, the next one first

    async def acquire(self, owner: str, host: str = "") -> None:
        """Wait for a slot. `host`: whose answer the work waits for, if any."""
        if self._may_take(owner, host):  # then none that waits may: it would have the slot
            self._take(owner, host)
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, OrderedDict()).setdefault(host, deque()).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._forget(owner, host, future)
            else:  # the slot was given to a caller that has left
                self.release(owner, host)
            raise

    def release(self, owner: str, host: str = "") -> None:
        """Give a slot back, and give free slots to waiting work that may have them now."""
        self._owners.release(owner, 1)
        self._of_host[owner, host] -= 1
        if not self._of_host[owner, host]:
            del self._of_host[owner, host]
        while (found := self._next()) is not None:
            if not found[2].done():
                self._take(*found[:2])
                found[2].set_result(None)

    def release_after(self, work: "asyncio.Future[Any]", owner: str, host: str = "") -> None:
        """Release a slot when work ends that cannot be stopped. The error of a caller that has left has no reader."""

        def release(ended: "asyncio.Future[Any]") -> None:
            self.release(owner, host)
            if not ended.cancelled():
                ended.exception()

        work.add_done_callback(release)

    def _may_take(self, owner: str, host: str) -> bool:
        room = self._owners.room(owner if self._leaves_some else "")
        used = self._of_host[owner, host] if host else 0
        return room >= 1 and (not used or used + 1 <= room - 1)

    def _take(self, owner: str, host: str) -> None:
        self._owners.take(owner, 1)
        self._of_host[owner, host] += 1

    def _next(self) -> "tuple[str, str, asyncio.Future[None]] | None":
        """Remove and return the next waiting work that may have a slot. Its owner is then the last in turn."""
        for owner, hosts in self._waiting.items():
            for host, futures in hosts.items():
                if self._may_take(owner, host):
                    future = futures[0]
                    if not future.done():  # one that has just left costs its owner no turn
                        self._waiting.move_to_end(owner)
                        hosts.move_to_end(host)
                    self._forget(owner, host, future)
                    return owner, host, future
        return None

    def _forget(self, owner: str, host: str, future: "asyncio.Future[None]") -> None:
        """Remove work that still waits, so that its owner does not lose a turn."""
        futures = self._waiting.get(owner, OrderedDict()).get(host, deque())
        if future not in futures:
            return
        futures.remove(future)
        if not futures:
            del self._waiting[owner][host]
        if not self._waiting[owner]:
            del self._waiting[owner]
