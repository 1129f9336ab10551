"""The command `crossdock run-batch`: a file of requests in, a file of answers out."""

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import httpx
import typer

from crossdock.cluster.api.batches.lines import Line, WrongLine, answered, read_lines, record
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.tiers import SLO_CLASS_HEADER
from crossdock.cluster.serve.arguments import FlagsCommand
from crossdock.cluster.serve.flags import PANELS

_Answer = Callable[[Line, str], Awaitable[tuple[int, bytes]]]
_OPTIONS: dict[str, tuple[Any, Any]] = {  # by parameter: the type with its option, and the default
    "input_file": (Annotated[Path, typer.Option("--input-file", "-i", help="Requests, one a line.")], ...),
    "output_file": (Annotated[Path, typer.Option("--output-file", "-o", help="Where the answers go.")], ...),
    "url": (Annotated[str | None, typer.Option(help="A server that answers, in place of a model here.")], None),
    "max_concurrent": (Annotated[int, typer.Option(min=1, help="With --url: requests at once.")], 64),
    "server_key": (Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="With --url: its API key.")], None),
}
_RETRY_S = (1.0, 30.0)  # shortest and longest wait before a busy server is asked again


def run_batch(**flags: Any) -> None:
    """Answer a file of requests, as OpenAI's batches have them, by a model in this process or by a server."""
    own = {name: flags.pop(name) for name in _OPTIONS}
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    try:
        count = _checked(own["input_file"])
        with _output(own["output_file"]) as output:
            if own["url"] is not None:
                if given:
                    raise ValueError(f"--url: the server has its own settings, so {', '.join(given)} cannot be given")
                failed = asyncio.run(_by_server(own, output))
            else:
                failed = _by_model(given, own["input_file"], output)
    except (ValueError, OSError, httpx.HTTPError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    typer.echo(f"{count} requests, {failed} of them refused: {own['output_file']}")


def _signature() -> inspect.Signature:
    kind = inspect.Parameter.KEYWORD_ONLY
    own = [
        inspect.Parameter(name, kind, default=inspect.Parameter.empty if default is ... else default, annotation=form)
        for name, (form, default) in _OPTIONS.items()
    ]
    return inspect.Signature([*own, *(flag.signature(panel) for panel, flags in PANELS.items() for flag in flags)])


run_batch.__signature__ = _signature()  # type: ignore[attr-defined]  # as typer reads it
run_batch.__annotations__ = {each.name: each.annotation for each in _signature().parameters.values()}
run_batch.command_class = FlagsCommand  # type: ignore[attr-defined]


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


def _by_model(given: dict[str, Any], path: Path, output: IO[bytes]) -> int:
    """Answer all lines by a model in this process. Returns how many are refused."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
    from crossdock.cluster.api.routes.own_requests import own_request
    from crossdock.cluster.offline.llm import LLM

    with LLM(given.pop("model", None), **given) as llm:
        creates = llm.routes.creates()

        async def answer(line: Line, request_id: str) -> tuple[int, bytes]:
            return await answered(line, creates[line.url], own_request(request_id, llm.memory))

        return llm.run(_run(path, output, answer, llm.most_in_flight))


async def _by_server(own: dict[str, Any], output: IO[bytes]) -> int:
    """Answer all lines by a server, in its least urgent class. Returns how many are refused."""
    headers = {SLO_CLASS_HEADER: "batch", "Content-Type": "application/json"}
    if own["server_key"]:
        headers["Authorization"] = f"Bearer {own['server_key']}"
    async with httpx.AsyncClient(base_url=own["url"].removesuffix("/v1"), headers=headers, timeout=None) as client:

        async def answer(line: Line, request_id: str) -> tuple[int, bytes]:
            wait = _RETRY_S[0]
            while True:
                found = await client.post(line.url, json=line.body, headers={"X-Request-Id": request_id})
                if found.status_code not in (429, 503):
                    return found.status_code, found.content
                await asyncio.sleep(min(max(wait, float(found.headers.get("Retry-After", 0))), _RETRY_S[1]))
                wait = min(2 * wait, _RETRY_S[1])

        return await _run(own["input_file"], output, answer, own["max_concurrent"])


async def _run(path: Path, output: IO[bytes], answer: _Answer, most: int) -> int:
    """Answer the lines, `most` at once, and write each record as it comes. Returns how many are refused."""
    room, failed = asyncio.Semaphore(most), 0

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
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        for number, content in _contents(path):
            await room.acquire()
            group.create_task(one(Line.parse(number, content)))
    return failed
