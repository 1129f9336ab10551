"""Products of experts in Triton: each row of a step by the weights of the expert it is routed to, in one launch.

The host never learns how many rows an expert has: the grid has room for any routing, and programs without rows return
at once. So a step with experts can be a CUDA graph on every GPU that Triton compiles for. Sums are float32. Weights may
be codes of four bits, which a program turns into values in its registers, tile by tile.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.packed import ExpertCodes, PackedMatrix

_INPUTS = 64  # of a row that a program multiplies at once
_OUTPUTS = 128  # of a row that one program computes


class Tile(NamedTuple):
    """How many rows of one expert a program computes, and its warps."""

    rows: int
    num_warps: int


FEW = Tile(16, 4)
MANY = Tile(64, 8)
"""The tile for few rows of an expert, the least that tensor cores multiply, and the tile for more."""


def why_not_codes(matrix: PackedMatrix) -> str:
    """Return why a matrix cannot be among the `ExpertCodes` of our products; empty: it can."""
    if matrix.kind not in ("e2m1", "int4"):
        return f"codes are {matrix.kind}, not e2m1 or int4"
    if matrix.block_rows != 1 or matrix.columns is not None:
        return "rows share scales, or columns have an order of their own"
    if matrix.group & (matrix.group - 1) or matrix.group < 2 or matrix.shape[1] % matrix.group:
        return f"groups of {matrix.group} of {matrix.shape[1]} columns are no power of two, or not whole"
    return ""


@dataclass(frozen=True, slots=True)
class Routing:
    """Pairs of a row and an expert, ordered by expert. `k` pairs of each row, S pairs in all."""

    order: Tensor  # [S] int64; pair p is of row p // k
    ends: Tensor  # [E] int32; the pairs of expert e end before place ends[e] of `order`
    k: int
    is_partial: bool = False  # pairs may be of expert E, which is on another rank: their products are left out

    @classmethod
    def of(cls, chosen: Tensor, num_experts: int, *, is_partial: bool = False) -> "Routing":
        """Order the experts [T, k] that the rows of a step are routed to. The host does not wait."""
        experts, order = chosen.flatten().sort(stable=True)
        each = torch.arange(num_experts, dtype=experts.dtype, device=experts.device)
        return cls(order, torch.searchsorted(experts, each, right=True, out_int32=True), chosen.shape[1], is_partial)

    def multiply(
        self, x: Tensor, weight: Tensor | ExpertCodes, bias: Tensor | None = None, scales: Tensor | None = None
    ) -> Tensor:
        """Return the product of each pair with the weight of its expert, [S, N].

        Without `scales`, x [T, K] are the rows, and the products lie in the order of experts. With `scales` [S], of
        each pair, x [S, K] lie in that order, and the products, times their scales, in the order of pairs: 0 for those
        that are left out. weight: [E, N, K], with adjacent N or K, or their codes. bias: [E, N].
        """
        coded, numbers = (weight, weight.codes) if isinstance(weight, ExpertCodes) else (None, weight)
        (E, N, width), S = numbers.shape, len(self.order)
        K = width if coded is None else 2 * width
        dtype = x.dtype if scales is None else torch.promote_types(x.dtype, scales.dtype)
        new = torch.zeros if self.is_partial and scales is not None else torch.empty
        out = new(S, N, dtype=dtype, device=x.device)
        assert x.stride(1) == 1
        assert bias is None or bias.is_contiguous()
        tile = FEW if FEW.rows * E >= S else MANY
        most = (S + min(S, E) * (tile.rows - 1)) // tile.rows  # blocks of rows, however pairs are routed
        _experts_kernel[triton.cdiv(N, _OUTPUTS), most](
            x,
            numbers,
            bias,
            scales,
            out,
            self.order,
            self.ends,
            x.stride(0),
            *numbers.stride(),
            *((None, None) if coded is None else (coded.scales, coded.offsets)),
            GROUP=0 if coded is None else coded.group,
            IS_FLOAT=coded is not None and coded.kind == "e2m1",
            E=E,
            K=K,
            N=N,
            PAIRS=self.k if scales is None else 1,
            BLOCK_E=triton.next_power_of_2(E),
            BLOCK_M=tile.rows,
            BLOCK_N=_OUTPUTS,
            BLOCK_K=_INPUTS,
            num_warps=tile.num_warps,
        )
        return out


@triton.jit
def _experts_kernel(
    x, weight, bias, scales, out, order, ends, x_row, w_expert, w_n, w_k, code_scales, code_offsets,
    GROUP: tl.constexpr, IS_FLOAT: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply a block of pairs of one expert by a block of columns of its weight."""
    block = tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    end = tl.load(ends + e, mask=e < E, other=0)
    begin = tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0)
    num_blocks = (end - begin + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(num_blocks, 0)
    if block >= tl.sum(num_blocks, 0):
        return
    expert = tl.sum((after <= block).to(tl.int32), 0)  # the first whose blocks end after this one
    own = block - tl.sum(tl.where(e < expert, num_blocks, 0), 0)
    first = tl.sum(tl.where(e == expert, begin, 0), 0)
    place = first + own * BLOCK_M + tl.arange(0, BLOCK_M)
    live = place < tl.sum(tl.where(e == expert, end, 0), 0)
    pair = tl.load(order + place, mask=live, other=0)
    row = pair // PAIRS if scales is None else place.to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    left = x + row[:, None] * x_row
    own_weight = weight + expert.to(tl.int64) * w_expert
    own_row = expert * N + n  # among the rows of all experts
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        column = start + k
        a = tl.load(left + column[None, :], mask=live[:, None] & (column < K)[None, :], other=0.0)
        if GROUP:
            byte = start // 2 + tl.arange(0, BLOCK_K // 2)
            mask = (n < N)[:, None] & (byte < K // 2)[None, :]
            codes = tl.load(own_weight + n[:, None] * w_n + byte[None, :], mask=mask, other=0)
            values = _values_of(codes, code_offsets is not None, IS_FLOAT)
            values = _scaled(values, code_scales, code_offsets, own_row, n < N, start, GROUP, K, BLOCK_N, BLOCK_K)
            b = tl.trans(values.to(x.dtype.element_ty))
        else:
            right = own_weight + n[None, :] * w_n + column[:, None] * w_k
            b = tl.load(right, mask=(column < K)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    to = place.to(tl.int64)
    if scales is not None:
        scale = tl.load(scales + pair, mask=live, other=0.0).to(tl.float32)
        total = total.to(x.dtype.element_ty).to(tl.float32) * scale[:, None]
        to = pair
    at = out + to[:, None] * N + n[None, :]
    mask = live[:, None] & (n < N)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _values_of(codes, HAS_OFFSETS: tl.constexpr, IS_FLOAT: tl.constexpr):
    """Return the values of codes, [n, 2k] float32 of k bytes: the low nibble is the first. As `PackedMatrix` says."""
    code = tl.interleave(codes & 15, codes >> 4).to(tl.int32)
    if not IS_FLOAT:
        return (code if HAS_OFFSETS else code - 8).to(tl.float32)
    exponent = (code >> 1) & 3
    fraction = code & 1
    twice = tl.where(exponent == 0, fraction, (2 + fraction) << (tl.maximum(exponent, 1) - 1))
    return tl.where(code >= 8, -twice, twice).to(tl.float32) * 0.5


@triton.jit
def _scaled(
    values, scales, offsets, row, is_row, start, GROUP: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply values [BLOCK_N, BLOCK_K] of columns from `start` on by the scales of their groups, and add offsets."""
    SPAN: tl.constexpr = min(GROUP, BLOCK_K)  # of the columns, those that share a scale
    group = start // GROUP + tl.arange(0, BLOCK_K // SPAN)
    at = row[:, None].to(tl.int64) * (K // GROUP) + group[None, :]
    mask = is_row[:, None] & (group < K // GROUP)[None, :]
    grouped = tl.reshape(values, [BLOCK_N, BLOCK_K // SPAN, SPAN])
    grouped *= tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)[:, :, None]
    if offsets is not None:
        grouped += tl.load(offsets + at, mask=mask, other=0.0).to(tl.float32)[:, :, None]
    return tl.reshape(grouped, [BLOCK_N, BLOCK_K])
