"""Products with packed weights by humming-kernels, which widens codes in registers of NVIDIA GPUs.

Written after humming-kernels 0.1.19: `HummingLayer` with its own format of weights. No GPU has run it here.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from crossdock.kernels.packed import IN_NIBBLES, Kind, PackedMatrix

_DTYPES: dict[Kind, str] = {"int4": "uint4", "int8": "uint8", "e2m1": "float4e2m1", "e4m3": "float8e4m3"}
_GROUPS = (16, 32, 64, 128, 256)  # columns; the kernels ask for 16 or more
_MULTIPLE = 64  # of rows and columns: both are divided into such tiles
_LEAST_BLOCK = 64  # rows that share a scale, where these are blocks


def why_not_humming(matrix: PackedMatrix, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why humming-kernels does not compute products of a matrix with rows of `dtype`; None: it does."""
    rows, columns = matrix.shape
    if device.type != "cuda" or find_spec("humming") is None:
        return "humming-kernels is not installed, or there is no GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return "rows are neither bfloat16 nor float16"
    if torch.cuda.get_device_capability(device) < ((8, 0) if dtype is torch.bfloat16 else (7, 5)):
        return "the GPU is older than compute capability 8.0, or 7.5 in float16"
    if matrix.kind not in _DTYPES:
        return f"it has no codes of {matrix.kind}"
    if rows % _MULTIPLE or columns % _MULTIPLE:
        return f"its shape {[rows, columns]} has a size that is no multiple of {_MULTIPLE}"
    if matrix.group < columns and (matrix.group not in _GROUPS or columns % matrix.group):
        return f"groups of {matrix.group} columns"
    if matrix.offsets is not None and _zero_points(matrix) is None:
        return "its offsets are no whole zero points"
    return None


def humming_weight(matrix: PackedMatrix, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the tensors of a weight in the library's own format.

    An element is scale * (code - zero point). Codes are unsigned, the first column in the lowest bits of an int32. Of
    integers without zero points it is half of their range. Scales of blocks of rows are float32, others are rounded to
    `dtype`.
    """
    rows, columns = matrix.shape
    is_block = matrix.block_rows >= _LEAST_BLOCK and rows % matrix.block_rows == 0 and matrix.group < columns
    config: dict[str, Any] = {"quant_method": "humming", "dtype": _DTYPES[matrix.kind]}
    config["group_size"] = matrix.group if matrix.group < columns else 0
    codes = matrix.codes.contiguous().view(torch.uint8)
    tensors = {"weight": (codes ^ 0x80 if matrix.kind == "int8" else codes).view(torch.int32)}
    if is_block:
        config["group_size_n"] = matrix.block_rows
        tensors["weight_scale"] = matrix.scales.float()
    else:
        tensors["weight_scale"] = _of_rows(matrix.scales, matrix).to(dtype)
    if matrix.offsets is not None and (zeros := _zero_points(matrix)) is not None:
        config["has_zero_point"] = True
        tensors["zero_point"] = _packed_rows(zeros, 4 if matrix.kind in IN_NIBBLES else 8)
    return config, tensors


class HummingProduct:
    """x [T, K] to [T, N] in the dtype of x, over a weight in the layout of humming's kernels."""

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype) -> None:
        from humming.layer import HummingLayer

        rows, columns = matrix.shape
        config, tensors = humming_weight(matrix, dtype)
        self._columns = matrix.columns
        with torch.cuda.device(matrix.codes.device):
            layer = HummingLayer(shape_n=rows, shape_k=columns, weight_config=config, torch_dtype=dtype)
            self._layer = layer.to(matrix.codes.device)
            self._layer.load_from_tensors(tensors)
            self._layer.transform()

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The memory of the weight, and the order of its columns."""
        order = [] if self._columns is None else [self._columns]
        return [*self._layer.parameters(), *self._layer.buffers(), *order]

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):  # an expert without rows
            return x.new_empty(0, self._layer.shape_n)
        out: Tensor = self._layer((x if self._columns is None else x[:, self._columns]).contiguous())
        return out


def _of_rows(grid: Tensor, matrix: PackedMatrix) -> Tensor:
    """Return the entries of a grid of scales for each row, [N, groups]."""
    return grid.repeat_interleave(matrix.block_rows, 0)[: matrix.shape[0]].contiguous()


def _zero_points(matrix: PackedMatrix) -> Tensor | None:
    """Return the zero points of unsigned codes, [N, groups] uint8; None: some are no codes, or codes are floats."""
    if matrix.offsets is None or matrix.kind not in ("int4", "int8"):
        return None
    scales, offsets = (_of_rows(each.float(), matrix) for each in (matrix.scales, matrix.offsets))
    zeros = torch.where(scales == 0, 0.0, -offsets / scales) + (128 if matrix.kind == "int8" else 0)
    whole = zeros.round()
    fits = (whole >= 0) & (whole < (16 if matrix.kind == "int4" else 256)) & ((zeros - whole).abs() < 1e-2)
    fits &= (scales != 0) | (offsets == 0)
    return whole.to(torch.uint8) if bool(fits.all()) else None


def _packed_rows(codes: Tensor, bits: int) -> Tensor:
    """Return codes [N, G] as [N * bits / 32, G] int32, in which neighbouring rows share a word."""
    words = codes.T.contiguous()
    if bits == 4:
        words = words[:, ::2] | words[:, 1::2] << 4
    return words.contiguous().view(torch.int32).T.contiguous()
