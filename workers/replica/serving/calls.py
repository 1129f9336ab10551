"""The calls of an event loop that the engine's thread answers between two steps."""

import asyncio
from collections.abc import Callable

from crossdock.workers.replica.serving.inbox import Inbox


class Calls:
    """The calls that wait for their answers. Belongs to the event loop that constructed it."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._awaited: set[asyncio.Future[None]] = set()

    async def call(self, function: Callable[[], None]) -> None:
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
