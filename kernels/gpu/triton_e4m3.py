"""Rows rounded to e4m3 with a scale for each row, in one launch: what products with weights of e4m3 take."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Numbers of a row that a program holds at once."""


def rows_in_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [T, K] float8_e4m3fn and the scales [T, 1] float32 of x [T, K]. The largest of a row is 448."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (T, K) = x.shape
    codes, scales = x.new_empty(T, K, dtype=torch.float8_e4m3fn), x.new_empty(T, 1, dtype=torch.float32)
    if T:
        quantise_kernel[(T,)](x, codes, scales, x.stride(0) if T > 1 else K, SIZE=K, BLOCK=BLOCK)
    return codes, scales


@triton.jit
def quantise_kernel(x, codes, scales, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Round one row. Where a number is NaN or infinite, the scale is NaN, and so is all that is computed from them."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        value = tl.load(x + row * row_stride + start + i, mask=start + i < SIZE, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.where(tl.abs(value) < float("inf"), tl.abs(value), float("inf")))
    top = tl.max(most, 0)
    is_finite = top < float("inf")
    scale = tl.where(is_finite, tl.maximum(top / 448.0, 1e-12), 1.0)
    tl.store(scales + row, tl.where(is_finite, scale, float("nan")))
    for start in range(0, SIZE, BLOCK):
        live = start + i < SIZE
        value = tl.load(x + row * row_stride + start + i, mask=live, other=0.0).to(tl.float32)
        tl.store(codes + row * SIZE + start + i, tl.div_rn(value, scale).to(codes.dtype.element_ty), mask=live)
