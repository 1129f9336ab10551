"""The low-rank matrices of adapters for the layers of a decoder stack: which rows of a batch have which."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdock.kernels.cpu.layer_steps import Adapted
from crossdock.kernels.low_rank import Pair, Rows

_NAMES = ("q", "k", "v", "out", "gate", "up", "down")  # of matrices in `DecoderLayer`, as `DeltaOf` of low_rank.h


class StackDeltas:
    """The matrices of one adapter, by layer and by the name of the matrix in `DecoderLayer` that they change."""

    def __init__(self, layers: Sequence[Mapping[str, Pair]]) -> None:
        """In each pair, A must be contiguous, and both bfloat16 or of the type of inputs. B is copied into panels."""
        self.layers = [{name: (a, _in_panels(b)) for name, (a, b) in layer.items()} for layer in layers]
        self.rank = max((a.shape[0] for layer in layers for a, _ in layer.values()), default=0)
        # As `LayerDeltas` of low_rank.h. They point into the tensors of `self.layers`.
        self.structures = np.zeros((len(layers), len(_NAMES), 4), np.int64)
        for layer, structure in zip(self.layers, self.structures, strict=True):
            for name, (a, b) in layer.items():
                assert a.is_contiguous()
                structure[_NAMES.index(name)] = a.data_ptr(), b.data_ptr(), a.shape[0], a.dtype == torch.bfloat16


def _in_panels(b: Tensor) -> Tensor:
    """Return B [N, rank] as [N / 16, rank, 16]: what 16 outputs need lies together, as their weights do."""
    return b.view(-1, 16, b.shape[1]).transpose(1, 2).contiguous()


class RowDeltas(NamedTuple):
    """The adapters of a batch, each with its rows."""

    groups: Sequence[tuple[StackDeltas, Rows]]

    @property
    def rank(self) -> int:
        """Return the largest rank."""
        return max(deltas.rank for deltas, _ in self.groups)

    def pointers(self, num_rows: int, first_layer: int = 0) -> NDArray[np.int64]:
        """Return the address of each row's `structures` from a layer on, [T] int64; 0: the row has no adapter."""
        found = np.zeros(num_rows, np.int64)
        for deltas, rows in self.groups:
            found[rows if isinstance(rows, slice) else rows.numpy()] = deltas.structures[first_layer:].ctypes.data
        return found


def adapted(pointers: NDArray[np.int64] | None, layer: int, x: Tensor, **widths: int) -> Adapted | None:
    """Describe what adapters change in the outputs of matrices of one input x [.., K], for the step that reads them.

    pointers: [T], of `RowDeltas`, to be kept until that step; None: no row has an adapter. `widths`: outputs of each
    matrix, by its name in `DecoderLayer`. The matrices are columns of the outputs in that order; of `gate` and `up` 16
    each in turn.
    """
    if pointers is None:
        return None
    first = _NAMES.index(next(iter(widths)))
    assert tuple(widths) == _NAMES[first : first + len(widths)]
    assert x.is_contiguous()
    each = (ctypes.c_int64 * 3)(*widths.values())
    address = pointers.ctypes.data
    return Adapted(address, layer, first, len(widths), each, x.data_ptr(), x.shape[1], "gate" in widths)
