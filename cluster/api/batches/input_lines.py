"""The lines of a batch's file: counted in the memory of all requests before they are read, and parsed in a thread."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from crossdock.cluster.api.batches.lines import MOST_LINE_BYTES, Line, Span, WrongLine, line_spans, read_line
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.request_memory import RequestMemory
from crossdock.workers.schedule.shares import Shares

_FOUND_AT_ONCE = 64  # lines whose places are found by one call
_GROUP_BYTES = 1 << 16  # of lines that are parsed by one call; a longer line is parsed alone
_ROOM_S = 1.0  # between two looks whether there is memory for a line


class Refused(NamedTuple):
    """A line that is no request. `why`: the reason."""

    number: int
    why: WrongLine


class InputLines:
    """The lines of one file. They count for the owner of the batch, as the bodies of requests do."""

    def __init__(self, path: Path, owner: str, shares: Shares, most_bytes: int = MOST_LINE_BYTES) -> None:
        """Open the file. `shares`: of memory. `most_bytes`: of a line."""
        self._owner = owner
        self._shares = shares
        self._most_bytes = most_bytes
        self._file = path.open("rb")

    def close(self) -> None:
        self._file.close()

    def memory(self) -> RequestMemory:
        """Return an account for the memory of a line, until its `release`."""
        return RequestMemory(self._shares, self._owner)

    async def spans(self) -> AsyncGenerator[Span, None]:
        """Yield where the lines stand. Raises WrongLine for one that is too long."""
        found = line_spans(self._file, self._most_bytes)
        while part := await asyncio.to_thread(lambda: list(islice(found, _FOUND_AT_ONCE))):
            for span in part:
                yield span

    async def groups(self, spans: AsyncIterator[Span]) -> AsyncGenerator[list[Line | Refused], None]:
        """Yield lines, many short ones at once. They count until the next ones are asked for."""
        memory = self.memory()
        async with aclosing(_groups(spans)) as groups:
            async for group in groups:
                try:
                    yield await self.parsed_once_they_fit(group, memory)
                finally:
                    memory.release()

    async def parsed_once_they_fit(self, group: Sequence[Span], memory: RequestMemory) -> list[Line | Refused]:
        """Do as `parsed`, but wait until there is room."""
        while True:
            try:
                return await self.parsed(group, memory)
            except ApiError as error:
                memory.release()
                if self._shares.is_unused:
                    why = WrongLine(f"This line never has room in memory. {error}", "line_too_large")
                    return [Refused(span.number, why) for span in group]
            await asyncio.sleep(_ROOM_S)

    async def parsed(self, group: Sequence[Span], memory: RequestMemory) -> list[Line | Refused]:
        """Read and parse lines, which count in `memory` from now on. Raises ApiError 429 if they have no room."""
        memory.announce(sum(span.num_bytes for span in group))
        contents = await asyncio.to_thread(lambda: [read_line(self._file, span) for span in group])
        refused: dict[int, Refused] = {}
        for span, content in zip(group, contents, strict=True):
            memory.hold(len(content))
            try:
                await memory.admit(content)
            except ApiError as error:
                if error.status == 429:
                    raise
                refused[span.number] = Refused(span.number, WrongLine(f"{error}", "invalid_json_line"))

        def parse() -> list[Line | Refused]:
            pairs = zip(group, contents, strict=True)
            return [refused.get(span.number) or _parsed(span.number, content) for span, content in pairs]

        return await asyncio.to_thread(parse)


def _parsed(number: int, content: bytes) -> Line | Refused:
    try:
        return Line.parse(number, content)
    except WrongLine as error:
        return Refused(number, error)


async def _groups(spans: AsyncIterator[Span]) -> AsyncGenerator[list[Span], None]:
    """Yield the lines in lists of `_GROUP_BYTES` at most, or of one line."""
    group = list[Span]()
    num_bytes = 0
    async for span in spans:
        if group and num_bytes + span.num_bytes > _GROUP_BYTES:
            yield group
            group = []
            num_bytes = 0
        group.append(span)
        num_bytes += span.num_bytes
    if group:
        yield group
