"""Tensors in memory, in the place of the files of a checkpoint: a folder has only their names, dtypes and shapes."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from crossdock.workers.model.loaders.file_slice import DTYPES
from crossdock.workers.model.loaders.files import Files

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HeldTensors(Files):
    """Whole tensors by their names. Reads give these tensors themselves, and copy what is a part of one."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def slice_of(self, _file: str, key: str) -> "HeldSlice":
        return HeldSlice(self._tensors[key])

    def write_heads(self, folder: Path) -> None:
        """Write a file of safetensors with a hole in the place of the bytes. ValueError: it has no such dtype."""
        entries: dict[str, Any] = {}
        end = 0
        for name, tensor in self._tensors.items():
            if tensor.dtype not in _NAMES:
                raise ValueError(f"{name} is of {tensor.dtype}, which a checkpoint does not have")
            start, end = end, end + tensor.nbytes
            entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
            entries[name] = entry
        head = json.dumps(entries | {"__metadata__": {"format": "pt"}}).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(head)) + head)
            file.truncate(8 + len(head) + end)


class HeldSlice:
    """A tensor in memory. Stands in for a slice of safetensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, key: Any) -> Tensor:
        return self._tensor[key].contiguous()

    def get_dtype(self) -> str:
        return _NAMES[self._tensor.dtype]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)
