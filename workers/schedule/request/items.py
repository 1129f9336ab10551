"""Pictures and videos in prompts: which tokens stand for them, and what the encoder computes them from."""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One picture, or the frames of one video, in a prompt.

    The tokens `[start, start + length)` of the prompt stand for it. Those among them that equal the model's placeholder
    get the embedding tokens, in order; others, such as the breaks between the rows of a picture, are text.
    """

    start: int
    length: int  # tokens
    num_embedding_tokens: int  # placeholders among these tokens
    kind: str  # `image` or `video`
    content_hash: bytes  # 16 bytes, of `tensors`: equal hashes mean equal embeddings
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict)  # keyword arguments of the encoder, by name

    @property
    def end(self) -> int:
        """Return the position after the item's last token."""
        return self.start + self.length

    @property
    def num_parts(self) -> int:
        """Return the number of equal parts in which the encoder attends: the groups of a video's frames."""
        grids = self.tensors.get("video_grid_thw")
        return 1 if grids is None else max(1, int(np.asarray(grids).reshape(-1, 3)[:, 0].sum()))


LEVELS = "pixel_levels"  # the tensor [C, 256] of what the encoder reads for each level of each colour
PIXELS = ("pixel_values", "pixel_values_videos")  # tensors of levels, one byte each, where an item has `LEVELS`

NO_ITEMS: Sequence[Item] = ()


def salted(items: Sequence[Item], salt: str) -> Sequence[Item]:
    """Return the items with content hashes of their own for requests with this `salt`; unchanged without a salt.

    Embeddings are then shared between these requests alone, as cached pages are: the time to a first token would show
    that another tenant has sent the same picture.
    """
    if not salt or not items:
        return items
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    return [
        replace(item, content_hash=hashlib.blake2b(item.content_hash, digest_size=16, key=key).digest())
        for item in items
    ]


def with_levels(tensors: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
    """Return an item's tensors with the values of pixels in place of levels; unchanged without `LEVELS`.

    Pixels are `[…, C, height, width]`, or patches `[patches, C · depth · height · width]`.
    """
    if LEVELS not in tensors:
        return tensors
    values = tensors[LEVELS]
    found = {name: tensor for name, tensor in tensors.items() if name != LEVELS}
    colors = len(values)
    for name in PIXELS:
        if name in found:
            pixels = found[name]
            last = pixels.shape[-2:] if pixels.ndim > 2 else (pixels.shape[1] // colors,)
            flat = pixels.reshape(-1, colors, int(np.prod(last)))
            whole = np.empty(flat.shape, values.dtype)
            for color in range(colors):
                whole[:, color] = values[color][flat[:, color]]
            found[name] = whole.reshape(pixels.shape)
    return found


def items_in(items: Sequence[Item], start: int, end: int) -> Iterator[Item]:
    """Yield the items of which a token lies in `[start, end)`, in order."""
    return (item for item in items if item.start < end and item.end > start)


def page_keys(items: Sequence[Item], first: int, page_size: int, num_pages: int) -> Iterator[bytes]:
    """Yield for each page a key of its items, whose content the placeholder tokens do not show.

    Empty where a page has no token of an item. Two pages with equal tokens and equal keys have equal content: each item
    counts by its content, its length, and the place where it begins. Each item is looked at once for every page that it
    reaches into, and finding the first one takes logarithmic time.

    Args:
        items: by `start`; no token belongs to two.
        first: position of the first page's first token.
        page_size: tokens of a page.
        num_pages: how many pages.
    """
    number = bisect_right(items, first, key=lambda item: item.end)
    for start in range(first, first + num_pages * page_size, page_size):
        key = b""
        while number < len(items) and items[number].start < start + page_size:
            item = items[number]
            key += struct.pack("<qq", item.start - start, item.length) + item.content_hash
            if item.end > start + page_size:  # it reaches into the next page
                break
            number += 1
        yield key


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
        part = replace(item, start=start, length=length, num_embedding_tokens=length, content_hash=key, tensors=tensors)
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
