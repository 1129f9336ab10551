"""The calls of an operator to a replica, beside requests: stop between two steps, go on."""

from crossdock.workers.replica.serving.engine_thread import EngineThread


class Controls:
    """The calls of operators to one engine's thread. Belongs to the event loop of the thread's constructor."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread, self._engine = thread, thread.engine

    async def pause(self) -> None:
        """End the running step, and begin no other until `resume`. Requests keep their tokens and pages, and new ones
        queue. Transfers of pages go on. Routers are notified at once."""

        def stop() -> None:
            self._engine.pause()
            self._thread.finish_steps()
            self._thread.publisher.renew()

        await self._thread.call(stop)

    async def resume(self) -> None:
        """Go on with the requests that are here. Does nothing where the engine is not paused."""

        def go_on() -> None:
            self._engine.resume()
            self._thread.publisher.renew()

        await self._thread.call(go_on)
