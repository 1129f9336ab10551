"""Pictures that a benchmark draws: PNG files of coloured squares, which their key and a seed decide."""

import base64
import random
import struct
import zlib
from dataclasses import dataclass

_SQUARE = 8  # pixels; larger squares would compress to files that no camera makes, smaller ones not at all


@dataclass(frozen=True, slots=True)
class DrawnPicture:
    """A picture of a request. In one run a key has one picture."""

    key: str
    side: int = 512  # pixels


def picture_url(picture: DrawnPicture, seed: str) -> str:
    """Return the data URL of a picture. `seed`: of the run."""
    return f"data:image/png;base64,{base64.b64encode(png(picture, seed)).decode()}"


def png(picture: DrawnPicture, seed: str) -> bytes:
    """Return the file of a picture."""
    rng = random.Random(f"{seed}/{picture.key}")
    side = picture.side
    num_squares = -(-side // _SQUARE)
    rows = []
    for _ in range(num_squares):
        colors = rng.randbytes(3 * num_squares)
        row = b"".join(colors[at : at + 3] * _SQUARE for at in range(0, len(colors), 3))
        rows += [b"\0" + row[: 3 * side]] * _SQUARE  # each row begins with its filter: none
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows[:side]), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
