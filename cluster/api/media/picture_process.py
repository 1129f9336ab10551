"""The process of pictures: decodes each and prepares it for the model, in a child that has limits.

Run as `python -m` by `PictureProcess`. It reads frames from stdin, first its settings, then pictures, and writes one
answer for each to stdout. It ends when stdin does.

A picture of a few kilobytes can take gigabytes and minutes, or use a fault of a decoder written in C. So the ingress
decodes none. This process has no thread but its own, so that each child is a quick fork. torch is not imported.
"""

import ctypes
import hashlib
import io
import os
import resource
import select
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgpack
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from crossdock.cluster.api.media.families import Family, read_family
from crossdock.cluster.api.media.frames import WALL_SECONDS, read_frame, write_frame

CPU_SECONDS = 8.0  # of one picture; 32 million pixels take 2 s
MEMORY_BYTES = 2 << 30
LOW_PIXELS = 512  # longest side of a picture whose `detail` is low

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_NICE = 5  # the engine's steps come first where cores are few
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_MOST_REASON_CHARS = 200
_TOO_LONG = "it takes too long to decode"
_REASONS = {
    signal.SIGPROF: _TOO_LONG,
    signal.SIGALRM: _TOO_LONG,
    signal.SIGABRT: f"it needs more than {MEMORY_BYTES >> 20} MiB to decode",
}


class BadPicture(ValueError):
    """A picture that cannot be used. The message gives the reason, for the client."""


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Prepare one picture after the other until `requests` ends."""
    settings = read_frame(requests)
    if settings is None:
        return
    try:
        prepare = Preparation(settings)
    except Exception as error:  # transformers raises errors of many kinds
        write_frame(answers, {"unsupported": f"{type(error).__name__}: {error}"[:_MOST_REASON_CHARS]})
        return
    write_frame(answers, prepare.tried())
    while (asked := read_frame(requests)) is not None:
        write_frame(answers, _answer(requests, prepare, asked))


class Preparation:
    """The image processor of a model, and how its family writes pictures."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from transformers import AutoImageProcessor  # late: torch must be out of the way

        folder = Path(settings["folder"])
        self._family: Family = read_family(folder, {int(key): name for key, name in settings["names"].items()})
        self._processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
        self._arguments = {**self._family.arguments, **settings["arguments"], "return_tensors": "np"}
        self._most_pixels = settings["most_pixels"]

    def tried(self) -> dict[str, Any]:
        """Prepare a small picture. Returns `is_ready`, or `wrong_arguments`, or `unsupported` with the reason."""
        asked = {"data": _trial(), "detail": "auto"}
        given = self._arguments
        try:
            self(asked)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:_MOST_REASON_CHARS]
        else:
            return {"is_ready": True}
        self._arguments = {**self._family.arguments, "return_tensors": "np"}
        try:
            self(asked)
        except Exception:
            return {"unsupported": reason}
        finally:
            self._arguments = given
        return {"wrong_arguments": reason}

    def __call__(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the encoder's tensors for a picture, and what replaces it in the prompt."""
        image = decode(asked["data"], self._most_pixels, is_low=asked["detail"] == "low")
        try:
            outputs = dict(self._processor(image, **self._arguments))
        except ValueError as error:  # such as a picture that is too narrow
            raise BadPicture(f"the model's processor refuses it: {str(error)[:_MOST_REASON_CHARS]}") from None
        for name in self._family.tensors:
            if name in outputs:
                outputs[name] = np.asarray(outputs[name])
        text, runs = self._family.written_runs(outputs)
        tensors = {name: np.ascontiguousarray(outputs[name]) for name in self._family.tensors if name in outputs}
        return {
            "text": text,
            "runs": runs,
            "hash": content_hash(tensors),
            "tensors": {name: [tensor.dtype.str, tensor.shape, tensor.tobytes()] for name, tensor in tensors.items()},
        }


def _trial() -> bytes:
    """Return the file of a small picture."""
    file = io.BytesIO()
    Image.new("RGB", (64, 48)).save(file, "PNG")
    return file.getvalue()


def content_hash(tensors: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    """Return 16 bytes that tensors of other names, types, shapes or values do not share."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tensor.dtype.str, tensor.shape)).encode())
        digest.update(np.ascontiguousarray(tensor).data)
    return digest.digest()


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


def _answer(requests: BinaryIO, prepare: Preparation, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare a picture in a child. Returns what `prepare` does, or `error`, or `is_busy`: the machine was too slow."""
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(reader)
        _run(lambda: prepare(asked), writer, parent)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        ready, _, _ = select.select([answer, requests], [], [])
        if answer not in ready:  # the ingress has ended: it asks nothing while it waits
            os.kill(child, signal.SIGKILL)
        said = answer.read()
    _, ended, used = os.wait4(child, 0)
    status = os.waitstatus_to_exitcode(ended)
    if said and status == 0:
        found: dict[str, Any] = msgpack.unpackb(said, max_bin_len=len(said))
        return found
    if status == -signal.SIGALRM and used.ru_utime + used.ru_stime < CPU_SECONDS / 2:
        return {"is_busy": True}
    reason = _REASONS.get(signal.Signals(-status)) if status < 0 else None
    return {"error": reason or "it cannot be decoded within this server's limits"}


def _run(prepare: Callable[[], dict[str, Any]], writer: int, parent: int) -> NoReturn:
    """Write what `prepare` returns, in a child that has only the limits' time and memory."""
    status = 1
    try:
        _limit(parent)
        try:
            said = prepare()
        except BadPicture as error:
            said = {"error": str(error)}
        with os.fdopen(writer, "wb") as answer:
            answer.write(msgpack.packb(said))
        status = 0
    except MemoryError:
        signal.raise_signal(signal.SIGABRT)
    finally:
        os._exit(status)


def _limit(parent: int) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a decoder's warnings may quote the picture
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to block an import
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # limits end children by signals that would dump them
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the whole terminal; the ingress decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    with suppress(BrokenPipeError):  # the ingress has ended
        serve(sys.stdin.buffer, answers)
