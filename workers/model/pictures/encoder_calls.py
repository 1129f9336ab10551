"""One call of the encoder for several items: which of them it takes, its arguments, its answer, and why it failed.

On a GPU the values of pixels that travel as levels are looked up there, so that the host does not wait for them.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdock.workers.model.device_copies import to_device
from crossdock.workers.schedule.pictures.encoding import ItemFailure
from crossdock.workers.schedule.request.items import LEVELS, PIXELS, Item, with_levels

_PER_PICTURE = {"pixel_values": 3, "pixel_values_videos": 3, "pixel_attention_mask": 2}
"""Dimensions of one picture in an argument that has three or more; Qwen's are rows of patches, [patches, depth]."""
_PER_ITEM = {"image_grid_thw": 1, "video_grid_thw": 1, "image_sizes": 1}
_NOT_ENCODED = {"second_per_grid_ts", LEVELS}  # of positions, and of other tensors
_SHORT = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")
"""In errors that are plain `RuntimeError`s: of CUDA, of the CPU's allocator (two), of cuBLAS."""


def batches_of(items: Sequence[Item], most_embedding_tokens: int | None) -> list[list[Item]]:
    """Divide items into those that one call encodes: of one kind, with the same tensors of shapes that can be joined.

    Pixtral's encoder is given one at a time: it would compute the attention of each picture to all others.
    `most_embedding_tokens`: of several items together; None: no matter how many.
    """

    def key(item: Item) -> tuple[Any, ...]:
        alone = item.content_hash if "image_sizes" in item.tensors else b""
        return (item.kind, alone, *((name, tensor.shape[1:]) for name, tensor in _by_picture(item.tensors).items()))

    ordered = sorted(items, key=lambda item: repr(key(item)))
    groups = [list(group) for _, group in groupby(ordered, key=lambda item: repr(key(item)))]
    if most_embedding_tokens is None:
        return groups
    batches = list[list[Item]]()
    for group in groups:
        room = 0
        for item in group:
            if item.num_embedding_tokens > room:
                batches.append([])
                room = max(most_embedding_tokens, item.num_embedding_tokens)
            batches[-1].append(item)
            room -= item.num_embedding_tokens
    return batches


def arguments_of(items: Sequence[Item], like: Tensor, is_nested: bool) -> dict[str, Tensor]:
    """Return the arguments of one call for several items, on the device of `like` and in its dtype.

    `is_nested`: the encoder takes pictures of several prompts, [prompts, pictures, …].
    """
    levels = None if like.device.type == "cpu" else shared_levels(items)
    parts = [_by_picture(item.tensors if levels is not None else with_levels(item.tensors)) for item in items]
    joined = dict[str, Tensor]()
    for name in parts[0]:
        tensor = to_device(np.concatenate([part[name] for part in parts]), like.device)
        if levels is not None and name in PIXELS:
            tensor = values_of(tensor, to_device(levels, like.device))
        tensor = tensor.to(like.dtype) if tensor.is_floating_point() else tensor
        joined[name] = tensor[None] if is_nested and name in _PER_PICTURE else tensor
    return joined


def layers_of(answer: Any) -> Tensor:
    """Return the rows [1 + L, R, E] of an encoder's answer: of its output, and of the L layers for DeepStack."""
    layers = [answer.pooler_output, *(getattr(answer, "deepstack_features", None) or ())]
    flat = [each if isinstance(each, Tensor) else torch.cat(list(each)) for each in layers]
    return torch.stack([each.reshape(-1, each.shape[-1]) for each in flat])


def is_passing(error: Exception) -> bool:
    """Return whether memory was too short for the call, which may then succeed another time."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _SHORT)


def item_failure(error: Exception) -> ItemFailure:
    """Return why an item has no embeddings, for the requests that read it."""
    if is_passing(error):
        reason = f"memory was short when a picture was encoded; the same request may succeed later: {error}"
        return ItemFailure(reason, is_passing=True)
    return ItemFailure(f"a picture cannot be encoded: {type(error).__name__}: {error}", is_passing=False)


def shared_levels(items: Sequence[Item]) -> NDArray[Any] | None:
    """Return the one table of levels [C, 256] of all items; None: tables differ, or an item has values."""
    tables = [item.tensors.get(LEVELS) for item in items]
    first = tables[0]
    if first is None or not all(table is not None and np.array_equal(table, first) for table in tables):
        return None
    return first


def values_of(pixels: Tensor, values: Tensor) -> Tensor:
    """Return the values of pixels, as `with_levels` does, on the device of the tensors.

    Args:
        pixels: levels `[…, C, height, width]`, or of patches `[patches, C · depth · height · width]`.
        values: `[C, 256]`.
    """
    colors, levels = values.shape
    size = pixels.shape[-2:].numel() if pixels.dim() > 2 else pixels.shape[1] // colors
    first = levels * torch.arange(colors, dtype=torch.int32, device=pixels.device)
    places = pixels.reshape(-1, colors, size).int() + first[None, :, None]
    return values.flatten().index_select(0, places.flatten()).view(pixels.shape)


def _by_picture(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the encoder's arguments with pictures, tiles, patches or grids along the first dimension alone."""
    found = {}
    for name, tensor in sorted(tensors.items()):
        array = np.asarray(tensor)
        if name in _PER_ITEM:
            array = array.reshape(-1, array.shape[-1])
        elif name in _PER_PICTURE and array.ndim >= 3:
            array = array.reshape(-1, *array.shape[-_PER_PICTURE[name] :])
        if name not in _NOT_ENCODED:
            found[name] = array
    return found
