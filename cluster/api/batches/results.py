"""The results of a batch so far: files that only grow, so a process may end at any moment."""

import asyncio
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from crossdock.cluster.api.batches.unended import ERRORS, OUTPUT

_NUMBER = re.compile(rb'\{"id":"batch_req_[0-9a-f]+_(\d+)"')  # how each record begins
_TAIL = 1 << 16  # bytes read at once to find the end of the last whole record


class Results:
    """The records of the lines that have been run."""

    def __init__(self, place: Path) -> None:
        """Read the results in the folder of a batch. A record that a dead process has begun is cut off."""
        self.counts = {OUTPUT: 0, ERRORS: 0}  # records on the disk
        self.done: set[int] = set()  # numbers of lines whose record is on the disk or on its way
        self._files: dict[str, IO[bytes]] = {}
        self._pending: list[tuple[str, bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._error: Exception | None = None  # why records could not be written; no further record is taken then
        with ExitStack() as files:
            for name in self.counts:
                _cut(place / name)
                for number in _numbers(place / name):
                    self.done.add(number)
                    self.counts[name] += 1
                self._files[name] = files.enter_context((place / name).open("ab"))
            files.pop_all()  # all could be opened

    async def add(self, name: str, number: int, content: bytes) -> None:
        """Append the record of a line to `OUTPUT` or `ERRORS`, and wait until the record is on the disk.

        Raises what failed, as OSError for a full disk, for every record that waits and for every later one: what the
        files end with is not known then. A new object reads them again.
        """
        if self._error is not None:
            raise self._error
        self.done.add(number)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((name, content, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await written

    async def _write(self) -> None:
        """Write what waits. Records that come while others are written share the next call of `fsync`."""
        while self._pending:
            pending = self._pending
            self._pending = []
            try:
                await asyncio.to_thread(self._append, [(name, content) for name, content, _ in pending])
            except Exception as error:
                self._error = error
                pending += self._pending
                self._pending = []
            for name, _, written in pending:
                if self._error is None:
                    self.counts[name] += 1
                if written.done():  # the line was cancelled: its record counts all the same
                    continue
                if self._error is None:
                    written.set_result(None)
                else:
                    written.set_exception(self._error)

    def _append(self, records: list[tuple[str, bytes]]) -> None:
        for name, content in records:
            self._files[name].write(content)
        for name in {name for name, _ in records}:
            self._files[name].flush()
            os.fsync(self._files[name].fileno())

    async def flush(self) -> None:
        """Wait until all records are on the disk. Raises OSError where they could not be written."""
        if self._writing is not None:
            await self._writing
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        """Close the files, after what is being written."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        for file in self._files.values():
            with suppress(OSError):  # of a write that has failed before: its record is made again
                file.close()


def _numbers(path: Path) -> Iterator[int]:
    with path.open("rb") as file:
        for content in file:
            found = _NUMBER.match(content)
            assert found is not None, f"{path} has a line that is no record"
            yield int(found[1])


def _cut(path: Path) -> None:
    """Cut off what follows the last whole record."""
    with path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _TAIL)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        file.truncate(end)
