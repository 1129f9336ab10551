"""Frames of a video: sampled evenly, decoded one after the other, with the time of each.

The file's own length, rate and size are claims of a client. So packets are counted, and each size is compared before a
picture is made of it. Only the demuxers and decoders named here run: others open further files by themselves.
"""

import importlib
import io
import math
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from PIL import Image

from crossdock.cluster.api.media.decoding import BadPicture, decode
from crossdock.cluster.api.media.sent_frames import MAGIC, split_frames

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

_MOST_IN_FILE = 1 << 17  # frames; over an hour at 30 a second
_RATES = (0.01, 1000.0)  # frames a second
_CONTAINERS = "MP4, MOV, WebM, Matroska, AVI"
_CODECS = "h264,hevc,vp8,vp9,libvpx,libvpx-vp9,av1,libdav1d,mpeg4,mjpeg"
_CODEC_NAMES = "H.264, H.265, VP8, VP9, AV1, MPEG-4, MJPEG"
_MOV_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")

Resize: TypeAlias = Callable[[int, int, int], tuple[int, int]]
"""Returns the width and height of shown frames, from their number, width and height."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many frames of a video are shown."""

    num_frames: int = 32  # at most
    fps: float | None = None  # frames a second; None: as many as there may be

    def indices(self, total: int, fps: float) -> list[int]:
        """Return which of a video's `total` frames are shown, from the first to the last."""
        most = total if self.fps is None else math.floor(total / fps * self.fps + 1e-6)  # of 0.7 / 0.7 more than 0.99
        count = max(1, min(self.num_frames, most, total))
        return [int(index) for index in np.linspace(0, total - 1, count, dtype=int)]


@dataclass(frozen=True, slots=True)
class Clip:
    """The shown frames of a video."""

    frames: Sequence[Image.Image]  # RGB, of one size
    indices: Sequence[int]  # of each, among all frames of the video
    total: int  # frames of the video
    fps: float  # of the video

    @property
    def timestamps(self) -> list[float]:
        """Return the second of each shown frame."""
        return [index / self.fps for index in self.indices]

    @property
    def shown_fps(self) -> float:
        """Return how many frames are shown for a second of the video."""
        return len(self.indices) / self.total * self.fps


@cache
def load_decoders() -> bool:
    """Import the decoders of videos. Returns whether these are installed; frames of `video/jpeg` do not need them."""
    try:
        import av
    except ImportError:
        return False
    av.logging.set_level(None)
    for module in pkgutil.walk_packages(av.__path__, "av."):  # which av imports when it first needs them
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return True


def trial_file(image: Image.Image) -> bytes:
    """Return the file of a video that shows a picture twice. Needs the decoders."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream: Any = container.add_stream("mjpeg", rate=1)
        stream.width, stream.height, stream.pix_fmt = *image.size, "yuvj420p"
        for _ in range(2):
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return file.getvalue()


def read_clip(data: bytes, sampling: Sampling, most_pixels: int, resize: Resize, resample: int) -> Clip:
    """Return the shown frames of a video, resized.

    Args:
        data: a file, or what `join_frames` returns: one frame a second, unless `sampling` names a rate.
        sampling: how many frames are shown.
        most_pixels: of a frame, before it is resized.
        resize: the size of shown frames.
        resample: Pillow's filter.

    Raises:
        BadPicture: the data are no video of an accepted format, or beyond a limit, or broken.
    """
    if data.startswith(MAGIC):
        return _joined_clip(data, sampling, most_pixels, resize, resample)
    if not load_decoders():
        raise BadPicture("this server reads no files of videos, only their frames (data:video/jpeg;base64,…,…)")
    try:
        with _opened(data, most_pixels) as (container, stream):
            fps = _rate(stream)
            total = _count(container, stream)
        for _ in range(2):  # some packets, as VP8's, are decoded without a frame: then with as many as there were
            indices = sampling.indices(total, fps)
            with _opened(data, most_pixels) as (container, stream):
                resized = _Resizer(len(indices), most_pixels, resize, resample)
                frames, seen = _sampled(container, stream, indices, resized)
            if len(frames) == len(indices):
                return Clip(frames, indices, total, fps)
            if not seen:
                raise BadPicture("it has no frames")
            total = seen
    except (BadPicture, MemoryError):
        raise
    except Exception:  # demuxers and decoders raise errors of many kinds
        pass
    raise BadPicture("it cannot be decoded: its file is cut off or broken")


@dataclass(slots=True)
class _Resizer:
    """Gives all frames the size that the first one decides."""

    count: int
    most_pixels: int
    resize: Resize
    resample: int
    size: tuple[int, int] | None = None

    def __call__(self, image: Image.Image) -> Image.Image:
        if self.size is None:
            try:
                self.size = self.resize(self.count, *image.size)
            except ValueError as error:  # such as a frame that is too narrow
                raise BadPicture(f"the model's processor refuses it: {str(error)[:200]}") from None
        return image if image.size == self.size else image.resize(self.size, self.resample)


def _joined_clip(data: bytes, sampling: Sampling, most_pixels: int, resize: Resize, resample: int) -> Clip:
    files = split_frames(data)
    fps = sampling.fps or 1.0
    indices = sampling.indices(len(files), fps)
    resized = _Resizer(len(indices), most_pixels, resize, resample)
    sizes = set[tuple[int, int]]()
    frames = []
    for index in indices:
        try:
            image = decode(files[index], most_pixels)
        except BadPicture as error:
            raise BadPicture(f"frame {index}: {error}") from None
        sizes.add(image.size)
        if len(sizes) > 1:
            raise BadPicture("its frames have unlike sizes")
        frames.append(resized(image))
    return Clip(frames, indices, len(files), fps)


@contextmanager
def _opened(data: bytes, most_pixels: int) -> "Iterator[tuple[InputContainer, VideoStream]]":
    """Open a file and its first video stream, which is of a named codec and of an accepted size."""
    import av  # late: an optional package, which only the processes of videos need

    container_format = _format_of(data)
    options = {"codec_whitelist": _CODECS, "format_whitelist": container_format, "protocol_whitelist": "none"}
    with av.open(io.BytesIO(data), format=container_format, options=options, io_open=_no_other_file) as container:
        if not container.streams.video:
            raise BadPicture("it has no video stream")
        stream = container.streams.video[0]
        codec: Any = stream.codec_context
        if codec is None or codec.name not in _CODECS.split(","):
            raise BadPicture(f"its codec is not accepted ({_CODEC_NAMES} are)")
        _check_size(codec.width, codec.height, most_pixels)
        codec.options = {"max_pixels": str(most_pixels)}  # a file may change its size later on
        codec.thread_count = 1
        yield container, stream


def _format_of(data: bytes) -> str:
    if data[4:8] in _MOV_BOXES:
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    raise BadPicture(f"it is not a video of an accepted format ({_CONTAINERS})")


def _no_other_file(*_: object) -> Any:
    """Refuse to open other files to which a file refers."""
    raise BadPicture("it refers to other files")


def _check_size(width: int, height: int, most_pixels: int) -> None:
    if width < 1 or height < 1:
        raise BadPicture("its frames have no size")
    if width * height > most_pixels:
        raise BadPicture(f"its frames have {width} by {height} pixels; {most_pixels} pixels are accepted")


def _rate(stream: "VideoStream") -> float:
    """Return the frames of a second."""
    rate = stream.average_rate or stream.guessed_rate
    if rate is None or not _RATES[0] <= rate <= _RATES[1]:
        raise BadPicture(f"its frame rate is not between {_RATES[0]:g} and {_RATES[1]:g} frames a second")
    return float(rate)


def _count(container: "InputContainer", stream: "VideoStream") -> int:
    """Return how many packets have a frame."""
    count = 0
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise BadPicture("it cannot be decoded: its file is cut off or broken")
        count += bool(packet.size) and not packet.is_discard
        if count > _MOST_IN_FILE:
            raise BadPicture(f"it has more than {_MOST_IN_FILE} frames")
    if not count:
        raise BadPicture("it has no frames")
    return count


def _sampled(
    container: "InputContainer", stream: "VideoStream", indices: Sequence[int], resized: _Resizer
) -> tuple[list[Image.Image], int]:
    """Return the frames at `indices`, as far as there are so many, and how many frames were decoded."""
    frames = list[Image.Image]()
    wanted = iter(indices)
    seen = 0
    index = next(wanted)
    for frame in container.decode(stream):
        if seen == index:
            _check_size(frame.width, frame.height, resized.most_pixels)
            if frame.is_corrupt:
                raise BadPicture("it cannot be decoded: its file is cut off or broken")
            image: Image.Image = frame.to_image()  # type: ignore[no-untyped-call]
            if turn := round(frame.rotation / 90) * 90 % 360:  # against the clock, as Pillow's
                image = image.rotate(turn, expand=True)
            frames.append(resized(image))
            if len(frames) == len(indices):
                break
            index = next(wanted)
        seen += 1
    return frames, seen
