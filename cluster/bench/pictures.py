"""Pictures that a benchmark draws: PNG files of coloured squares, which their key and a seed decide."""

import base64
import io
import random
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
    from PIL import Image  # late: most loads have no pictures

    num_squares = -(-picture.side // _SQUARE)
    colors = random.Random(f"{seed}/{picture.key}").randbytes(3 * num_squares**2)
    squares = Image.frombytes("RGB", (num_squares, num_squares), colors)
    whole = squares.resize((num_squares * _SQUARE,) * 2, Image.Resampling.NEAREST)
    file = io.BytesIO()
    whole.crop((0, 0, picture.side, picture.side)).save(file, "PNG", compress_level=1)
    return file.getvalue()
