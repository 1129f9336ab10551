"""The size of a body as JSON, before it is parsed: the parser makes an object of every value, all in one go."""

import asyncio
import re
from collections.abc import Iterator

from crossdock.cluster.api.bounds import BODY_PARTS, BODY_VALUES
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.slices import slices

_COUNTED_AT_ONCE = 1 << 20  # bytes
_OUTSIDE = re.compile(rb'[^"]{0,65536}')
_INSIDE = re.compile(rb'[^"\\]{1,65536}|(?:\\.){1,4096}', re.DOTALL)
_SCANNED_AT_ONCE = 32  # pieces of a body, each one string or 64 KiB at most


async def check_json_size(body: bytes) -> None:
    """Raise ApiError for a body with too many values. Other requests are served meanwhile."""
    if len(body) <= BODY_PARTS or await _is_small(body):
        return
    async for counts in slices(_scan(body), _SCANNED_AT_ONCE):
        parts, commas = counts[-1]
        for count, most, name in (
            (parts, BODY_PARTS, "strings, lists and objects"),
            (commas, BODY_VALUES, "values"),
        ):
            if count > most:
                raise ApiError(f"The body has more than {most} {name}.", code="invalid_json")


async def _is_small(body: bytes) -> bool:
    """Return whether the body is within the bounds even if no mark in it were part of a text."""
    parts = commas = 0
    for start in range(0, len(body), _COUNTED_AT_ONCE):
        piece = body[start : start + _COUNTED_AT_ONCE]
        parts += piece.count(b"[") + piece.count(b"{") + (piece.count(b'"') + 1) // 2
        commas += piece.count(b",")
        await asyncio.sleep(0)
    return parts <= BODY_PARTS and commas <= BODY_VALUES


def _scan(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield, piece by piece, how many strings, lists and objects have begun so far, and how many commas there were.

    Marks inside strings do not count. A body that is no JSON may be counted wrongly: the parser refuses it.
    """
    position = parts = commas = 0
    while position < len(body):
        outside = _OUTSIDE.match(body, position)
        assert outside is not None  # it may be empty
        piece, position = outside[0], outside.end()
        parts += piece.count(b"[") + piece.count(b"{")
        commas += piece.count(b",")
        if body[position : position + 1] == b'"':
            parts, position = parts + 1, position + 1
            while inside := _INSIDE.match(body, position):
                position = inside.end()
                yield parts, commas
            position += 1
        yield parts, commas
