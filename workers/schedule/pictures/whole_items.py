"""Where a chunk may end if every row of an item sees all rows of that item: on a page boundary outside of items, or at
the end of an item. One chunk then computes the whole item. Pure.

A chunk may begin inside an item, after a prefix that is cached: the rows before it were computed with the whole item.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from crossdock.workers.schedule.request.items import Item
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import InvalidField


def most_tokens(items: Sequence[Item], start: int, stop: int, page_size: int) -> int:
    """Return the tokens of the longest chunk from `start` on that ends by `stop`; 0: there is no such chunk."""
    ends = [item.end for item in items if start < item.end <= stop]
    boundary = stop // page_size * page_size
    while inside := _around(items, boundary):
        boundary = inside.start // page_size * page_size
    return max(boundary, start, *ends) - start


def least_tokens(items: Sequence[Item], start: int, end: int, page_size: int) -> int:
    """Return the tokens of the shortest chunk from `start` on of a prompt that ends at `end`."""
    boundary = (start // page_size + 1) * page_size
    while inside := _around(items, boundary):
        boundary = -(-inside.end // page_size) * page_size
    return min(boundary, end, *(item.end for item in items if item.end > start)) - start


def check_fit(request: Request, page_size: int, most: int, settings: str) -> None:
    """Check that each item fits into one chunk of `most` tokens, which `settings` allow beside streams.

    Raises:
        InvalidField: an item does not fit.
    """
    for number, item in enumerate(request.items):
        start = most_tokens(request.items, 0, item.start, page_size)
        if item.end - start > most:
            raise InvalidField(
                f"item {number} of the prompt, {item.kind} at token {item.start}, attends in both directions: one "
                f"chunk of {item.end - start} tokens must compute it, and steps have room for {most} ({settings})",
                "prompt",
            )


def key_end(is_taken: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return how many tokens each token of a prompt sees: up to the end of its run of placeholders, or up to itself."""
    numbers = np.arange(1, len(is_taken) + 1, dtype=np.int32)
    # transformers takes such runs for pictures
    is_last = is_taken & ~np.append(is_taken[1:], False)
    ends = numbers[is_last]
    return np.where(is_taken, np.append(ends, 0)[np.searchsorted(ends, numbers)], numbers).astype(np.int32)


def _around(items: Sequence[Item], position: int) -> Item | None:
    """Return the item that a chunk which ends at `position` would cut."""
    return next((item for item in items if item.start < position < item.end), None)
