"""Work that grows with a request's input, in slices: between two of them the event loop serves all other requests."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")
_FEW_PARTS = 64  # of a conversation; under a millisecond

PAUSE_S = 0.001
"""Seconds between two slices. A pause of no time would let other tasks run, but no other thread: Ray's threads, which
bring the tokens of all streams, would wait for the interpreter."""


async def apart(work: Callable[[], _Found], *given: Any) -> _Found:
    """Return the result of work that grows with the parts of `given`, which a client sent in any form.

    Much work leaves the event loop for a thread.
    """
    return work() if all(map(_has_few_parts, given)) else await asyncio.to_thread(work)


def _has_few_parts(given: Any) -> bool:
    """Return whether a list of messages or items is short, with all parts of their contents."""
    if not isinstance(given, list):
        return True
    contents = (each.get("content") for each in given if isinstance(each, dict))
    return len(given) + sum(len(content) for content in contents if isinstance(content, list)) <= _FEW_PARTS


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
