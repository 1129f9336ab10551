"""Decode the file of a picture."""

import io

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

LOW_PIXELS = 512  # longest side of a picture whose `detail` is low

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class BadPicture(ValueError):
    """A picture or a video that cannot be used. The message gives the reason, for the client."""


def load_formats() -> None:
    """Import the decoders of all accepted formats. Pillow imports some at their first use, which a child without files
    cannot do.
    """
    if any(name not in Image.OPEN for name in _FORMATS):
        Image.init()


def decode(data: bytes, most_pixels: int, *, is_low: bool = False) -> Image.Image:
    """Return the first frame of a picture in RGB, turned as its EXIF says, on white where it is transparent.

    Raises:
        BadPicture: the data are no picture of an accepted format, have too many pixels, or are broken.
    """
    Image.MAX_IMAGE_PIXELS = None  # the sizes are compared here
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
        width, height = image.size
        if width * height > most_pixels:
            raise BadPicture(f"it has {width} by {height} pixels; {most_pixels} pixels are accepted")
        image.load()
        image = _in_rgb(ImageOps.exif_transpose(image))
    except BadPicture:
        raise
    except UnidentifiedImageError:
        raise BadPicture(f"it is not a picture of an accepted format ({', '.join(_FORMATS)})") from None
    except MemoryError:
        raise
    except Exception:  # decoders raise errors of many kinds
        raise BadPicture("it cannot be decoded: its file is cut off or broken") from None
    if is_low:
        image.thumbnail((LOW_PIXELS, LOW_PIXELS))
    return image


def _in_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits of grey, of which Pillow would keep only the darkest 256 levels
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image)
        image = white
    return image.convert("RGB")
