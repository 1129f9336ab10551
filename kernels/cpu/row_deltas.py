"""The low-rank matrices of adapters for the layers of a decoder stack: which rows of a batch have which."""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from crossdock.kernels.low_rank import Pair, Rows, add_low_rank

_NAMES = ("q", "k", "v", "out", "gate", "up", "down")  # of matrices in `DecoderLayer`


class _Delta(ctypes.Structure):
    _fields_ = [("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("rank", ctypes.c_int64)]


class _LayerDeltas(ctypes.Structure):
    _fields_ = [(name, _Delta) for name in _NAMES]


class StackDeltas:
    """The matrices of one adapter, by layer and by the name of the matrix in `DecoderLayer` that they change."""

    def __init__(self, layers: Sequence[Mapping[str, Pair]]) -> None:
        """In each pair, A and the transpose of B must be contiguous."""
        self.layers = layers
        self.rank = max((a.shape[0] for layer in layers for a, _ in layer.values()), default=0)

    @cached_property
    def structures(self) -> Any:
        """Return the layers as decoder.cpp reads them. They point into the tensors."""
        structures = (_LayerDeltas * len(self.layers))()
        for structure, layer in zip(structures, self.layers, strict=True):
            for name, (a, b) in layer.items():
                assert a.is_contiguous()
                assert b.T.is_contiguous()
                setattr(structure, name, _Delta(a.data_ptr(), b.data_ptr(), a.shape[0]))
        return structures


class RowDeltas(NamedTuple):
    """The adapters of a batch, each with its rows."""

    groups: Sequence[tuple[StackDeltas, Rows]]

    @property
    def rank(self) -> int:
        """Return the largest rank."""
        return max(deltas.rank for deltas, _ in self.groups)

    def add(self, layer: int, x: Tensor, **outputs: Tensor) -> None:
        """Add what adapters change in the outputs of matrices of one input x, by name, in place; see `add_low_rank`."""
        for name, y in outputs.items():
            pairs = ((deltas.layers[layer].get(name), rows) for deltas, rows in self.groups)
            add_low_rank(((pair, rows) for pair, rows in pairs if pair is not None), x, y)

    def pointers(self, num_rows: int) -> Any:
        """Return the address of each row's `structures`, [T] int64; 0: the row has no adapter."""
        found = np.zeros(num_rows, np.int64)
        for deltas, rows in self.groups:
            found[rows if isinstance(rows, slice) else rows.numpy()] = ctypes.addressof(deltas.structures)
        return found
