"""The frames of a video that a client sends one by one, as one file."""

import struct
from collections.abc import Sequence

MAGIC = b"crossdock frames"  # how the file begins
MOST_JOINED = 4096  # frames of one video


def join_frames(frames: Sequence[bytes]) -> bytes:
    """Return one file of pictures that are the frames of a video."""
    return MAGIC + b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


def split_frames(data: bytes) -> list[bytes]:
    """Return the pictures that `join_frames` has joined."""
    frames = list[bytes]()
    at = len(MAGIC)
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        frames.append(data[at + 4 : end])
        at = end
    return frames
