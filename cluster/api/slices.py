"""Work that grows with a request's input, in slices: between two of them the event loop serves all other requests."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")

PAUSE_S = 0.001
"""Seconds between two slices. A pause of no time would let other tasks run, but no other thread: Ray's threads, which
bring the tokens of all streams, would wait for the interpreter."""


async def slices(items: Iterable[_Item], size: int, pause_s: float = PAUSE_S) -> AsyncGenerator[list[_Item], None]:
    """Yield the items in lists of `size`, the last one shorter. Other tasks and threads run between two lists."""
    iterator: Iterator[_Item] = iter(items)
    part = list(islice(iterator, size))
    while part:
        yield part
        if len(part) < size:
            return
        await asyncio.sleep(pause_s)
        part = list(islice(iterator, size))
