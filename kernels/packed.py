"""A matrix of weights as small codes and the scales of groups of codes: the one form of all quantised checkpoints.

Plain torch, for every device. Checkpoints are read into this form, ranks cut it, and kernels compute products from it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.kernels.options import CodeKind
from crossdock.kernels.packages import has_package

Kind: TypeAlias = CodeKind

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
TABLES = {"e2m1": (*_E2M1, *(-value for value in _E2M1)), "nf4": _NF4}
"""The values of codes that are no numbers themselves. Of nf4: the levels of bitsandbytes, from QLoRA's appendix E."""
IN_NIBBLES: tuple[Kind, ...] = ("int4", "e2m1", "nf4")  # two codes share a byte
_PANEL_BYTES = {"cpu": 4 << 20}  # of float32, that are dequantised at a time; memory holds several times as many
_PANEL_BYTES_OF_GPUS = 16 << 20
_TORCH_OF_ADA = "2.12"  # the first whose products of e4m3 follow the current stream there (pytorch#177651)
DTYPES = {
    "int4": torch.uint8,
    "e2m1": torch.uint8,
    "nf4": torch.uint8,
    "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A weight [N, K] of products x @ weight.T, where an element is scale * code + offset.

    A scale belongs to `group` columns of `block_rows` rows. The last group and the last block may be smaller.

    Raises:
        ValueError: the tensors are not of these shapes and dtypes.
    """

    kind: Kind
    codes: Tensor
    """int8: [N, K] int8. e4m3: [N, K] float8_e4m3fn. int4, e2m1 and nf4: [N, K/2] uint8, column 2j in the low nibble of
    byte j. A code of int4 is 0 to 15; without offsets its value is the code minus 8."""
    scales: Tensor
    """[ceil(N / block_rows), ceil(K / group)] float32, or bfloat16 where that is exact. Scales that a file has in
    float16 are float32 here, so that no bit is lost."""
    offsets: Tensor | None  # of the shape of scales; for a zero point, minus scale * zero point; None: all are 0
    group: int  # columns that share a scale; K: the whole row
    block_rows: int = 1  # rows that share a scale; N: all
    columns: Tensor | None = None
    """[K] int64: column j of the codes is column `columns[j]` of x (act-order of GPTQ). None: in order."""

    def __post_init__(self) -> None:
        rows, columns = self.shape
        grid = (-(-rows // self.block_rows), -(-columns // self.group))
        for name, found, expected in (
            ("codes", self.codes.dtype, DTYPES[self.kind]),
            ("scales", tuple(self.scales.shape), grid),
            ("offsets", grid if self.offsets is None else tuple(self.offsets.shape), grid),
            ("columns", (columns,) if self.columns is None else tuple(self.columns.shape), (columns,)),
        ):
            if found != expected:
                raise ValueError(f"{name} of a matrix {self.kind} {[rows, columns]}: {found}, expected {expected}")

    @property
    def shape(self) -> tuple[int, int]:
        """N and K, of the weight."""
        rows, columns = self.codes.shape
        return rows, columns * (2 if self.kind in IN_NIBBLES else 1)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Codes, scales, and what else there is."""
        return [each for each in (self.codes, self.scales, self.offsets, self.columns) if each is not None]

    @property
    def nbytes(self) -> int:
        """The memory of all tensors."""
        return sum(each.nbytes for each in self.tensors)

    def dequantise(self, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
        """Return rows of the weight, [n, K]: the reference of every kernel. Columns are in the order of x's.

        The arithmetic is float32, or float64 if `dtype` is; the result is rounded once.
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        values = self._values(self.codes[rows], wide)
        num_groups = self.scales.shape[1]
        is_whole = num_groups * self.group == self.shape[1]  # the last group too
        grouped = values.view(len(values), num_groups, -1) if is_whole else values
        grouped.mul_(self._spread(self.scales, rows, wide, is_whole))
        if self.offsets is not None:
            grouped.add_(self._spread(self.offsets, rows, wide, is_whole))
        if self.columns is not None:
            values = torch.empty_like(values).index_copy_(1, self.columns, values)
        return values.to(dtype)

    def part(self, dim: int, start: int, end: int) -> "PackedMatrix":
        """Return rows (`dim` 0) or columns (`dim` 1) from `start` to `end`, as views of these tensors.

        Raises:
            ValueError: a group or block would be cut, or columns are not in order.
        """
        size = self.shape[dim]
        unit = (self.block_rows, self.group)[dim]
        if (start, end) == (0, size):
            return self
        if dim == 1 and self.columns is not None:
            raise ValueError("columns in an order of their own (act-order) cannot be divided")
        if unit < size and (start % unit or (end % unit and end != size)):
            text = f"{unit} {'rows' if dim == 0 else 'columns'}"
            raise ValueError(f"scales are for {text} each, which {start} to {end} of {size} would cut")
        per_code = 2 if dim == 1 and self.kind in IN_NIBBLES else 1
        if start % per_code or end % per_code:
            raise ValueError(f"two columns share a byte, which {start} to {end} would cut")
        units = (0, 1) if unit >= size else (start // unit, -(-end // unit))
        own_unit = end - start if unit >= size else unit
        return replace(
            self,
            codes=self.codes.narrow(dim, start // per_code, (end - start) // per_code),
            scales=self.scales.narrow(dim, units[0], units[1] - units[0]),
            offsets=None if self.offsets is None else self.offsets.narrow(dim, units[0], units[1] - units[0]),
            group=own_unit if dim == 1 else self.group,
            block_rows=own_unit if dim == 0 else self.block_rows,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "PackedMatrix":
        """Return the matrix with each of its tensors as `change` returns it, for example on another device."""
        offsets, columns = (None if each is None else change(each) for each in (self.offsets, self.columns))
        return replace(self, codes=change(self.codes), scales=change(self.scales), offsets=offsets, columns=columns)

    def _values(self, codes: Tensor, wide: torch.dtype) -> Tensor:
        """Return the values of codes, [n, K]."""
        if self.kind not in IN_NIBBLES:
            return codes.to(wide, copy=True)
        nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        if self.kind == "int4":
            return nibbles.to(wide).sub_(8 if self.offsets is None else 0)
        table = torch.tensor(TABLES[self.kind], dtype=wide, device=codes.device)
        return table[nibbles.int()]

    def _spread(self, grid: Tensor, rows: slice, wide: torch.dtype, is_whole: bool) -> Tensor:
        """Return the entries of `grid` of rows: of each element, [n, K], or if all groups are whole [n, groups, 1]."""
        numbers = torch.arange(self.shape[0], device=grid.device)[rows] // self.block_rows
        chosen = grid[numbers].to(wide)
        return chosen[..., None] if is_whole else chosen.repeat_interleave(self.group, 1)[:, : self.shape[1]]


class ExpertCodes(NamedTuple):
    """The weights [N, K] of E experts as codes: `PackedMatrix` of each, one after the other."""

    kind: Kind
    codes: Tensor  # [E, N, K/2] uint8
    scales: Tensor  # [E, N, K/group]
    offsets: Tensor | None  # as scales
    group: int  # columns that share a scale

    @classmethod
    def of(cls, experts: Sequence[PackedMatrix]) -> "ExpertCodes":
        """Copy the matrices of experts, all of one form, whose rows share no scale and whose columns are in order."""
        tensors = [[each.codes, each.scales, *([] if each.offsets is None else [each.offsets])] for each in experts]
        codes, scales, *offsets = (torch.stack(alike) for alike in zip(*tensors, strict=True))
        return cls(experts[0].kind, codes, scales, offsets[0] if offsets else None, experts[0].group)

    def matrix(self, expert: int) -> PackedMatrix:
        """Return the matrix of one expert, in the same memory."""
        offsets = None if self.offsets is None else self.offsets[expert]
        return PackedMatrix(self.kind, self.codes[expert], self.scales[expert], offsets, self.group)

    def map(self, change: Callable[[Tensor], Tensor]) -> "ExpertCodes":
        """Return the weights with each of their tensors as `change` returns it, as `PackedMatrix.map` does."""
        offsets = None if self.offsets is None else change(self.offsets)
        return self._replace(codes=change(self.codes), scales=change(self.scales), offsets=offsets)


def join_rows(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
    """Return one matrix whose rows are those of all `matrices`, in order.

    Blocks of rows that would no longer lie at multiples of their size become a scale for each row.

    Raises:
        ValueError: the matrices are not of one form.
    """
    first = matrices[0]
    if len(matrices) == 1:
        return first
    forms = {
        (each.kind, each.shape[1], each.group, each.offsets is None, each.scales.dtype, id(each.columns))
        for each in matrices
    }
    if len(forms) > 1:
        raise ValueError("matrices of unlike forms or orders of columns cannot be joined")
    fits = len({each.block_rows for each in matrices}) == 1
    fits = fits and all(each.shape[0] % each.block_rows == 0 for each in matrices[:-1])
    grids: list[Sequence[Tensor | None]] = [(each.scales, each.offsets) for each in matrices]
    if not fits:
        grids = [
            tuple(
                grid if grid is None else grid.repeat_interleave(each.block_rows, 0)[: each.shape[0]] for grid in pair
            )
            for each, pair in zip(matrices, grids, strict=True)
        ]
    offsets = [offset for _, offset in grids if offset is not None]
    return replace(
        first,
        codes=torch.cat([each.codes for each in matrices]),
        scales=torch.cat([scale for scale, _ in grids if scale is not None]),
        offsets=torch.cat(offsets) if offsets else None,
        block_rows=first.block_rows if fits else 1,
    )


def packed_product(x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """Return x [..., K] @ weight.T + bias, [..., N], by products of dequantised panels of rows, or of e4m3 on GPUs."""
    if multiplies_e4m3(matrix, x.dtype, x.device):
        return scaled_product(x, matrix, bias)
    panels = [F.linear(x, matrix.dequantise(x.dtype, rows)) for rows in _panels(matrix)]
    product = panels[0] if len(panels) == 1 else torch.cat(panels, -1)
    return product if bias is None else product + bias


def plain_rows(matrices: Sequence[PackedMatrix], dtype: torch.dtype) -> Tensor:
    """Return one plain weight with the rows of all `matrices`, [N, K]. What is made on the way stays small."""
    weight = matrices[0].codes.new_empty(sum(each.shape[0] for each in matrices), matrices[0].shape[1], dtype=dtype)
    for part, matrix in zip(torch.split(weight, [each.shape[0] for each in matrices]), matrices, strict=True):
        for rows in _panels(matrix):
            part[rows] = matrix.dequantise(dtype, rows)
    return weight


def _panels(matrix: PackedMatrix) -> Iterator[slice]:
    """Yield the rows of a matrix that are dequantised at a time."""
    rows, columns = matrix.shape
    height = max(1, _PANEL_BYTES.get(matrix.codes.device.type, _PANEL_BYTES_OF_GPUS) // (4 * columns))
    yield from (slice(start, start + height) for start in range(0, rows, height))


class RoundedRows(NamedTuple):
    """Rows in e4m3, with a scale for each."""

    codes: Tensor  # [T, K] float8_e4m3fn
    scales: Tensor  # [T, 1] float32

    @classmethod
    def room(cls, matrix: "Tensor | PackedMatrix | None", num_rows: int, device: torch.device) -> "RoundedRows | None":
        """Return memory for the rows of a product with `matrix`, which the kernel before the product fills.

        None: the product takes plain rows, or rounds them itself.
        """
        if not isinstance(matrix, PackedMatrix) or not _has_kernels(device):
            return None
        codes = torch.empty(num_rows, matrix.shape[1], dtype=torch.float8_e4m3fn, device=device)
        return cls(codes, torch.empty(num_rows, 1, dtype=torch.float32, device=device))


def scaled_product(
    x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None, rounded: RoundedRows | None = None
) -> Tensor:
    """Return x @ weight.T + bias by torch's products of e4m3, x [..., K] rounded to e4m3 with a scale for each row.

    Only for weights of e4m3 with a scale for each row or one for all. vLLM computes such checkpoints so, too.
    `rounded`: the rows of x, where another kernel has rounded them already.
    """
    N, K = matrix.shape
    rows = x.reshape(-1, K)
    is_on_gpu = _has_kernels(x.device)
    if rounded is not None:
        codes, scales = rounded
    elif is_on_gpu:
        from crossdock.kernels.gpu.triton_e4m3 import rows_in_e4m3  # Triton is not on every machine

        codes, scales = rows_in_e4m3(rows)
    else:
        scales = (rows.abs().amax(1, keepdim=True).float() / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-12)
        codes = (rows.float() / scales).to(torch.float8_e4m3fn)
    own = matrix.scales.float().expand(N, 1).T.contiguous()
    out = torch._scaled_mm(codes, matrix.codes.T, scales, own, out_dtype=x.dtype, use_fast_accum=is_on_gpu)
    return (out if bias is None else out + bias).view(*x.shape[:-1], N)


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and has_package("triton")


def require_e4m3_products(device: torch.device) -> None:
    """Check that `scaled_product` runs on the current stream of a GPU that `multiplies_e4m3`. ValueError: not there."""
    if torch.cuda.get_device_capability(device) == (8, 9) and torch.__version__ < _TORCH_OF_ADA:
        raise ValueError(
            f"FP8 weights need torch {_TORCH_OF_ADA} or newer on a GPU of compute capability 8.9: torch "
            f"{torch.__version__} launches their products beside the current stream, and CUDA graphs would give wrong "
            f"tokens. Install a newer torch, or serve plain weights"
        )


def multiplies_e4m3(matrix: PackedMatrix, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `scaled_product` takes products on this device: in bfloat16, from compute capability 8.9 on."""
    if matrix.kind != "e4m3" or device.type != "cuda" or dtype is not torch.bfloat16:
        return False
    (N, K) = matrix.shape
    is_plain = matrix.offsets is None and matrix.columns is None
    has_row_scales = matrix.scales.shape in {(1, 1), (N, 1)}
    is_taken = is_plain and has_row_scales and N % 16 == K % 16 == 0
    return is_taken and torch.cuda.get_device_capability(device) >= (8, 9)
