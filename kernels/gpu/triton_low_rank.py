"""Low-rank matrices of many adapters in Triton: two launches add what all of them change in the outputs of a linear.

The first multiplies inputs by each adapter's A, the second the results by its B. Sums are float32.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

_ROWS = 16  # of one adapter that a program holds: the least that tensor cores multiply
_INPUTS = 64  # of a row at once
_SHARE = 1024  # inputs of a row that one program multiplies; the second launch adds the shares
_ALIGNMENT = 16  # bytes: Triton compiles a kernel again for pointers that are less aligned
_OUTPUTS = 128  # of a row that one program computes


class LowRankRows:
    """The rows of a batch that each adapter changes, and where its matrices lie, on the device of the batch."""

    def __init__(self, tables: Tensor, rows: Sequence[NDArray[np.int64]], device: torch.device) -> None:
        """Args:
        tables: [adapters, linears, 3] int64, on the CPU. In each row the addresses of A [rank, K] and of the transpose
            of B [rank, N], both contiguous and of the batch's dtype, and their rank; 0: the adapter has none there.
        rows: numbers of the rows of each adapter; no row has two.
        """
        num_blocks = [-(-len(own) // _ROWS) for own in rows]
        padded = np.full((sum(num_blocks), _ROWS), -1, np.int32)
        for start, own in zip(np.cumsum([0, *num_blocks[:-1]]), rows, strict=True):
            padded[start:].reshape(-1)[: len(own)] = own
        owners = np.repeat(np.arange(len(rows), dtype=np.int32), num_blocks)
        self._num_linears = tables.shape[1]
        self._tables, self._rows, self._owners = _copied(device, tables.numpy(), padded, owners)
        self._width = max(16, triton.next_power_of_2(int(tables[..., 2].max())))

    def add(self, linear: int, x: Tensor, y: Tensor) -> None:
        """Add what adapters change in the outputs of a linear, in place. x: [T, K]; y: [T, N], columns adjacent."""
        (_, K), y = x.shape, y.view(len(y), -1)
        assert x.stride(1) == y.stride(1) == 1
        num_blocks = len(self._rows)
        num_shares = triton.cdiv(K, _SHARE)
        inner = torch.empty(num_shares, num_blocks, _ROWS, self._width, dtype=torch.float32, device=x.device)
        where = self._rows, self._owners, self._tables, linear, self._num_linears
        sizes = {"BLOCK_T": _ROWS, "BLOCK_R": self._width}
        shrink = {"SHARE": _SHARE, "BLOCK_K": _INPUTS}
        _shrink_kernel[(num_blocks, num_shares)](x, inner, *where, K, x.stride(0), **sizes, **shrink)
        grid = num_blocks, triton.cdiv(y.shape[1], _OUTPUTS)
        _expand_kernel[grid](y, inner, *where, num_shares, y.shape[1], y.stride(0), **sizes, BLOCK_N=_OUTPUTS)


def _copied(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Return arrays as tensors on a device, all in one copy that the host does not wait for. The widest come first."""
    ends = list(accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays))
    staged = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    starts = [0, *ends[:-1]]
    for start, array in zip(starts, arrays, strict=True):
        staged.numpy()[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    on_device = staged.to(device, non_blocking=True)
    return [
        on_device[start : start + array.nbytes].view(getattr(torch, array.dtype.name)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


@triton.jit(do_not_specialize=["linear"])
def _shrink_kernel(
    x, inner, rows, owners, tables, linear, num_linears, K, x_row,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, SHARE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply a share of the inputs of a block of rows by the A of their adapter."""
    block = tl.program_id(0)
    share = tl.program_id(1)
    entry = tables + (tl.load(owners + block) * num_linears + linear) * 3
    a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(x.dtype.element_ty)), 16)
    rank = tl.load(entry + 2)
    t = tl.arange(0, BLOCK_T)
    r = tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    row = tl.load(rows + block * BLOCK_T + t).to(tl.int64)
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for start in range(share * SHARE, tl.minimum(share * SHARE + SHARE, K), BLOCK_K):
        column = start + k
        left = tl.load(
            x + row[:, None] * x_row + column[None, :], mask=(row >= 0)[:, None] & (column < K)[None, :], other=0.0
        )
        right = tl.load(
            a + r[None, :] * K + column[:, None], mask=(r < rank)[None, :] & (column < K)[:, None], other=0.0
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    place = (share * tl.num_programs(0) + block) * BLOCK_T
    tl.store(inner + (place + t)[:, None] * BLOCK_R + r[None, :], total)


@triton.jit(do_not_specialize=["linear", "num_shares"])
def _expand_kernel(
    y, inner, rows, owners, tables, linear, num_linears, num_shares, N, y_row,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the shares of a block of rows, multiply by the B of their adapter, and add to the outputs."""
    block = tl.program_id(0)
    entry = tables + (tl.load(owners + block) * num_linears + linear) * 3
    b = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(y.dtype.element_ty)), 16)
    rank = tl.load(entry + 2)
    t = tl.arange(0, BLOCK_T)
    r = tl.arange(0, BLOCK_R)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(rows + block * BLOCK_T + t).to(tl.int64)
    total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for share in range(num_shares):
        place = (share * tl.num_programs(0) + block) * BLOCK_T
        total += tl.load(inner + (place + t)[:, None] * BLOCK_R + r[None, :])
    right = tl.load(b + r[:, None] * N + n[None, :], mask=(r < rank)[:, None] & (n < N)[None, :], other=0.0)
    delta = tl.dot(total.to(y.dtype.element_ty), right, input_precision="ieee")
    at = y + row[:, None] * y_row + n[None, :]
    live = (row >= 0)[:, None] & (n < N)[None, :] & (rank > 0)
    tl.store(at, (tl.load(at, mask=live, other=0.0).to(tl.float32) + delta).to(y.dtype.element_ty), mask=live)
