"""Name the rows of tensors that a loader is asked for. A loader yields them as they come."""

from collections.abc import Callable, Generator, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class TensorPart(NamedTuple):
    """Rows of a tensor in a file, or all of the tensor."""

    file: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int  # element of the tensor
    offset: int  # byte of the file

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Tensors: TypeAlias = Generator[tuple[int, Tensor], None, None]
Loader: TypeAlias = Callable[[Sequence[TensorPart], str], Tensors]
"""Reads parts to a device. Yields (number of the part, its tensor, which has memory of its own) in any order."""
