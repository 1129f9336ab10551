"""Work that grows with a request's input, in slices: between two of them the event loop serves all other requests."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")


async def slices(items: Iterable[_Item], size: int) -> AsyncGenerator[list[_Item], None]:
    """Yield the items in lists of `size`, the last one shorter. Other tasks of the event loop run between two lists."""
    iterator: Iterator[_Item] = iter(items)
    part = list(islice(iterator, size))
    while part:
        yield part
        if len(part) < size:
            return
        await asyncio.sleep(0)
        part = list(islice(iterator, size))
