"""The size of a body as JSON, before it is parsed: the parser makes an object of every value, all in one go."""

from collections.abc import Iterator, Sequence

from crossdock.cluster.api.bounds import ARGUMENTS_CHARS, BODY_PARTS, BODY_VALUES
from crossdock.cluster.api.errors import ApiError, wrong
from crossdock.cluster.api.slices import slices

_PIECE = 1 << 16  # bytes counted by one call; 0.1 ms, or a millisecond where every byte begins or ends a string
_PIECES_AT_ONCE = 4


async def check_texts_size(texts: Sequence[str], param: str) -> tuple[int, int]:
    """Return the parts and the commas of strings of a body that are JSON, as `check_json_size` does.

    Raises ApiError for JSON that is too long, or has too many values, all texts together.
    """
    num_chars = sum(map(len, texts))
    if num_chars > ARGUMENTS_CHARS:
        most = f"the {ARGUMENTS_CHARS} that are accepted"
        raise wrong(param, f"the arguments of all calls have {num_chars} characters, more than {most}")
    # The parser refuses the first text that is no JSON, so that the count up to there is right.
    return await check_json_size(",".join(texts).encode("utf-8", "surrogatepass"), param)


async def check_json_size(body: bytes, param: str | None = None) -> tuple[int, int]:
    """Return the strings, lists and objects of a body, or of the JSON in a part of it, and the commas.

    Other requests are served meanwhile. Marks inside strings count in a short body, which cannot have too many. Raises
    ApiError for a body with too many.
    """
    if len(body) <= BODY_PARTS:
        return count_marks(body)
    parts = commas = 0
    async for counts in slices(_count(body), _PIECES_AT_ONCE):
        parts, commas = counts[-1]
        for count, most, name in (
            (parts, BODY_PARTS, "strings, lists and objects"),
            (commas, BODY_VALUES, "values"),
        ):
            if count > most:
                where = "The body has" if param is None else f"The arguments of calls in '{param}' have"
                raise ApiError(f"{where} more than {most} {name}.", param=param, code="invalid_json")
    return parts, commas


def count_marks(body: bytes) -> tuple[int, int]:
    """Return at least the strings, lists and objects of a body, and its commas: marks inside strings count, too."""
    return body.count(b'"') // 2 + body.count(b"[") + body.count(b"{"), body.count(b",")


def _count(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield, piece by piece, how many strings, lists and objects have begun so far, and how many commas there were.

    Marks inside strings do not count. A body that is no JSON may be counted wrongly: the parser refuses it.
    """
    position = quotes = lists = commas = 0
    while position < len(body):
        piece = body[position : position + _PIECE]
        position += len(piece)
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the last backslash belongs to the byte after the piece
            piece += body[position : position + 1]
            position += 1
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        between = piece.split(b'"')
        outside = b" ".join(between[quotes % 2 :: 2])  # an even number of quotes before: outside of a string
        quotes += len(between) - 1
        lists += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        yield (quotes + 1) // 2 + lists, commas
