"""Answers a file of requests, by a model in this process or by a server, into a file of answers."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
from tqdm import tqdm

from crossdock.cluster.api.batches.input_lines import InputLines, Refused
from crossdock.cluster.api.batches.lines import Line, WrongLine, answered, record
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.request_memory import RequestMemory
from crossdock.cluster.api.http.service_tiers import SLO_CLASS_HEADER
from crossdock.workers.schedule.shares import Shares

_Answer = Callable[[Line, str], Awaitable[tuple[int, bytes]]]
_LOG_S = 30.0  # between two lines of the progress where no terminal shows a bar
_MEMORY_BYTES = 1 << 30  # of lines that are read and not answered yet
_RETRY_S = (1.0, 30.0)  # shortest and longest wait before a busy server is asked again


def run_file(
    input_file: Path,
    output_file: Path,
    *,
    url: str | None = None,
    max_concurrent: int = 64,
    api_key: str | None = None,
    settings: dict[str, Any],
) -> tuple[int, int]:
    """Answer all lines of a file. Returns how many there are, and how many of them are refused.

    Args:
        input_file: the requests.
        output_file: where the answers go when all are there.
        url: of a server; None: a model in this process answers.
        max_concurrent: requests that the server has at once.
        api_key: that is sent to the server.
        settings: of the model, as arguments of `LLM`.

    Raises:
        ValueError: a line is no request, a setting is wrong, or the server refuses the key.
    """
    count = asyncio.run(_checked(input_file))
    with _output(output_file) as output:
        if url is None:
            return count, _by_model(settings, input_file, output, count)
        try:
            return count, asyncio.run(_by_server(input_file, output, count, url, api_key, max_concurrent))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def _checked(path: Path) -> int:
    """Return the number of requests in a file. ValueError: a line is none; the message has its number."""
    count = 0
    with closing(InputLines(path, "", Shares(_MEMORY_BYTES))) as lines:
        try:
            async with aclosing(lines.spans()) as spans, aclosing(lines.groups(spans)) as groups:
                async for group in groups:
                    for line in group:
                        if isinstance(line, Refused):
                            raise ValueError(f"{path}, line {line.number}: {line.why}")
                    count += len(group)
        except WrongLine as error:
            raise ValueError(f"{path}: {error}") from None
    return count


@contextmanager
def _output(path: Path) -> Iterator[IO[bytes]]:
    """Open a file beside the output, which takes the output's place when the context ends without an error."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("wb") as file:
            yield file
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _by_model(given: dict[str, Any], path: Path, output: IO[bytes], count: int) -> int:
    """Answer all lines by a model in this process. Returns how many are refused."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
    from crossdock.cluster.api.http.own_requests import own_request
    from crossdock.cluster.offline.llm import LLM

    with LLM(given.pop("model", None), **given) as llm:
        creates = llm.routes.creates()

        async def answer(line: Line, request_id: str) -> tuple[int, bytes]:
            return await answered(line, creates[line.url], own_request(request_id, llm.memory))

        return llm.run(_run(path, output, count, answer, llm.most_in_flight, llm.memory))


async def _by_server(path: Path, output: IO[bytes], count: int, url: str, api_key: str | None, most: int) -> int:
    """Answer all lines by a server, in its least urgent class. Returns how many are refused."""
    headers = {SLO_CLASS_HEADER: "batch", "Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    async with httpx.AsyncClient(base_url=url.removesuffix("/v1"), headers=headers, timeout=None) as client:

        async def answer(line: Line, request_id: str) -> tuple[int, bytes]:
            wait = _RETRY_S[0]
            while True:
                found = await client.post(line.url, json=line.body, headers={"X-Request-Id": request_id})
                if found.status_code == 401:
                    what = "the key" if api_key else "requests without a key"
                    raise ValueError(f"{url} refuses {what}: give --api-key")
                if found.status_code not in (429, 503):
                    return found.status_code, found.content
                await asyncio.sleep(min(max(wait, float(found.headers.get("Retry-After", 0))), _RETRY_S[1]))
                wait = min(2 * wait, _RETRY_S[1])

        return await _run(path, output, count, answer, most, Shares(_MEMORY_BYTES))


async def _run(path: Path, output: IO[bytes], count: int, answer: _Answer, most: int, memory: Shares) -> int:
    """Answer `count` lines, `most` at once, and write each record as it comes. Returns how many are refused.

    `memory`: of lines and of the requests that they become.
    """
    room = asyncio.Semaphore(most)
    failed = 0
    seconds = 0.1 if sys.stderr.isatty() else _LOG_S
    bar = tqdm(total=count, desc="Requests", unit="request", mininterval=seconds, maxinterval=seconds)

    async def one(line: Line, held: RequestMemory) -> None:
        nonlocal failed
        name = f"batch_req_{os.getpid()}_{line.number}"
        try:
            try:
                status, body = await answer(line, name)
            except ApiError as error:  # the model in this process is gone
                status = error.status
                body = error.body()
            failed += status >= 400
            output.write(record(name, line.custom_id, status, name, body))
            bar.update()
        finally:
            held.release()
            room.release()

    with bar, closing(InputLines(path, "", memory)) as lines:
        async with asyncio.TaskGroup() as group, aclosing(lines.spans()) as spans:
            async for span in spans:
                await room.acquire()
                held = lines.memory()
                [line] = await lines.parsed_once_they_fit([span], held)
                if isinstance(line, Refused):
                    raise ValueError(f"{path}, line {line.number}: {line.why}")
                group.create_task(one(line, held))
    return failed
