"""Sums over one row in Triton, added in one order whatever rows are beside it: products with weights, log-softmax.

The order follows from the weight and the dtype alone: the same tiles for any number of rows, and no split of a sum
among programs. A row's bits must not depend on its place in a tile either. So it is in tensor cores as far as is known;
a start checks that on its GPU, see workers/model/layers/fixed_order.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # rows, and outputs, that one program computes: what one wgmma of Hopper has of rows
_BLOCK = 2048  # of one row that a program of `log_softmax` holds


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., K] @ weight.T + bias, [..., N], added in float32 and rounded once. weight: [N, K], contiguous."""
    (N, K), rows = weight.shape, x.reshape(-1, x.shape[-1]).contiguous()
    assert weight.is_contiguous()
    out = rows.new_empty(len(rows), N)
    if len(rows):
        product_kernel[triton.cdiv(len(rows), TILE), triton.cdiv(N, TILE)](
            rows, weight, bias, out, len(rows), N=N, K=K, **inputs_at_once(x.itemsize), TILE=TILE
        )
    return out.view(*x.shape[:-1], N)


def inputs_at_once(itemsize: int) -> dict[str, int]:
    """Return how much of K a program of `product` multiplies at once. Elements of float32 take twice the memory."""
    return {"INPUTS": 32 if itemsize == 4 else 64}


def log_softmax(scores: Tensor) -> Tensor:
    """Return the log-softmax of each row of scores [N, V], as float32."""
    out = torch.empty(scores.shape, dtype=torch.float32, device=scores.device)
    if len(scores):
        log_softmax_kernel[(len(scores),)](scores.contiguous(), out, V=scores.shape[1], BLOCK=_BLOCK)
    return out


@triton.jit(do_not_specialize=["M"])
def product_kernel(x, weight, bias, out, M, N: tl.constexpr, K: tl.constexpr, INPUTS: tl.constexpr, TILE: tl.constexpr):
    """Compute a tile of rows and outputs. Programs that read the same weights start side by side."""
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    k = tl.arange(0, INPUTS)[None, :]
    total = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, K, INPUTS):
        live = start + k < K
        left = tl.load(x + row * K + start + k, mask=(row < M) & live, other=0.0)
        right = tl.load(weight + column * K + start + k, mask=(column < N) & live, other=0.0)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    column = tl.trans(column)
    if bias is not None:
        total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + column, total.to(out.dtype.element_ty), mask=(row < M) & (column < N))


@triton.jit
def log_softmax_kernel(scores, out, V: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one row."""
    at = tl.program_id(0).to(tl.int64) * V
    i = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, V, BLOCK):
        token = start + i
        top = tl.maximum(top, tl.load(scores + at + token, mask=token < V, other=-float("inf")).to(tl.float32))
    highest = tl.max(top, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        token = start + i
        score = tl.load(scores + at + token, mask=token < V, other=-float("inf")).to(tl.float32)
        total += tl.exp(score - highest)
    log_sum = tl.log(tl.sum(total, 0))
    for start in range(0, V, BLOCK):
        token = start + i
        score = tl.load(scores + at + token, mask=token < V, other=0.0).to(tl.float32)
        tl.store(out + at + token, score - highest - log_sum, mask=token < V)
