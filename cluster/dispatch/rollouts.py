"""Stops and resumes generation of the whole application, and replaces its weights, from any ingress."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias

from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.gate import PauseMode
from crossdock.cluster.dispatch.loops import raise_if_ended
from crossdock.router.actions import ReplicaLost
from crossdock.workers.schedule.request.weight_version import WeightVersion, unlike

logger = logging.getLogger("ray.serve")

HOLD_S = 1800.0  # for running requests to end
_CATCH_UP_S = 1.0  # between two looks for replicas with old weights, or that are paused
_FIRST_REPORTS_S = 5.0  # an ingress that starts waits so long for the reports of replicas
AskIngresses: TypeAlias = Callable[..., Awaitable[Sequence[Any]]]
"""Calls a method of every ingress, given its name, seconds and arguments. Returns the answers of those that live."""


class Rollouts:
    """The operators' calls that reach all ingresses and all replicas. One per ingress; belongs to its event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        ask_ingresses: AskIngresses | None = None,
        server_info: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """`ask_ingresses` None: this is the only one. `server_info`: vLLM's fields that trainers read."""
        self.server_info = server_info
        self._dispatcher = dispatcher
        self._ask_ingresses = ask_ingresses
        self._turn = asyncio.Lock()
        self._catching_up: asyncio.Task[None] | None = None
        self._was_reported = False  # a pause, by replicas, at the last look

    @property
    def is_paused(self) -> bool:
        return not self._dispatcher.gate.is_open

    @property
    def weights(self) -> WeightVersion:
        """The newest weights that replicas have reported."""
        return self._dispatcher.fleet.table.newest

    async def pause(self, mode: PauseMode) -> None:
        """Stop generation everywhere; requests that come meanwhile wait. Returns once no replica computes a step."""
        async with self._turn:
            await self._pause(mode)

    async def resume(self) -> None:
        """Go on: requests that were stopped with the same tokens, and those that wait. ValueError: replicas sleep."""
        async with self._turn:
            if await self.is_sleeping():
                raise ValueError("replicas sleep: use /wake_up")
            await self._resume()

    # -- memory ------------------------------------------------------------------------------------------------------

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Stop generation everywhere, and have all replicas give up pages (level 1), or pages and weights (level 2).

        Raises:
            ValueError: a replica cannot; the message names the reason. Then none sleeps.
        """
        async with self._turn:
            await self._dispatcher.tell_all("may_sleep", level, mode)
            await self._pause(mode)
            await self._dispatcher.tell_all("sleep", level)

    async def wake_up(self, tags: Sequence[str]) -> None:
        """Have all replicas take again what `tags` name, and go on once they lack nothing.

        Raises:
            ValueError: a tag is unknown, or weights cannot be read again; generation stays stopped.
        """
        async with self._turn:
            was_asleep = await self.is_sleeping()
            lacking = await self._dispatcher.tell_all("wake_up", tags)
            if was_asleep and not any(lacking.values()):
                await self._resume()

    async def is_sleeping(self) -> bool:
        """Return whether a replica lacks pages or weights."""
        return any((await self._dispatcher.tell_all("given_up")).values())

    async def reset_cache(self) -> None:
        """Have all replicas forget their cached prefixes."""
        await self._dispatcher.tell_all("reset_cache")

    # -- weights -----------------------------------------------------------------------------------------------------

    async def world_size(self) -> int:
        """Return how many ranks all replicas have together."""
        return sum((await self._dispatcher.tell_all("num_ranks")).values())

    async def join_group(self, init_info: Any) -> None:
        """Have every rank of every replica join the process group that a trainer opens: one place after the other."""
        async with self._turn:
            first = 0
            arguments = dict[str, Sequence[Any]]()
            for name, count in sorted((await self._dispatcher.tell_all("num_ranks")).items()):
                arguments[name] = "join", {"init_info": init_info, "first": first}
                first += count
            await self._dispatcher.tell_all("call_weights", by_name=arguments)

    async def start_update(self) -> None:
        """Begin an update by tensors. ValueError: the weights of a replica cannot be replaced, with the reason."""
        async with self._turn:
            await self._dispatcher.tell_all("call_weights", "start", {})

    async def receive(self, update_info: Any) -> None:
        """Have every rank receive the tensors that a trainer sends to its group meanwhile."""
        async with self._turn:
            await self._dispatcher.tell_all("call_weights", "receive", {"update_info": update_info})

    async def finish_update(self, name: str, mode: PauseMode) -> WeightVersion:
        """Have replicas compute with the tensors that were received. See `update`."""
        return await self.update("", name, mode)

    async def checksums(self) -> Mapping[str, str]:
        """Return the checksums of the tensors that the last update has put in place, by their names in a checkpoint.

        Raises:
            ValueError: there was no update; or replicas differ, or their memory is not what was to be put there.
        """
        async with self._turn:
            table = self._dispatcher.fleet.table
            return await self._checksums(table.by_name.keys() - table.outdated, "held")

    async def _checksums(self, names: Iterable[str], which: Literal["read", "held"]) -> Mapping[str, str]:
        found = await self._dispatcher.tell_all("checksums", by_name=dict.fromkeys(names, (which,)))
        first: Mapping[str, str] = next(iter(found.values()), {})
        if wrong := next(filter(None, (unlike(each, first) for each in found.values())), ""):
            raise ValueError(f"replicas have unlike tensors: {wrong}")
        return first

    async def update(
        self,
        folder: str,
        name: str,
        mode: PauseMode,
        tensors: Sequence[Any] | None = None,
        checksums: Mapping[str, str] | None = None,
    ) -> WeightVersion:
        """Have all replicas compute with other weights. Where one cannot read them, all keep theirs.

        They are read beside steps. Then generation stops as `mode` says, unless it is paused already, the weights are
        put in place, and generation goes on.

        Args:
            folder: a checkpoint, which all machines of replicas see; empty: tensors that were sent.
            name: of the weights, for clients; empty: the number of the update.
            tensors: whole ones by name, in Ray's object store, as its only element; None: a group has received them.
            checksums: of tensors in the folder, by name; each rank compares them with its own.

        Raises:
            ValueError: with the reason for which weights cannot be replaced, or files or tensors are not right, or
                not the same everywhere.
            ReplicaLost: no replica has the new weights.
        """
        async with self._turn:
            if folder or tensors is not None:
                await self._dispatcher.tell_all("call_weights", "start", {})
            argument = {"folder": folder, "checksums": checksums or {}}
            if tensors is None:
                ids = await self._dispatcher.tell_all("call_weights", "read", argument)
            else:
                ids = await self._dispatcher.tell_all("read_objects", tensors)
            if folder and len(set(ids.values())) > 1:
                raise ValueError(f"replicas found unlike files in {folder}: {ids}")
            await self._checksums(ids, "read")
            number = self.weights.number + 1
            weights_id = next(iter(ids.values()), "") if folder else uuid.uuid4().hex
            return await self._put(WeightVersion(number, weights_id, name or str(number), folder), mode)

    async def _put(self, weights: WeightVersion, mode: PauseMode) -> WeightVersion:
        was_paused = self.is_paused
        in_flight = "keep" if was_paused or mode == "keep" else "end"
        if not was_paused:
            await self._pause(mode)
        try:
            done = await self._dispatcher.tell_all("put_weights", tuple(weights), in_flight)
        finally:
            if not was_paused:
                await self._resume(weights.number)
        if not any(done.values()):
            raise ReplicaLost("no replica has the new weights: each was lost meanwhile")
        return weights

    async def start(self) -> None:
        """Learn from the replicas whether generation is paused. From now on, let replicas that have older weights than
        others, because they restarted, catch up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_REPORTS_S):
                while not self._dispatcher.has_heard_all():
                    await asyncio.sleep(0.01)
        self._dispatcher.gate.learn(is_paused=self._is_reported)
        self._catching_up = asyncio.create_task(self._catch_up())

    @property
    def _is_reported(self) -> bool:
        """Return whether a replica reports that it is paused."""
        return bool(self._dispatcher.fleet.table.paused)

    def _learn_pause(self) -> None:
        """Learn of a pause, or of its end, that this ingress was not told of.

        A replica reports the end of a pause a moment after this ingress is told: one report of a pause is none."""
        if self._turn.locked():
            return
        is_reported = self._is_reported
        was_reported = self._was_reported
        self._was_reported = is_reported
        if is_reported == was_reported:
            self._dispatcher.gate.learn(is_paused=is_reported)

    def check(self) -> None:
        """Raise the error that has ended what `start` began."""
        raise_if_ended([self._catching_up])

    def stop(self) -> None:
        """End what `start` began."""
        if self._catching_up is not None:
            self._catching_up.cancel()

    async def _catch_up(self) -> None:
        while True:
            await asyncio.sleep(_CATCH_UP_S)
            self._learn_pause()
            table = self._dispatcher.fleet.table
            newest = self.weights
            behind = [name for name in table.outdated if table.by_name[name].live is not None]
            if newest.folder and behind and not self._turn.locked():
                arguments = {name: (tuple(newest),) for name in behind}
                try:
                    await self._dispatcher.tell_all("catch_up", by_name=arguments)
                except Exception as error:
                    logger.warning("a replica keeps old weights, and gets no requests: %s", error)

    # -- everywhere --------------------------------------------------------------------------------------------------

    async def _pause(self, mode: PauseMode) -> None:
        try:
            await self._everywhere("hold", mode)
            await self._dispatcher.tell_all("pause")
        except BaseException:
            await asyncio.shield(self._resume())
            raise

    async def _resume(self, number: int = 0) -> None:
        await self._dispatcher.tell_all("resume")
        await self._everywhere("release", number)

    async def _everywhere(self, method: str, argument: Any) -> None:
        if self._ask_ingresses is not None:
            if not await self._ask_ingresses(method, HOLD_S, argument):
                raise RuntimeError(f"the ingresses have not all answered within {HOLD_S:.0f} s")
        elif method == "hold":
            await self._dispatcher.hold(argument)
        else:
            await self._dispatcher.release(argument)
