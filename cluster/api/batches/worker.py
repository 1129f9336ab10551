"""Runs batches beside the requests of clients: lines without a result, as fast as the fleet takes them."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from crossdock.cluster.api.batches.folder import BatchFolder
from crossdock.cluster.api.batches.lines import MOST_LINE_BYTES
from crossdock.cluster.api.batches.pace import Pace
from crossdock.cluster.api.batches.run import LOOK_S, Answer, Run, Serving
from crossdock.cluster.api.batches.turns import BatchTurns, Running
from crossdock.cluster.dispatch.loops import raise_if_ended
from crossdock.workers.schedule.shares import Shares

logger = logging.getLogger("ray.serve")

_MOST_RUNNING = 8  # batches of this ingress at once; other batches wait for a turn, or for another ingress
_FAILED_S = (10.0, 600.0)  # shortest and longest wait before a batch that failed here, as by a full disk, is run again
_SWEEP_S = 600.0  # between two looks for what could not be deleted
_MEMORY_BYTES = 1 << 30  # of lines, where the requests of clients have no common bound


class BatchWorker:
    """Runs what is in a folder. Several ingresses may have one: each batch is one process's at a time."""

    def __init__(
        self,
        folder: BatchFolder,
        answer: Answer,
        pace: Pace,
        memory: Shares | None = None,
        most_line_bytes: int = MOST_LINE_BYTES,
    ) -> None:
        """`memory`: that lines take their part of."""
        self.folder = folder
        memory = memory or Shares(_MEMORY_BYTES)
        self._serving = Serving(folder, answer, pace, memory, min(most_line_bytes, MOST_LINE_BYTES))
        self._turns = BatchTurns(_MOST_RUNNING)
        self._tasks: dict[Path, asyncio.Task[bool]] = {}
        self._running: dict[Path, Running] = {}  # what these tasks run
        self._runs: dict[Path, Run] = {}  # … once they have the lock
        self._failed: dict[Path, tuple[float, float]] = {}  # when a batch is run again, and how long it waited
        self._tried: dict[Path, int] = {}  # batches that another process had, by the newest look
        self._num_looks = 0
        self._looking: asyncio.Task[None] | None = None
        self._awake = asyncio.Event()

    def start(self) -> None:
        """Begin to look for batches, on the running loop."""
        self._looking = asyncio.create_task(self._look())

    def check(self) -> None:
        """Raise the error that has ended the looks for batches."""
        raise_if_ended([self._looking])

    def wake(self) -> None:
        """Look for batches now: one has been created, or a place is free."""
        self._awake.set()

    async def close(self) -> None:
        """End the requests of all batches. Another process goes on with the lines that have no result."""
        tasks = [task for task in (self._looking, *self._tasks.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _look(self) -> None:
        """Begin batches, for ever. A look that fails is told once, and the next one may do better."""
        told = ""
        sweep_at = 0.0
        while True:
            self._awake.clear()
            try:
                if asyncio.get_running_loop().time() >= sweep_at:
                    sweep_at = asyncio.get_running_loop().time() + _SWEEP_S
                    await asyncio.to_thread(self.folder.sweep)
                waiting = await asyncio.to_thread(lambda: list(self.folder.waiting()))
                self._begin(waiting)
                told = ""
            except Exception as error:
                if told != repr(error):
                    told = repr(error)
                    logger.error("batches cannot be looked for: %s", error, exc_info=error)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._awake.wait()

    def _begin(self, waiting: Sequence[tuple[str, Path]]) -> None:
        """Give the free places to batches that have not ended. `waiting`: by owner and place."""
        now = asyncio.get_running_loop().time()
        self._num_looks += 1
        places = {place for _, place in waiting}
        self._failed = {place: failed for place, failed in self._failed.items() if place in places}
        self._tried = {place: look for place, look in self._tried.items() if place in places}
        due: dict[str, list[Path]] = {}
        for owner, place in waiting:
            again_at, _ = self._failed.get(place, (now, 0.0))
            if place not in self._running and now >= again_at:
                due.setdefault(owner, []).append(place)
        for each in due.values():
            each.sort(key=lambda place: self._tried.get(place, 0))
        for owner, place in list(self._turns.next(due, self._running)):
            due[owner].remove(place)
            self._running[place] = Running(owner, now)
            task = self._tasks[place] = asyncio.create_task(self._run(owner, place))
            task.add_done_callback(partial(self._ended, place))
        mine = {owner: [place for place in each if place not in self._tried] for owner, each in due.items()}
        over = self._turns.gives_way({owner: each for owner, each in mine.items() if each}, self._running, now)
        if over in self._runs:
            self._runs[over].give_way()

    def _ended(self, place: Path, task: "asyncio.Task[bool]") -> None:
        del self._tasks[place]
        del self._running[place]
        self._runs.pop(place, None)
        _, waited = self._failed.pop(place, (0.0, 0.0))
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            wait = min(max(2 * waited, _FAILED_S[0]), _FAILED_S[1])
            self._failed[place] = asyncio.get_running_loop().time() + wait, wait
            logger.error("batch %s failed; it is run again in %.0f s", place.name, wait, exc_info=error)
        elif task.result():
            self.wake()
        else:
            self._tried[place] = self._num_looks

    async def _run(self, owner: str, place: Path) -> bool:
        """Run a batch. Returns whether no other process had it."""
        with self.folder.owned(place) as batch:
            if batch is None:
                return False
            run = self._runs[place] = Run(self._serving, batch, owner)
            await run.to_end()
            return True
