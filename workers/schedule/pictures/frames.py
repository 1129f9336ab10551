"""A video as several items, one for each group of frames that the encoder sees alone: a chunk encodes what it reads."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdock.workers.schedule.pictures.items import LEVELS, Item


def divide_frames(item: Item, runs: Sequence[tuple[int, int]]) -> list[Item]:
    """Return an item for each group of frames of a video; the item alone where its encoder's input is not so divided.

    The text between the groups then belongs to no item. A video whose groups are one run of placeholders stays whole:
    the model numbers their positions together.

    Args:
        runs: (first position, length) of each run of placeholders.
    """
    parts = _by_group(item.tensors, len(runs))
    if len(parts) < 2 or len({length for _, length in runs}) > 1:
        return [item]
    found = list[Item]()
    for number, ((start, length), tensors) in enumerate(zip(runs, parts, strict=True)):
        key = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16, key=item.content_hash).digest()
        part = replace(item, start=start, length=length, num_rows=length, content_hash=key, tensors=tensors)
        found.append(part)
    return found


def _by_group(tensors: Mapping[str, NDArray[Any]], count: int) -> list[dict[str, NDArray[Any]]]:
    """Return the tensors of each of `count` groups of frames; empty where they do not tell."""
    shared = {name: tensor for name, tensor in tensors.items() if name == LEVELS}
    own = {name: tensor for name, tensor in tensors.items() if name != LEVELS}
    if own.keys() == {"pixel_values_videos", "video_grid_thw"}:  # patches [groups · high · wide, depth]
        groups, high, wide = (int(size) for size in np.asarray(own["video_grid_thw"]).reshape(-1, 3)[0])
        if own["video_grid_thw"].size != 3 or groups != count:
            return []
        grid = np.array([[1, high, wide]], own["video_grid_thw"].dtype)
        split = np.split(own["pixel_values_videos"], count)
        return [{**shared, "pixel_values_videos": patches, "video_grid_thw": grid} for patches in split]
    if own.keys() == {"pixel_values"} and own["pixel_values"].ndim == 4 and len(own["pixel_values"]) == count:
        return [{**shared, "pixel_values": frame[None]} for frame in own["pixel_values"]]  # [frames, C, height, width]
    return []
