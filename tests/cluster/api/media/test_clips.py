"""Frames of videos: those that transformers' own reader samples, whatever container and codec they come in."""

import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from crossdock.cluster.api.media.clips import Clip, Sampling, read_clip
from crossdock.cluster.api.media.decoding import BadPicture
from crossdock.cluster.api.media.sent_frames import join_frames, split_frames
from tests.cluster.api.media.picture_models import encoded
from tests.cluster.api.media.video_models import moving, their_frames, video_file

PIXELS = 1 << 20
KINDS = [
    ("mp4", "libx264"),
    ("mp4", "libx265"),
    ("mp4", "mpeg4"),
    ("mov", "mjpeg"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
    ("mp4", "libsvtav1"),
    ("matroska", "libx264"),
    ("avi", "mpeg4"),
]


def same_size(_: int, width: int, height: int) -> tuple[int, int]:
    return width, height


def clip_of(data: bytes, **sampling: Any) -> Clip:
    return read_clip(data, Sampling(**sampling), PIXELS, same_size, Image.Resampling.BICUBIC)


@pytest.mark.parametrize(("kind", "codec"), KINDS)
@pytest.mark.parametrize("num_frames", [1, 5, 12, 32])
def test_sampled_frames_equal_those_of_transformers(kind: str, codec: str, num_frames: int, tmp_path: Path) -> None:
    data = video_file(kind=kind, codec=codec, pixels="yuvj420p" if codec == "mjpeg" else "yuv420p")
    clip = clip_of(data, num_frames=num_frames)
    assert (clip.total, clip.fps) == (12, 4.0)
    if kind in ("webm", "matroska"):  # which name no number of frames, so transformers reads none
        assert clip.indices == np.linspace(0, 11, min(num_frames, 12), dtype=int).tolist()
        everything = clip_of(data, num_frames=12).frames
        assert all(np.array_equal(frame, everything[i]) for frame, i in zip(clip.frames, clip.indices, strict=True))
        return
    frames, metadata = their_frames(data, num_frames, tmp_path)
    assert clip.indices == metadata.frames_indices
    assert clip.shown_fps == pytest.approx(metadata.sampled_fps)
    assert clip.timestamps == pytest.approx(metadata.timestamps)
    for own, theirs in zip(clip.frames, frames, strict=True):
        assert np.array_equal(np.asarray(own), theirs)


def test_lossless_frames_are_those_that_were_encoded() -> None:
    frames = moving(7)
    data = video_file(frames, kind="avi", codec="mjpeg", pixels="yuvj444p")
    found = clip_of(data, num_frames=3)
    assert found.indices == [0, 3, 6]
    for frame, index in zip(found.frames, found.indices, strict=True):
        difference = np.abs(np.asarray(frame, int) - frames[index].astype(int)).mean()
        others = [np.abs(np.asarray(frame, int) - other.astype(int)).mean() for other in frames]
        assert difference == min(others) < 8


def test_rate_bounds_the_number_of_frames() -> None:
    data = video_file(moving(20), fps=10)  # two seconds
    assert clip_of(data, num_frames=32, fps=2).indices == [0, 6, 12, 19]
    assert clip_of(data, num_frames=3, fps=2).indices == [0, 9, 19]
    assert clip_of(data, num_frames=32, fps=0.1).indices == [0]
    assert len(clip_of(data, num_frames=768, fps=100).indices) == 20
    for total in range(1, 100):
        for fps in (0.1, 0.7, 1.1, 24000 / 1001):
            assert Sampling(768, fps).indices(total, fps) == list(range(total))


def test_video_of_a_turned_camera_is_turned() -> None:
    """The matrix of the track says that the picture is to be turned by 90 degrees with the clock."""
    data = video_file(moving(3, 64, 32))
    at = data.index(b"tkhd") + 4 + 40
    one = 1 << 16
    matrix = [0, one, 0, -one, 0, 0, 0, 0, 1 << 30]
    turned = data[:at] + b"".join(value.to_bytes(4, "big", signed=True) for value in matrix) + data[at + 36 :]
    plain, found = clip_of(data, num_frames=3), clip_of(turned, num_frames=3)
    for own, theirs in zip(found.frames, plain.frames, strict=True):
        assert own.size == (32, 64)
        assert np.array_equal(np.asarray(own), np.rot90(np.asarray(theirs), -1))


def test_all_frames_have_the_size_that_the_first_one_decides() -> None:
    asked = []

    def half(count: int, width: int, height: int) -> tuple[int, int]:
        asked.append((count, width, height))
        return width // 2, height // 2

    clip = read_clip(video_file(), Sampling(5), PIXELS, half, Image.Resampling.BICUBIC)
    assert asked == [(5, 64, 48)]
    assert {frame.size for frame in clip.frames} == {(32, 24)}


def test_frames_that_are_sent_one_by_one_are_sampled_too() -> None:
    frames = moving(9)
    data = join_frames([encoded(Image.fromarray(frame)) for frame in frames])
    assert len(split_frames(data)) == 9
    clip = clip_of(data, num_frames=3)
    assert (clip.indices, clip.total, clip.fps) == ([0, 4, 8], 9, 1.0)
    assert all(np.array_equal(frame, frames[i]) for frame, i in zip(clip.frames, clip.indices, strict=True))
    assert clip_of(data, num_frames=9, fps=2).timestamps == [0.5 * i for i in range(9)]


def test_frame_of_another_size_or_none_is_named() -> None:
    small, large = (encoded(Image.new("RGB", size)) for size in ((8, 8), (16, 8)))
    with pytest.raises(BadPicture, match="unlike sizes"):
        clip_of(join_frames([small, large]))
    with pytest.raises(BadPicture, match="frame 1: it is not a picture"):
        clip_of(join_frames([small, b"x"]))


def test_packets_without_a_frame_do_not_count() -> None:
    """VP8 may send a picture that is only referred to: the bit that shows it is 0."""
    data = video_file(moving(12), kind="webm", codec="libvpx")
    with av.open(io.BytesIO(data)) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    hidden = bytes([packets[5][0] & ~16]) + packets[5][1:]
    clip, whole = clip_of(data.replace(packets[5], hidden), num_frames=4), clip_of(data, num_frames=12)
    assert (clip.total, clip.indices) == (11, [0, 3, 6, 10])
    shown = [frame for number, frame in enumerate(whole.frames) if number != 5]
    assert all(np.array_equal(frame, shown[i]) for frame, i in zip(clip.frames, clip.indices, strict=True))


def jpegs_of(width: int, height: int) -> list[bytes]:
    data = video_file(moving(5, width, height), kind="avi", codec="mjpeg", pixels="yuvj420p")
    with av.open(io.BytesIO(data)) as container:
        return [bytes(packet) for packet in container.demux(video=0) if packet.size]


def test_frame_that_is_too_large_is_refused_though_it_is_not_shown() -> None:
    small, large, file = jpegs_of(64, 48), jpegs_of(1200, 1000)[0], io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream: Any = container.add_stream("mjpeg", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for number, jpeg in enumerate([*small[:2], large, *small[3:]]):
            packet = av.Packet(jpeg)
            packet.stream, packet.pts, packet.dts = stream, number, number
            packet.time_base = Fraction(1, 4)
            container.mux(packet)
    assert read_clip(file.getvalue(), Sampling(2), 2 * PIXELS, same_size, 3).indices == [0, 4]
    with pytest.raises(BadPicture, match="cut off or broken"):
        clip_of(file.getvalue(), num_frames=2)
