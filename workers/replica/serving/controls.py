"""The calls of an operator to a replica, beside requests: stop between two steps, go on, replace weights."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from crossdock.workers.replica.engine.sleep import Sleep
from crossdock.workers.replica.serving.engine_thread import EngineThread
from crossdock.workers.replica.transfer.replica_dock import ReplicaDock
from crossdock.workers.schedule.request.weight_version import WeightVersion

if TYPE_CHECKING:  # an engine on an emulated device imports no torch
    from crossdock.workers.model.new_weights import Arrays
    from crossdock.workers.replica.ranks.rank_messages import WeightMethod

logger = logging.getLogger(__name__)

_SILENT_S = 60.0  # without a call, before the ingress of an update is taken for dead


class Controls:
    """The calls of operators to one engine's thread. Belongs to the event loop of the thread's constructor."""

    def __init__(
        self, thread: EngineThread, num_ranks: int = 1, folder: Path | None = None, checkpoint: str = ""
    ) -> None:
        """`folder`: the weights of the start, None if they are in no file; `checkpoint`: their fingerprint."""
        self._thread = thread
        self._engine = thread.engine
        self._num_ranks = num_ranks
        docks = (each.dock for each in thread.handovers)
        self._docks = [dock for dock in docks if isinstance(dock, ReplicaDock)]
        self._sleep = Sleep(thread.engine, folder, checkpoint, self._withdraw, self._reopen)
        self._update = thread.engine.executor.new_weights
        self._turn = asyncio.Lock()  # of calls that read weights
        self._called_at = -inf  # the latest call of an update that is not put in place yet, on the loop's clock
        self._id_read = ""  # of the folder's weights that the update has read

    async def pause(self) -> None:
        """End the running step, and begin no other until `resume`. Requests keep their tokens and pages, and new ones
        queue. Transfers of pages go on. Routers are notified at once."""
        await self._thread.call(self._stop)

    async def resume(self) -> None:
        """Go on with the requests that are here. Does nothing where the engine is not paused."""
        await self._thread.call(self._go_on)

    async def reset_cache(self) -> None:
        """Forget all cached prefixes. Pages of running requests stay."""
        await self._thread.call(self._engine.pages.block_pool.clear_cache)

    async def check_adapter(self, folder: str) -> str:
        """Return why this replica cannot serve the adapter in a folder; empty: it can."""
        if self._engine.adapters is None:
            return "this server takes no adapters; start it with --enable-lora"
        try:
            await asyncio.to_thread(self._engine.adapters.check, Path(folder))
        except (ValueError, OSError) as error:
            return str(error)
        return ""

    async def num_ranks(self) -> int:
        return self._num_ranks

    async def call_weights(self, method: "WeightMethod", argument: Mapping[str, Any]) -> str:
        """Call the new weights of every rank beside steps, see `NewWeights.call`. Returns the id of a folder's weights.

        Raises:
            ValueError: with the reason why that failed.
        """
        async with self._turn:
            self._called_at = asyncio.get_running_loop().time()
            self._id_read = await self._call(method, argument)
            return self._id_read

    async def _call(self, method: "WeightMethod", argument: Mapping[str, Any]) -> str:
        if self._update is None:
            return str(argument.get("folder", ""))
        return await asyncio.to_thread(self._update.call, method, argument)

    async def read_arrays(self, arrays: "Arrays") -> str:
        """Read whole tensors on every rank beside steps. ValueError: with the reason why that failed."""
        async with self._turn:
            if self._update is not None:
                await asyncio.to_thread(self._update.read_arrays, arrays)
        return ""

    async def checksums(self, which: Literal["read", "held"]) -> Mapping[str, str]:
        """Return the checksums of the tensors that an update has just read, or of those that are in place.

        Raises:
            ValueError: none were put in place; or the memory that steps read is not what was to be put there.
        """
        async with self._turn:
            if self._update is None:
                return {}
            if which == "held":
                await asyncio.to_thread(self._update.call, "check", {})
            return self._update.checksums

    async def catch_up(self, version: tuple[int, str, str, str]) -> None:
        """Read and put in place the newest weights of other replicas, after a restart. ValueError: they are gone.

        Does nothing beside an update, which brings newer ones. An update that begins meanwhile waits for the end.
        """
        weights = WeightVersion(*version)
        now = asyncio.get_running_loop().time()
        is_updated = self._turn.locked() or now - self._called_at < _SILENT_S
        if is_updated or self._engine.scheduler.weights.number >= weights.number:
            return
        async with self._turn:
            # What a dead ingress has left is read over.
            self._called_at = -inf
            self._id_read = ""
            found = await self._call("read", {"folder": weights.folder})
            if found != weights.id:
                raise ValueError(f"{weights.folder} has other weights than those of update {weights.number}")
            await self._put(weights, "end")

    async def put_weights(self, version: tuple[int, str, str, str], in_flight: Literal["keep", "end"]) -> bool:
        """Compute with the weights that were read, from the next step on.

        `version`: the fields of `WeightVersion`. `in_flight`: requests that run go on, over pages of the old weights,
        or end. Where a rank fails, this replica ends: no request may be computed with a part of the weights. Returns
        False where this replica has these weights or later ones already, or has not read them: it came up meanwhile.
        """
        weights = WeightVersion(*version)
        async with self._turn:
            if self._engine.scheduler.weights.number >= weights.number:
                return False
            if self._called_at == -inf or (weights.folder and self._id_read != weights.id):
                return False
            if self._update is not None and not self._update.is_read:
                return False
            await self._put(weights, in_flight)
            self._called_at = -inf
            self._id_read = ""
            return True

    async def _put(self, weights: WeightVersion, in_flight: Literal["keep", "end"]) -> None:

        def put() -> None:
            was_paused = self._engine.scheduler.is_paused
            self._stop()
            if in_flight == "end":
                self._thread.end_all("an update has replaced the weights")
            try:
                if self._update is not None:
                    self._update.put()
                self._sleep.record_steps()  # those of a GPU that had given up its weights
            except Exception:
                logger.exception("new weights could not be put in place: this replica ends")
                self._thread.end()
                raise
            self._engine.scheduler.change_weights(weights)
            if not was_paused:
                self._go_on()

        await self._thread.call(put)
        logger.info("weights %r (update %d) are in place", weights.name, weights.number)

    async def may_sleep(self, level: int, mode: str) -> None:
        """Raise ValueError where this replica cannot sleep so; the message gives the reason."""
        self._sleep.check(level, mode)

    async def sleep(self, level: int) -> None:
        """Give up memory, see `Sleep.sleep`. The engine is paused. ValueError: it has requests, or transfers."""
        async with self._turn:
            if self._sleep.moves and "kv_cache" not in self._sleep.lacks:
                for dock in self._docks:
                    await asyncio.to_thread(dock.drain)
            await self._thread.call(lambda: self._sleep.sleep(level))

    async def wake_up(self, tags: Sequence[str]) -> list[str]:
        """Take memory again, and stay paused. Returns the tags of what is still missing. ValueError as `Sleep.read`.

        Weights that an update has read and not put in place are read over: the update is then told that it is lost."""
        async with self._turn:
            if self._sleep.needs_weights(tags):
                self._called_at = -inf
                self._id_read = ""
            await asyncio.to_thread(self._sleep.read, tags)
            try:
                await self._thread.call(lambda: self._wake(tags))
            finally:
                for dock in self._docks:  # pages may be back where weights are not
                    self._thread.readers.announce(dock.blob)
        return self._sleep.lacks

    def _wake(self, tags: Sequence[str]) -> None:
        try:
            self._sleep.wake(tags)
        except ValueError:  # there is not enough memory: the replica sleeps on
            raise
        except Exception:
            logger.exception("memory could not be taken again: this replica ends")
            self._thread.end()
            raise

    def _withdraw(self) -> None:
        for dock in self._docks:
            dock.withdraw()

    def _reopen(self) -> None:
        for dock in self._docks:
            dock.reopen()

    async def given_up(self) -> list[str]:
        """Return the tags of what is given up; none: this replica is awake."""
        return self._sleep.lacks

    def _stop(self) -> None:
        self._engine.scheduler.pause(is_paused=True)
        self._thread.finish_steps()
        self._thread.publisher.renew()

    def _go_on(self) -> None:
        self._engine.scheduler.pause(is_paused=False)
        self._thread.publisher.renew()
