"""Read a part of a tensor in a safetensors file, and no more bytes than those.

safetensors' own slices read the whole tensor first, unless the file is mapped; then its pages count as memory of this
process. A rank that holds an eighth of an embedding would need the whole in memory.
"""

import json
import os
import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = FLOATS | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class FileSlice:
    """A tensor in an open file. Stands in for a slice of safetensors."""

    def __init__(self, descriptor: int, start: int, dtype: str, shape: Sequence[int]) -> None:
        """`start`: the tensor's first byte in the file."""
        self._descriptor, self.start, self._dtype, self._shape = descriptor, start, dtype, list(shape)

    def __getitem__(self, key: Any) -> Tensor:
        """Read the elements of `key`: `...`, or slices of step 1, of which only the last may leave elements out."""
        if key is ...:
            return self._read(0, 0, prod(self._shape[:1])).reshape(self._shape)
        *_, last = slices = key if isinstance(key, tuple) else (key,)
        dim = len(slices) - 1
        start, stop, _ = last.indices(self._shape[dim])
        return self._read(dim, start, stop)

    def get_dtype(self) -> str:
        return self._dtype

    def get_shape(self) -> list[int]:
        return self._shape

    def _read(self, dim: int, start: int, stop: int) -> Tensor:
        """Return the elements from `start` to `stop` along `dim`."""
        before = self._shape[:dim]
        after = self._shape[dim + 1 :]
        found = torch.empty([*before, stop - start, *after], dtype=DTYPES[self._dtype])
        content = found.view(-1).view(torch.uint8).numpy().data
        row = prod(after) * found.itemsize
        stride = prod(self._shape[dim : dim + 1]) * row
        size = (stop - start) * row
        if stride == size:  # all rows, one after the other
            stride = size = len(content)
        for number, first in enumerate(range(0, len(content), max(size, 1))):
            self._fill(content[first : first + size], self.start + number * stride + start * row)
        return found

    def _fill(self, content: memoryview, offset: int) -> None:
        """Fill `content` with bytes from `offset` on. OSError: the file ends before."""
        while content:
            count = os.preadv(self._descriptor, [content], offset)
            if not count:
                raise OSError("a file of weights ends in the middle of a tensor")
            content = content[count:]
            offset = offset + count


class OpenFile:
    """A safetensors file that is open for reading."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        try:
            (length,) = struct.unpack("<Q", self._file.read(8))
            self._entries: dict[str, Any] = json.loads(os.pread(self._file.fileno(), length, 8))
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            self.close()
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        self._entries.pop("__metadata__", None)
        self._start = 8 + length

    def slice_of(self, key: str) -> FileSlice:
        """Return the tensor of a name, whose bytes are read when they are asked for."""
        entry = self._entries[key]
        start = self._start + entry["data_offsets"][0]
        return FileSlice(self._file.fileno(), start, entry["dtype"], entry["shape"])

    def keys(self) -> list[str]:
        return list(self._entries)

    def spans(self) -> list[tuple[int, int]]:
        """Return the first byte in the file of each tensor, and the byte after its last."""
        places = [entry["data_offsets"] for entry in self._entries.values()]
        return sorted((self._start + start, self._start + stop) for start, stop in places)

    def close(self) -> None:
        self._file.close()
