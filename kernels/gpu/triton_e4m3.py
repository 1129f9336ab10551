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
        most = tl.maximum(most, finite_size(value))
    scale = stored_scale(tl.max(most, 0), scales + row)
    for start in range(0, SIZE, BLOCK):
        live = start + i < SIZE
        value = tl.load(x + row * row_stride + start + i, mask=live, other=0.0).to(tl.float32)
        tl.store(codes + row * SIZE + start + i, tl.div_rn(value, scale).to(codes.dtype.element_ty), mask=live)


@triton.jit
def store_row(value, codes, scale, at, live):
    """Round a whole row `value` float32, all elements of which this program holds, and store codes and scale."""
    divisor = stored_scale(tl.max(finite_size(value), 0), scale)
    tl.store(codes + at, tl.div_rn(value, divisor).to(codes.dtype.element_ty), mask=live)


@triton.jit
def finite_size(value):
    """Return how large each number is; NaN counts as infinite."""
    return tl.where(tl.abs(value) < float("inf"), tl.abs(value), float("inf"))


@triton.jit
def stored_scale(top, scale):
    """Store the scale of a row whose largest number is `top`, NaN if that is infinite. Returns what to divide by."""
    is_finite = top < float("inf")
    divisor = tl.where(is_finite, tl.maximum(top / 448.0, 1e-12), 1.0)
    tl.store(scale, tl.where(is_finite, divisor, float("nan")))
    return divisor
