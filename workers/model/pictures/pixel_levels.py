"""The values of pixels that travel as levels: on a GPU looked up there, so that the host does not wait for them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdock.workers.schedule.pictures.items import LEVELS, Item


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
