"""Runs batches beside the requests of clients: lines without a result, as fast as the fleet takes them."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path

from crossdock.cluster.api.batches.folder import ERRORS, INPUT, OUTPUT, TERMINAL, BatchFolder, OwnedBatch, Owner
from crossdock.cluster.api.batches.lines import (
    MOST_LINES,
    Line,
    WrongLine,
    read_lines,
    record,
    unanswered,
)
from crossdock.cluster.api.batches.pace import Pace
from crossdock.cluster.api.batches.results import Results
from crossdock.cluster.api.errors import ApiError

logger = logging.getLogger("ray.serve")

Answer = Callable[[Line, Owner, str], Awaitable[tuple[int, bytes]]]
"""Returns the status and the body for a line, its owner and the id of the request. Raises ApiError 429 or 503."""

_LOOK_S = 1.0  # between two looks for batches to run, and at whether a running one is cancelled
_MOST_RUNNING = 8  # batches of this ingress at once; the others wait for one to end, or for another ingress
_MOST_PROBLEMS = 100  # lines at fault that a failed batch names
_FAILED_S = (10.0, 600.0)  # shortest and longest wait before a batch that failed here, as by a full disk, is run again
_RETRY_S = (1.0, 30.0)  # shortest and longest wait before a line that the server could not take is sent again


class BatchWorker:
    """Runs what is in a folder. Several ingresses may have one: each batch is one process's at a time."""

    def __init__(self, folder: BatchFolder, answer: Answer, pace: Pace) -> None:
        self.folder = folder
        self._answer = answer
        self._pace = pace
        self._running: dict[Path, asyncio.Task[None]] = {}
        self._failed: dict[Path, tuple[float, float]] = {}  # when a batch is run again, and how long it waited
        self._looking: asyncio.Task[None] | None = None
        self._awake = asyncio.Event()

    def start(self) -> None:
        """Begin to look for batches, on the running loop."""
        self._looking = asyncio.create_task(self._look())

    def wake(self) -> None:
        """Look for batches now: one has been created."""
        self._awake.set()

    async def close(self) -> None:
        """End the requests of all batches. Another process goes on with the lines that have no result."""
        tasks = [task for task in (self._looking, *self._running.values()) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _look(self) -> None:
        while True:
            self._awake.clear()
            try:
                waiting = await asyncio.to_thread(lambda: list(self.folder.waiting()))
            except OSError as error:
                logger.error("batches cannot be read: %s", error)
                waiting = []
            for tenant, place in waiting:
                due, _ = self._failed.get(place, (0.0, 0.0))
                is_free = place not in self._running and len(self._running) < _MOST_RUNNING
                if is_free and asyncio.get_running_loop().time() >= due:
                    task = self._running[place] = asyncio.create_task(self._run(tenant, place))
                    task.add_done_callback(partial(self._ended, place))
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._awake.wait()

    def _ended(self, place: Path, task: asyncio.Task[None]) -> None:
        del self._running[place]
        _, waited = self._failed.pop(place, (0.0, 0.0))
        if not task.cancelled() and (error := task.exception()) is not None:
            wait = min(max(2 * waited, _FAILED_S[0]), _FAILED_S[1])
            self._failed[place] = asyncio.get_running_loop().time() + wait, wait
            logger.error("batch %s failed; it is run again in %.0f s", place.name, wait, exc_info=error)

    async def _run(self, tenant: str, place: Path) -> None:
        with self.folder.owned(place) as batch:
            if batch is None:
                return
            run = _Run(self.folder, batch, tenant, self._answer, self._pace)
            await run.to_end()


class _Run:
    """One batch from where it stands to its end."""

    def __init__(self, folder: BatchFolder, batch: OwnedBatch, tenant: str, answer: Answer, pace: Pace) -> None:
        self._folder = folder
        self._batch = batch
        self._owner = Owner(tenant, batch.state.get("payer", ""))
        self._answer = answer
        self._pace = pace
        self._why_ended = ""  # "expired" or "cancelled", once no further line is begun

    async def to_end(self) -> None:
        batch = self._batch
        if batch.state["status"] in TERMINAL:  # since the folder was looked at
            return
        if batch.state["status"] == "validating" and not await asyncio.to_thread(self._validate):
            return
        results = await asyncio.to_thread(Results, batch.place)
        try:
            if batch.state["status"] == "in_progress":
                await self._run_lines(results)
                await self._leave_rest(results)
                await results.flush()
                self._count(results)
                batch.enter("finalizing", ends_as=self._why_ended or "completed")
            await asyncio.to_thread(self._finish, results)
        finally:
            await results.close()

    def _validate(self) -> bool:
        """Check every line. Returns whether the batch may run; else it has failed, with the lines at fault."""
        batch, problems, seen, total = self._batch, list[dict[str, object]](), set[bytes](), 0
        try:
            with (batch.place / INPUT).open("rb") as file:
                for number, content in read_lines(file):
                    total += 1
                    if total > MOST_LINES:
                        raise WrongLine(f"The file has more than {MOST_LINES} lines.", "too_many_lines")
                    if len(problems) == _MOST_PROBLEMS:
                        break
                    try:
                        self._check(Line.parse(number, content), seen)
                    except WrongLine as error:
                        problems.append(_problem(error, number))
            if not total:
                raise WrongLine("The file has no lines.", "empty_file")
        except WrongLine as error:
            problems.append(_problem(error, None))
        if problems:
            batch.enter("failed", errors={"object": "list", "data": problems})
            batch.clear()
            return False
        batch.state["request_counts"]["total"] = total
        batch.enter("in_progress")
        return True

    def _check(self, line: Line, seen: set[bytes]) -> None:
        if line.url != self._batch.state["endpoint"]:
            reason = f"'url' must be the batch's endpoint, {self._batch.state['endpoint']}."
            raise WrongLine(reason, "mismatched_endpoint", "url")
        mark = blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if mark in seen:
            raise WrongLine("'custom_id' must differ from those of earlier lines.", "duplicate_custom_id", "custom_id")
        seen.add(mark)

    async def _run_lines(self, results: Results) -> None:
        """Run the lines without a result, until all are done, or the batch ends otherwise."""
        tasks: set[asyncio.Task[None]] = set()
        watching = asyncio.create_task(self._watch(results, tasks))
        try:
            async with AsyncExitStack() as stack:
                lines = self._lines(results)
                stack.push_async_callback(lines.aclose)  # type: ignore[attr-defined]
                async for line in lines:
                    await self._pace.enter()
                    if self._why_ended:
                        self._pace.leave()
                        break
                    task = asyncio.create_task(self._run_line(line, results))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            while tasks:
                await asyncio.wait(tasks)
        finally:
            watching.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.wait([watching, *tasks])

    async def _lines(self, results: Results) -> AsyncIterator[Line]:
        """Yield the lines without a result. The file is read in a thread, as far as lines are wanted."""
        with (self._batch.place / INPUT).open("rb") as file:
            lines = read_lines(file)
            while (found := await asyncio.to_thread(next, lines, None)) is not None:
                number, content = found
                if number not in results.done:
                    yield Line.parse(number, content)

    async def _watch(self, results: Results, tasks: set[asyncio.Task[None]]) -> None:
        """Write the counts while lines are run, and end them when the batch expires or is cancelled."""
        while not self._why_ended:
            await asyncio.sleep(_LOOK_S)
            self._count(results)
            await asyncio.to_thread(self._batch.write)
            if self._batch.is_cancelled:
                self._why_ended = "cancelled"
            elif time.time() >= self._batch.state["expires_at"]:
                self._why_ended = "expired"
        for task in tasks:
            task.cancel()

    def _count(self, results: Results) -> None:
        self._batch.state["request_counts"] |= {"completed": results.counts[OUTPUT], "failed": results.counts[ERRORS]}

    async def _run_line(self, line: Line, results: Results) -> None:
        """Answer one line, however often the server is too busy, and write the record."""
        request_id, wait = uuid.uuid4().hex, _RETRY_S[0]
        self._pace.begin(request_id)
        try:
            while True:
                try:
                    status, body = await self._answer(line, self._owner, request_id)
                    break
                except ApiError as error:
                    asked = float(error.headers.get("Retry-After", 0))
                    await asyncio.sleep(min(max(wait, asked), _RETRY_S[1]))
                    wait = min(2 * wait, _RETRY_S[1])
        finally:
            self._pace.end(request_id)
        content = record(self._name(line.number), line.custom_id, status, request_id, body)
        await results.add(ERRORS if status >= 400 else OUTPUT, line.number, content)

    async def _leave_rest(self, results: Results) -> None:
        """Write a record for each line that is not run any more."""
        if not self._why_ended:
            return
        message = {
            "expired": "This request could not be executed before the completion window expired.",
            "cancelled": "This request was not executed: its batch was cancelled.",
        }[self._why_ended]
        async for line in self._lines(results):
            content = unanswered(self._name(line.number), line.custom_id, f"batch_{self._why_ended}", message)
            await results.add(ERRORS, line.number, content)

    def _name(self, number: int) -> str:
        return f"batch_req_{self._batch.state['id'].removeprefix('batch_')}_{number}"

    def _finish(self, results: Results) -> None:
        """Make files of the results. A process that goes on after another's death finds those that are there."""
        batch, made = self._batch, dict[str, str]()
        for name, field in ((OUTPUT, "output_file_id"), (ERRORS, "error_file_id")):
            if results.counts[name]:
                with (batch.place / name).open("rb") as file:
                    filename = f"{batch.state['id']}_{name}"
                    found = self._folder.create_file(
                        self._owner.tenant, file, filename, "batch_output", batch.file_id(name)
                    )
                    made[field] = found["id"]
        batch.enter(batch.state.pop("ends_as"), **made)
        batch.clear()


def _problem(error: WrongLine, number: int | None) -> dict[str, object]:
    return {"code": error.code, "line": number, "message": str(error), "param": error.param}
