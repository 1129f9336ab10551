"""The actions that other threads ask of the engine's thread, to be done between two steps; calls await the answer."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator

_MOST_AT_ONCE = 16
"""Submissions and calls that are handled between two steps. Each takes up to a millisecond behind a long queue, and
running streams wait for all of them: so a thousand at once delay each step by 16 ms instead of one step by a second."""


class Inbox:
    """Actions in two queues. Aborts and events of transfers go first, because they free pages; all others are limited.

    So an abort may overtake an earlier submission.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._urgent: deque[Callable[[], None]] = deque()
        self._others: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def post(self, action: Callable[[], None], is_urgent: bool = False) -> None:
        """Queue an action, from any thread. RuntimeError: the engine's thread has ended; urgent ones are dropped."""
        with self._wake:
            if self.is_closed and not is_urgent:
                raise RuntimeError("the replica has ended")
            (self._urgent if is_urgent else self._others).append(action)
            self._wake.notify()

    def close(self) -> None:
        """Let `wait` return False from now on."""
        with self._wake:
            self.is_closed = True
            self._wake.notify()

    def wait(self, can_step: Callable[[], bool], seconds: float | None) -> bool:
        """Wait for an action, or until a step is possible, at most so many seconds. Return False after `close`."""
        with self._wake:
            self._wake.wait_for(lambda: len(self) or self.is_closed or can_step(), seconds)
            return not self.is_closed

    def due(self) -> Iterator[Callable[[], None]]:
        """Yield the actions to run before the next step."""
        for _ in range(len(self._urgent)):
            yield self._urgent.popleft()
        for _ in range(min(len(self._others), _MOST_AT_ONCE)):
            yield self._others.popleft()


class Calls:
    """The calls of an event loop that wait for their answers. Belongs to the event loop that constructed it."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._awaited: set[asyncio.Future[None]] = set()

    async def call(self, function: Callable[[], object]) -> None:
        """Run `function` between two steps, in the engine's thread.

        Raises what `function` raises, and RuntimeError where the replica has ended.
        """
        done: asyncio.Future[None] = self._loop.create_future()

        def run() -> None:
            try:
                function()
            except Exception as error:
                self._loop.call_soon_threadsafe(_settle, done, error)
            else:
                self._loop.call_soon_threadsafe(_settle, done, None)

        self._inbox.post(run)
        self._awaited.add(done)
        done.add_done_callback(self._awaited.discard)
        await done

    def fail(self) -> None:
        """Fail every call that waits: the thread has ended."""
        for answer in [*self._awaited]:
            _settle(answer, RuntimeError("the replica has ended"))


def _settle(future: "asyncio.Future[None]", error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(None)
