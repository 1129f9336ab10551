"""Answers a file of requests, by a model in this process or by a server, into a file of answers."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
from tqdm import tqdm

from crossdock.cluster.api.batches.lines import Line, WrongLine, answered, read_lines, record
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.tiers import SLO_CLASS_HEADER

_Answer = Callable[[Line, str], Awaitable[tuple[int, bytes]]]
_LOG_S = 30.0  # between two lines of the progress where no terminal shows a bar
_RETRY_S = (1.0, 30.0)  # shortest and longest wait before a busy server is asked again


def run_file(
    input_file: Path,
    output_file: Path,
    *,
    url: str | None = None,
    max_concurrent: int = 64,
    server_key: str | None = None,
    settings: dict[str, Any],
) -> tuple[int, int]:
    """Answer all lines of a file. Returns how many there are, and how many of them are refused.

    Args:
        input_file: the requests.
        output_file: where the answers go when all are there.
        url: of a server; None: a model in this process answers.
        max_concurrent: requests that the server has at once.
        server_key: of the server.
        settings: of the model, as arguments of `LLM`.

    Raises:
        ValueError: a line is no request, or a setting is wrong.
    """
    count = _checked(input_file)
    with _output(output_file) as output:
        if url is None:
            return count, _by_model(settings, input_file, output, count)
        return count, asyncio.run(_by_server(input_file, output, count, url, server_key, max_concurrent))


def _checked(path: Path) -> int:
    """Return the number of requests in a file. ValueError: a line is none; the message has its number."""
    count = 0
    for number, content in _contents(path):
        try:
            Line.parse(number, content)
        except WrongLine as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        count += 1
    return count


def _contents(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        yield from read_lines(file)


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

        return llm.run(_run(path, output, count, answer, llm.most_in_flight))


async def _by_server(path: Path, output: IO[bytes], count: int, url: str, server_key: str | None, most: int) -> int:
    """Answer all lines by a server, in its least urgent class. Returns how many are refused."""
    headers = {SLO_CLASS_HEADER: "batch", "Content-Type": "application/json"}
    if server_key:
        headers["Authorization"] = f"Bearer {server_key}"
    async with httpx.AsyncClient(base_url=url.removesuffix("/v1"), headers=headers, timeout=None) as client:

        async def answer(line: Line, request_id: str) -> tuple[int, bytes]:
            wait = _RETRY_S[0]
            while True:
                found = await client.post(line.url, json=line.body, headers={"X-Request-Id": request_id})
                if found.status_code not in (429, 503):
                    return found.status_code, found.content
                await asyncio.sleep(min(max(wait, float(found.headers.get("Retry-After", 0))), _RETRY_S[1]))
                wait = min(2 * wait, _RETRY_S[1])

        return await _run(path, output, count, answer, most)


async def _run(path: Path, output: IO[bytes], count: int, answer: _Answer, most: int) -> int:
    """Answer `count` lines, `most` at once, and write each record as it comes. Returns how many are refused."""
    room, failed = asyncio.Semaphore(most), 0
    seconds = 0.1 if sys.stderr.isatty() else _LOG_S
    bar = tqdm(total=count, desc="Requests", unit="request", mininterval=seconds, maxinterval=seconds)

    async def one(line: Line) -> None:
        nonlocal failed
        name = f"batch_req_{os.getpid()}_{line.number}"
        try:
            try:
                status, body = await answer(line, name)
            except ApiError as error:  # the model in this process is gone
                status, body = error.status, error.body()
            failed += status >= 400
            output.write(record(name, line.custom_id, status, name, body))
            bar.update()
        finally:
            room.release()

    with bar:
        async with asyncio.TaskGroup() as group:
            for number, content in _contents(path):
                await room.acquire()
                group.create_task(one(Line.parse(number, content)))
    return failed
