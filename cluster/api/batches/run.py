"""One batch from where it stands to its end, or to the end of its turn."""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple

from crossdock.cluster.api.batches.folder import TERMINAL, BatchFolder, OwnedBatch, Owner
from crossdock.cluster.api.batches.input_lines import InputLines, Refused
from crossdock.cluster.api.batches.lines import MOST_LINES, Line, Span, WrongLine, record, unanswered
from crossdock.cluster.api.batches.pace import Pace
from crossdock.cluster.api.batches.results import Results
from crossdock.cluster.api.batches.unended import ERRORS, INPUT, OUTPUT
from crossdock.cluster.api.errors import ApiError, to_json
from crossdock.cluster.api.http.request_memory import RequestMemory
from crossdock.workers.schedule.shares import Shares

logger = logging.getLogger("ray.serve")

Answer = Callable[[Line, Owner, str], Awaitable[tuple[int, bytes]]]
"""Returns the status and the body for a line, its owner and the id of the request. Raises ApiError 429 or 503."""

LOOK_S = 1.0  # between two looks for batches to run, and at whether a running one is cancelled
_MOST_PROBLEMS = 100  # lines at fault that a failed batch names
_MOST_PROBLEM_BYTES = 1 << 14  # of them as JSON: each look at the batch reads them
_RETRY_S = (1.0, 30.0)  # shortest and longest wait before lines are begun again, after one that the server refused


class Serving(NamedTuple):
    """The parts that all batches of a process share."""

    folder: BatchFolder
    answer: Answer
    pace: Pace
    memory: Shares
    most_line_bytes: int


class Run:
    def __init__(self, serving: Serving, batch: OwnedBatch, owner: str) -> None:
        self._serving = serving
        self._batch = batch
        self._owner = Owner(owner, batch.state.get("tenant", ""))
        self._why_ended = ""  # "expired" or "cancelled", once no further line is begun
        self._gives_way = asyncio.Event()
        self._fault: ApiError | None = None  # why results have no room on the disk
        self._again = deque[Span]()  # lines that the server refused for now
        self._due = 0.0  # when lines may be begun again, after a refusal
        self._wait = 0.0  # seconds; of the newest refusal

    def give_way(self) -> None:
        """Begin no further line, so that the batch ends its turn once the lines in flight are answered."""
        self._gives_way.set()

    async def to_end(self) -> None:
        batch = self._batch
        if batch.state["status"] in TERMINAL:  # since the folder was looked at
            return
        if batch.state["status"] == "finalizing":
            await asyncio.to_thread(self._finish)
            return
        lines = await asyncio.to_thread(
            InputLines, batch.place / INPUT, self._owner.name, self._serving.memory, self._serving.most_line_bytes
        )
        try:
            if batch.state["status"] == "validating" and not await self._validate(lines):
                return
            results = await asyncio.to_thread(Results, batch.place)
            try:
                await self._run_lines(lines, results)
                if self._gives_way.is_set() and not self._why_ended:
                    return
                await self._leave_rest(lines, results)
                await results.flush()
                self._count(results)
                await self._enter("finalizing", errors=None, ends_as=self._why_ended or "completed")
            finally:
                await results.close()
        finally:
            lines.close()
        await asyncio.to_thread(self._finish)

    async def _enter(self, status: str, **fields: Any) -> None:
        await asyncio.to_thread(partial(self._batch.enter, status, **fields))

    # -- the lines are checked ---------------------------------------------------------------------------------------

    async def _validate(self, lines: InputLines) -> bool:
        """Check every line. Returns whether the batch may run; else it has ended."""
        checking = asyncio.create_task(self._problems(lines))
        await self._until_done(checking)
        if self._why_ended:
            await self._enter(self._why_ended)
        elif problems := checking.result():
            await self._enter("failed", errors={"object": "list", "data": problems})
        else:
            await self._enter("in_progress")
            return True
        await asyncio.to_thread(self._batch.clear)
        return False

    async def _problems(self, lines: InputLines) -> list[dict[str, object]]:
        """Count the lines, and return the reasons why they cannot run, each with its line."""
        problems = list[dict[str, object]]()
        seen = set[bytes]()
        total = 0
        try:
            async with aclosing(lines.spans()) as spans, aclosing(lines.groups(spans)) as groups:
                async for group in groups:
                    total += len(group)
                    if total > MOST_LINES:
                        raise WrongLine(f"The file has more than {MOST_LINES} lines.", "too_many_lines")
                    problems += await asyncio.to_thread(self._problems_of, group, seen)
                    if len(problems) >= _MOST_PROBLEMS or len(to_json(problems)) > _MOST_PROBLEM_BYTES:
                        break
            if not total:
                raise WrongLine("The file has no lines.", "empty_file")
        except WrongLine as error:
            problems.append(_problem(error, None))
        self._batch.state["request_counts"]["total"] = 0 if problems else total
        sizes = accumulate(len(to_json(each)) for each in problems)
        few = [each for each, size in zip(problems, sizes, strict=True) if size <= _MOST_PROBLEM_BYTES]
        return few[:_MOST_PROBLEMS]

    def _problems_of(self, group: Sequence[Line | Refused], seen: set[bytes]) -> list[dict[str, object]]:
        return [found for line in group if (found := self._problem(line, seen)) is not None]

    def _problem(self, line: Line | Refused, seen: set[bytes]) -> dict[str, object] | None:
        """Return the reason why a line cannot run, if there is one. `seen`: marks of the ids of earlier lines."""
        if isinstance(line, Refused):
            return _problem(line.why, line.number)
        endpoint = self._batch.state["endpoint"]
        mark = blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if line.url != endpoint:
            reason = f"'url' must be the batch's endpoint, {endpoint}."
            return _problem(WrongLine(reason, "mismatched_endpoint", "url"), line.number)
        if mark in seen:
            reason = "'custom_id' must differ from those of earlier lines."
            return _problem(WrongLine(reason, "duplicate_custom_id", "custom_id"), line.number)
        seen.add(mark)
        return None

    # -- the lines are run -------------------------------------------------------------------------------------------

    async def _run_lines(self, lines: InputLines, results: Results) -> None:
        """Run the lines without a result, until all are done, or the batch ends otherwise."""
        running = asyncio.create_task(self._all_lines(lines, results))
        await self._until_done(running, results)
        if not running.cancelled():
            running.result()

    async def _until_done(self, work: "asyncio.Task[Any]", results: Results | None = None) -> None:
        """Wait for work on the batch, which ends early where the batch expires or is cancelled.

        `results`: whose counts are written meanwhile.
        """
        try:
            while not work.done():
                await self._look(results)
                if self._why_ended:
                    work.cancel()
                await asyncio.wait([work], timeout=LOOK_S)
        finally:
            work.cancel()
            await asyncio.wait([work])

    async def _look(self, results: Results | None) -> None:
        """Write the counts, and note whether the batch has expired or is cancelled. A look may fail."""
        try:
            if results is not None:
                await asyncio.to_thread(self._look_for_space)
                if self._count(results) | self._tell_fault():
                    await asyncio.to_thread(self._batch.write)
            if await asyncio.to_thread(lambda: self._batch.is_cancelled):
                self._why_ended = "cancelled"
        except OSError as error:
            logger.warning("batch %s: its state cannot be read or written now: %s", self._batch.place.name, error)
        if not self._why_ended and time.time() >= self._batch.state["expires_at"]:
            self._why_ended = "expired"

    def _look_for_space(self) -> None:
        self._fault = self._serving.folder.space.fault(self._owner.name)

    def _tell_fault(self) -> bool:
        """Name in the batch's object why no line is begun. Returns whether this has changed."""
        before = self._batch.state["errors"]
        error = None if self._fault is None else WrongLine(f"{self._fault}", self._fault.code or "")
        self._batch.state["errors"] = None if error is None else {"object": "list", "data": [_problem(error, None)]}
        return bool(before) != bool(error)

    async def _all_lines(self, lines: InputLines, results: Results) -> None:
        """Begin one line after another, as the server takes them, and wait for all answers."""
        tasks = set[asyncio.Task[None]]()
        try:
            async with asyncio.TaskGroup() as group, aclosing(self._left(lines, results)) as spans:
                while not self._gives_way.is_set():
                    if await self._must_wait():
                        continue
                    span = self._again.popleft() if self._again else await anext(spans, None)
                    if span is None and not tasks:
                        break
                    if span is None:  # one of the last lines may be refused
                        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                        continue
                    request_id = uuid.uuid4().hex
                    await self._serving.pace.enter(self._owner.name, request_id)
                    if self._seconds_left() > 0:  # a line has been refused meanwhile
                        self._serving.pace.leave(request_id)
                        self._again.appendleft(span)
                        continue
                    memory = lines.memory()
                    task = group.create_task(self._run_line(span, lines, results, request_id, memory))
                    tasks.add(task)
                    task.add_done_callback(partial(self._line_ended, tasks, request_id, memory))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    def _line_ended(
        self, tasks: set[asyncio.Task[None]], request_id: str, memory: RequestMemory, task: asyncio.Task[None]
    ) -> None:
        """Give back all that a line has: a task that is cancelled before its first step runs none of its own code."""
        tasks.discard(task)
        memory.release()
        self._serving.pace.leave(request_id)

    async def _left(self, lines: InputLines, results: Results) -> AsyncGenerator[Span, None]:
        """Yield where the lines without a result stand."""
        async with aclosing(lines.spans()) as spans:
            async for span in spans:
                if span.number not in results.done:
                    yield span

    async def _run_line(
        self, span: Span, lines: InputLines, results: Results, request_id: str, memory: RequestMemory
    ) -> None:
        """Answer one line and write the record. A line that the server cannot take now is begun again later."""
        try:
            [line] = await lines.parsed([span], memory)
            if isinstance(line, Refused):  # the bounds of a line have become smaller since the batch was checked
                custom_id = ""
                status = 400
                body = ApiError(f"{line.why}", code=line.why.code).body()
            else:
                custom_id = line.custom_id
                status, body = await self._serving.answer(line, self._owner, request_id)
        except ApiError as error:
            self._refused(span, error)
            return
        self._wait = 0.0
        memory.keep(len(body))
        content = record(self._name(span.number), custom_id, status, request_id, body)
        await results.add(ERRORS if status >= 400 else OUTPUT, span.number, content)

    def _refused(self, span: Span, error: ApiError) -> None:
        """Note that the server took no line now. The whole batch waits: its next line would be refused as well."""
        now = asyncio.get_running_loop().time()
        shortest, longest = _RETRY_S
        if now >= self._due:  # else an earlier line of the same moment has been refused
            is_memory = error.code == "request_memory"  # which is free once other lines end
            self._wait = shortest if is_memory else min(max(2 * self._wait, shortest), longest)
        asked = float(error.headers.get("Retry-After", 0))
        self._due = max(self._due, now + min(max(self._wait, asked), longest))
        self._again.append(span)

    def _seconds_left(self) -> float:
        """Return how long no line may be begun after a refusal."""
        return self._due - asyncio.get_running_loop().time()

    async def _must_wait(self) -> bool:
        """Wait after a refusal, without a place among the lines in flight. Returns whether there was a wait."""
        seconds = self._seconds_left() if self._fault is None else LOOK_S
        if seconds <= 0:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._gives_way.wait()
        return True

    # -- the batch ends ----------------------------------------------------------------------------------------------

    async def _leave_rest(self, lines: InputLines, results: Results) -> None:
        """Write a record for each line that is not run any more."""
        if not self._why_ended:
            return
        message = {
            "expired": "This request could not be executed before the completion window expired.",
            "cancelled": "This request was not executed: its batch was cancelled.",
        }[self._why_ended]
        async with aclosing(self._left(lines, results)) as spans, aclosing(lines.groups(spans)) as groups:
            async for group in groups:
                records = {
                    line.number: unanswered(
                        self._name(line.number),
                        "" if isinstance(line, Refused) else line.custom_id,
                        f"batch_{self._why_ended}",
                        message,
                    )
                    for line in group
                }
                await asyncio.gather(*(results.add(ERRORS, number, each) for number, each in records.items()))

    def _count(self, results: Results) -> bool:
        """Take over the counts of the results. Returns whether they have changed."""
        counts = self._batch.state["request_counts"]
        found = {"completed": results.counts[OUTPUT], "failed": results.counts[ERRORS]}
        self._batch.state["request_counts"] = counts | found
        return bool(counts != counts | found)

    def _name(self, number: int) -> str:
        return f"batch_req_{self._batch.state['id'].removeprefix('batch_')}_{number}"

    def _finish(self) -> None:
        """Make files of the results. A process that goes on after another's death finds those that are there."""
        batch = self._batch
        made = dict[str, str]()
        counts = batch.state["request_counts"]
        for name, field, count in (
            (OUTPUT, "output_file_id", counts["completed"]),
            (ERRORS, "error_file_id", counts["failed"]),
        ):
            if count:
                file_id = batch.file_id(name)
                filename = f"{batch.state['id']}_{name}"
                self._serving.folder.keep_results(self._owner.name, batch.place / name, filename, file_id)
                made[field] = file_id
        ends_as = batch.state["ends_as"]
        batch.enter(ends_as, **made)
        batch.clear()


def _problem(error: WrongLine, number: int | None) -> dict[str, object]:
    return {"code": error.code, "line": number, "message": str(error), "param": error.param}


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return one of the errors of a group: lines that fail together have the same reason."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
