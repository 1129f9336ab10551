"""Set the scores of tokens that rows must not use to -inf, by masks of one bit for each token: one launch a step."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Tokens of a row that one program looks at."""


def mask_rows(scores: Tensor, table: Tensor) -> None:
    """Mask rows of scores [N, V] float32, rows contiguous, in place.

    `table` [M, 1 + ceil(V/32)] int32: of each masked row its number, then the bits of the tokens that it may use, the
    lowest bit of a word first.
    """
    vocab_size = scores.shape[-1]
    assert scores.stride(-1) == 1
    assert table.is_contiguous()
    assert table.shape[1] == 1 + triton.cdiv(vocab_size, 32)
    grid = len(table), triton.cdiv(vocab_size, BLOCK)
    mask_kernel[grid](scores, table, scores.stride(0), table.shape[1], vocab_size, BLOCK=BLOCK)


@triton.jit
def mask_kernel(scores, table, row_stride, table_stride, vocab_size, BLOCK: tl.constexpr):
    """Mask a block of one row."""
    mask = table + tl.program_id(0).to(tl.int64) * table_stride
    row = tl.load(mask).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab_size
    word = tl.load(mask + 1 + token // 32, mask=live, other=0)
    is_allowed = (word >> (token % 32)) & 1
    tl.store(scores + row * row_stride + token, -float("inf"), mask=live & (is_allowed == 0))
