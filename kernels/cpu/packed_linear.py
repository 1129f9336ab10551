"""Products with weights of small codes on a CPU, by packed.h: the codes stay packed, in panels of 16 outputs."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.kernels.cpu.build import cpu_library
from crossdock.kernels.cpu.huge_pages import HugePages, give_back
from crossdock.kernels.packed import DTYPES, IN_NIBBLES, Kind, PackedMatrix

INT8_MAX = 127
_PANEL = 16  # outputs
_PACKED_AT_ONCE = 1 << 20  # bytes of codes
_KINDS: tuple[Kind, ...] = ("int4", "int8", "e2m1", "e4m3", "nf4")  # from 1 on, in the order of packed.h
_BITS = {kind: 4 if kind in IN_NIBBLES else 8 for kind in _KINDS}  # of a code
_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}


class MatrixStruct(ctypes.Structure):
    """A weight as decoder.cpp and packed.cpp read it. Kind 0: plain bfloat16."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "N", "K", "group", "is_rounded")),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "offsets")),
    ]


def why_not_packed(matrix: PackedMatrix) -> str | None:
    """Return why packed.h cannot compute products of `matrix`; None: it can."""
    rows, columns = matrix.shape
    if rows % _PANEL or columns % _PANEL:
        return f"its shape {[rows, columns]} has a size that is no multiple of {_PANEL}"
    if matrix.group % _PANEL and matrix.group < columns:
        return f"its groups of {matrix.group} columns are no multiples of {_PANEL}"
    if matrix.offsets is not None and matrix.kind not in ("int4", "int8"):
        return "its codes are floats and have offsets"
    return None


class CodeForm(NamedTuple):
    """The kind and the groups of codes: with the shape, all that the seconds of a product depend on."""

    kind: Kind
    group: int  # columns that share a scale
    has_offsets: bool

    @classmethod
    def of(cls, matrix: PackedMatrix) -> "CodeForm":
        return cls(matrix.kind, min(matrix.group, matrix.shape[1]), matrix.offsets is not None)

    @property
    def bytes_per_weight(self) -> float:
        return _BITS[self.kind] / 8 + 4 * (1 + self.has_offsets) / self.group

    def constant(self, rows: int, columns: int) -> PackedMatrix:
        """Return a weight of one small number, for measurements."""
        group = min(self.group, columns)
        scales = torch.full((rows, -(-columns // group)), 0.5 / columns)
        codes = torch.full((rows, columns * _BITS[self.kind] // 8), 1, dtype=torch.uint8).view(DTYPES[self.kind])
        return PackedMatrix(self.kind, codes, scales, scales * 0 if self.has_offsets else None, group)


def num_panel_bytes(matrix: PackedMatrix) -> int:
    """Return the memory of a matrix as `PackedPanels`, with the order of its columns."""
    grids = 1 + (matrix.offsets is not None)
    order = 0 if matrix.columns is None else matrix.columns.nbytes
    return matrix.codes.nbytes + 4 * grids * matrix.shape[0] * matrix.scales.shape[1] + order


@dataclass(frozen=True, slots=True, eq=False)
class PackedPanels:
    """A `PackedMatrix` in the layout of packed.h, or several of them as one weight."""

    form: CodeForm
    codes: Tensor  # [N/16, words of a row, 16, 4] uint8
    scales: Tensor  # [N/16, groups, 16] float32
    offsets: Tensor | None  # as scales
    columns: Tensor | None

    @classmethod
    def of(
        cls,
        *matrices: PackedMatrix,
        every_panel: bool = False,
        memory: HugePages | None = None,
        frees: bool = False,
    ) -> "PackedPanels":
        """Pack the outputs of all matrices as one weight: one after the other, or a panel of each in turn.

        `memory` is for the codes. `frees`: nothing reads the matrices afterwards, and their memory goes back to the
        machine piece by piece, so that it holds them once.

        Raises:
            ValueError: packed.h cannot compute products of a matrix; or the matrices are not of one form, or take their
                columns in unlike orders.
        """
        first = matrices[0]
        for matrix in matrices:
            if reason := why_not_packed(matrix):
                raise ValueError(f"products of a matrix {matrix.kind} cannot be computed packed: {reason}")
            if CodeForm.of(matrix) != CodeForm.of(first) or not _have_one_order(matrix, first):
                raise ValueError("packed weights of one input are of unlike forms")
        counts = [matrix.shape[0] // _PANEL for matrix in matrices]
        shape = (sum(counts), matrices[0].codes[0].nbytes // 4, _PANEL, 4)
        codes = (memory or HugePages()).take(prod(shape), torch.uint8).view(shape)
        in_turn = codes.view(-1, len(counts), *shape[1:]).unbind(1) if every_panel else ()
        places = in_turn or torch.split(codes, counts)
        for matrix, place in zip(matrices, places, strict=True):
            _pack_codes(matrix, place, frees)

        def join(grids: Sequence[Tensor]) -> Tensor:
            panels = [_panels_of(grid, matrix) for grid, matrix in zip(grids, matrices, strict=True)]
            if frees:
                for grid in grids:
                    give_back(grid)
            return torch.stack(panels, 1).flatten(0, 1) if every_panel else torch.cat(panels)

        offsets = [matrix.offsets for matrix in matrices if matrix.offsets is not None]
        scales = join([matrix.scales for matrix in matrices])
        return cls(CodeForm.of(first), codes, scales, join(offsets) if offsets else None, first.columns)

    @property
    def shape(self) -> tuple[int, int]:
        """N and K, of the weight."""
        panels, words, _, _ = self.codes.shape
        return panels * _PANEL, words * 32 // _BITS[self.form.kind]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The memory of the weight, and the order of its columns."""
        return [each for each in (self.codes, self.scales, self.offsets, self.columns) if each is not None]

    def moved(self, memory: HugePages) -> "PackedPanels":
        """Return the weight with its codes in `memory`."""
        codes = memory.take(self.codes.numel(), torch.uint8).view(self.codes.shape).copy_(self.codes)
        return replace(self, codes=codes)

    def struct(self, is_rounded: bool = False) -> MatrixStruct:
        """Return the weight for C++, which points into tensors of `self`. `is_rounded`: rows may be rounded to int8."""
        tensors = (None if each is None else each.data_ptr() for each in (self.codes, self.scales, self.offsets))
        return MatrixStruct(_KINDS.index(self.form.kind) + 1, *self.shape, self.form.group, is_rounded, *tensors)


def _have_one_order(one: PackedMatrix, other: PackedMatrix) -> bool:
    """Return whether two matrices take their columns in the same order."""
    if one.columns is None or other.columns is None:
        return one.columns is other.columns
    return torch.equal(one.columns, other.columns)


def _pack_codes(matrix: PackedMatrix, panels: Tensor, frees: bool) -> None:
    """Write the codes of a matrix to panels [N/16, words of a row, 16, 4]."""
    words = matrix.codes.contiguous().view(torch.uint8)
    step = max(1, _PACKED_AT_ONCE // (_PANEL * words.shape[1]))  # panels: what is made on the way stays small
    for first in range(0, len(panels), step):
        some = taken = words[first * _PANEL : (first + step) * _PANEL]
        if _BITS[matrix.kind] == 4:
            bytes_of_8 = some.view(len(some), words.shape[1] // 4, 2, 2)  # two bytes hold four columns
            halves = (bytes_of_8 & 15, bytes_of_8 >> 4)  # even columns, odd columns
            some = torch.stack([each[..., 0] | each[..., 1] << 4 for each in halves], 2)
        panels[first : first + step] = some.reshape(-1, _PANEL, words.shape[1] // 4, 4).transpose(1, 2)
        if frees:
            give_back(taken)


def _panels_of(grid: Tensor, matrix: PackedMatrix) -> Tensor:
    """Return scales or offsets of a matrix in panels, [N/16, groups, 16] float32."""
    whole = grid.float().repeat_interleave(matrix.block_rows, 0)[: matrix.shape[0]]
    return whole.view(len(whole) // _PANEL, _PANEL, -1).transpose(1, 2).contiguous()


def in_int8(weight: Tensor) -> PackedMatrix:
    """Return a plain weight [N, K] rounded to int8, with a scale for each output."""
    scales = (weight.abs().amax(1).float() / INT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    codes = (weight.float() / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return PackedMatrix("int8", codes, scales, None, weight.shape[1])


class PackedProduct:
    """x [T, K] to [T, N] by packed.cpp. A row's result does not depend on the other rows.

    Rows of bfloat16 on CPUs with AVX512-BF16 are multiplied by the weight in bfloat16, other rows by that in float32.
    Where `is_rounded`, rows of bfloat16 are rounded to int8 beside integer codes on CPUs with AVX512-VNNI, with a scale
    for each group of columns of the weight, at most 64.

    Raises:
        OSError: packed.cpp cannot be compiled.
    """

    def __init__(self, panels: PackedPanels, is_rounded: bool = False) -> None:
        cpu_library("packed")
        self.panels, self.struct, self.tensors = panels, panels.struct(is_rounded), panels.tensors

    def __call__(self, x: Tensor) -> Tensor:
        return product(self.struct, _in_order(x, self.panels))


def product(weight: MatrixStruct, x: Tensor) -> Tensor:
    """Return x [T, K] times a weight that `weight` points to, [T, N], by packed.cpp."""
    x = x.contiguous()
    out = x.new_empty(len(x), weight.N)
    getattr(cpu_library("packed"), f"crossdock_packed_linear_{_SUFFIXES[x.dtype]}")(
        ctypes.byref(weight),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(len(x)),
        ctypes.c_void_p(out.data_ptr()),
        torch.get_num_threads(),
    )
    return out


class DequantisedProduct:
    """x [T, K] to [T, N] by `F.linear`, over a plain weight that packed.cpp writes for the call.

    Raises:
        OSError: packed.cpp cannot be compiled.
    """

    def __init__(self, panels: PackedPanels) -> None:
        self._library, self._panels, self._struct = cpu_library("packed"), panels, panels.struct()
        self.tensors = panels.tensors

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(_in_order(x, self._panels), self.weight(x.dtype))

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the plain weight, [N, K], with the columns in the order of the codes."""
        weight = torch.empty(self._panels.shape, dtype=dtype)
        getattr(self._library, f"crossdock_dequantise_{_SUFFIXES[dtype]}")(
            ctypes.byref(self._struct), ctypes.c_void_p(weight.data_ptr()), torch.get_num_threads()
        )
        return weight


def _in_order(x: Tensor, panels: PackedPanels) -> Tensor:
    return x if panels.columns is None else x[:, panels.columns]
