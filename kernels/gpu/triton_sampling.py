"""Draw tokens from whole rows of logits in one pass: temperature, Gumbel noise and the highest score together.

The noise is that of workers/model/sampling/sampler.py, up to the rounding of logarithms.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 8192
BLOCK = 1024
"""Tokens of a row that one program looks at, and those it looks at together."""


def draw_tokens(scores: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Return token ids [N] int64: of each row's highest score / temperature + noise; at temperature 0 without noise.

    `scores`: [N, V] of any float dtype, rows contiguous. `temperatures`: [N, 1] float32. `keys`: [2, N, 1] int32, see
    `row_keys`. Of equal scores the first wins.
    """
    num_rows, vocab_size = scores.shape
    parts = triton.cdiv(vocab_size, PART)
    best = scores.new_empty(num_rows, parts, dtype=torch.float32)
    ids = scores.new_empty(num_rows, parts, dtype=torch.int64)
    if num_rows:
        draw_kernel[(num_rows, parts)](
            scores, temperatures, keys, best, ids, scores.stride(0), num_rows, vocab_size, PART=PART, BLOCK=BLOCK
        )
    return ids.gather(-1, best.argmax(-1, keepdim=True)).squeeze(-1)


@triton.jit(do_not_specialize=["num_rows"])
def draw_kernel(
    scores, temperatures, keys, best, ids, row_stride, num_rows, vocab_size,
    PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    key = tl.load(keys + row).to(tl.uint32, bitcast=True)
    factor = tl.load(keys + num_rows + row).to(tl.uint32, bitcast=True)
    highest = -float("inf")
    winner = part * PART
    for start in range(0, PART, BLOCK):
        token = part * PART + start + tl.arange(0, BLOCK)
        live = token < vocab_size
        score = tl.load(scores + row.to(tl.int64) * row_stride + token, mask=live, other=-float("inf")).to(tl.float32)
        if temperature > 0:
            score = tl.div_rn(score, temperature) - _negative_gumbel(token, key, factor)
        score = tl.where(live, score, -float("inf"))
        top, at = tl.max(score, axis=0, return_indices=True)
        if top > highest:
            highest = top
            winner = part * PART + start + at
    tl.store(best + row * tl.num_programs(1) + part, highest)
    tl.store(ids + row * tl.num_programs(1) + part, winner.to(tl.int64))


@triton.jit
def _negative_gumbel(token, key, factor):
    """Return minus Gumbel noise of the tokens. Near zero the logarithm of a GPU is coarse, so a series stands in."""
    bits = _mixed((_mixed(token.to(tl.uint32)) ^ key) * factor).to(tl.int32, bitcast=True)
    u = tl.abs(bits.to(tl.float32)) * (2.0**-31)
    u = tl.minimum(tl.maximum(u, 2.0**-32), 1 - 2.0**-24)
    series = 1 / 7 + u * (1 / 8)
    series = 1 / 5 + u * (1 / 6 + u * series)
    series = 1 / 3 + u * (1 / 4 + u * series)
    series = u * (1 + u * (1 / 2 + u * series))
    return tl.log(tl.where(u < 0.125, series, -tl.log(1 - u)))


@triton.jit
def _mixed(x):
    """Stir 32 bits as `_mix32` of workers/model/sampling/sampler.py does."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x
