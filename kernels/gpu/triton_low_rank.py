"""Low-rank matrices of many adapters in Triton: two launches add what all of them change in the outputs of a linear,
or of all linears of one input.

The first multiplies inputs by each adapter's A, the second the results by its B. Sums are float32.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

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
_JOINED = 3  # linears of one input that are computed together, as queries, keys and values
_DTYPES = torch.int64, torch.int32, torch.int32  # of tables, rows and owners


class LowRankRows:
    """The rows of a batch that each adapter changes, and where its matrices lie, on the device of the batch.

    A program has up to 16 rows of one adapter, a block. A recorded step has programs for the most blocks that its rows
    may have; those without a block, and blocks whose adapter has no matrices for a linear, do nothing.
    """

    def __init__(self, data: Tensor, sizes: "_Sizes", width: int) -> None:
        """Args:
        data: the bytes that `_staged` lays out, on the device.
        width: the largest rank of the adapters, as a power of two.
        """
        self._data = data
        self._sizes = sizes
        self._width = width
        self._tables, self._rows, self._owners = sizes.parts_of(data)

    @classmethod
    def of(cls, tables: Tensor, rows: Sequence[NDArray[np.int64]], device: torch.device) -> "LowRankRows":
        """Copy the rows of one step to `device`, in one copy that the host does not wait for.

        tables: [adapters, linears, 3] int64, on the CPU. In each row the addresses of A [rank, K] and of the transpose
            of B [rank, N], both contiguous and of the batch's dtype, and their rank; 0: the adapter has none there.
        rows: numbers of the rows of each adapter; no row has two.
        """
        sizes = _Sizes(tables.shape[0], tables.shape[1], sum(-(-len(own) // _ROWS) for own in rows))
        data = _staged(sizes, tables, rows, device).to(device, non_blocking=True)
        return cls(data, sizes, _width_of(int(tables[..., 2].max())))

    @classmethod
    def room(cls, adapters: int, linears: int, rows: int, max_rank: int, device: torch.device) -> "LowRankRows":
        """Return room for steps of up to `rows` rows with up to so many adapters. No row has an adapter yet."""
        sizes = _Sizes(adapters, linears, most_blocks(rows, adapters))
        return cls(torch.full((sizes.ends[-1],), 0xFF, dtype=torch.uint8, device=device), sizes, _width_of(max_rank))

    def enter(self, tables: Tensor, rows: Sequence[NDArray[np.int64]]) -> None:
        """Copy a step to this room, where recorded steps read it; see `of`. The host does not wait."""
        self._data.copy_(_staged(self._sizes, tables, rows, self._data.device), non_blocking=True)

    def first(self, rows: int) -> "LowRankRows":
        """Return this room with programs for steps of up to `rows` rows alone."""
        fewer = LowRankRows(self._data, self._sizes, self._width)
        blocks = most_blocks(rows, self._sizes.adapters)
        fewer._rows, fewer._owners = self._rows[:blocks], self._owners[:blocks]
        return fewer

    def add(self, linear: int, x: Tensor, y: Tensor, sizes: Sequence[int] = ()) -> None:
        """Add what adapters change in the outputs of a linear, in place. x: [T, K]; y: [T, N], columns adjacent.

        `sizes`: the outputs of up to three linears of one input, side by side in y. `linear` is the first of these, and
        the others follow it in the tables: two launches for all of them.
        """
        (_, K), y = x.shape, y.view(len(y), -1)
        assert x.stride(1) == y.stride(1) == 1
        outputs = [*(sizes or [y.shape[1]])]
        assert len(outputs) <= _JOINED
        assert sum(outputs) == y.shape[1]
        num_blocks = len(self._rows)
        num_shares = triton.cdiv(K, _SHARE)
        of_inner = len(outputs), num_shares, num_blocks, _ROWS, self._width
        inner = torch.empty(of_inner, dtype=torch.float32, device=x.device)
        where = self._rows, self._owners, self._tables, linear, self._sizes.linears
        tile = {"BLOCK_T": _ROWS, "BLOCK_R": self._width}
        shrink = {"SHARE": _SHARE, "BLOCK_K": _INPUTS}
        _shrink_kernel[(num_blocks, num_shares, len(outputs))](x, inner, *where, K, x.stride(0), **tile, **shrink)
        grid = num_blocks, sum(triton.cdiv(size, _OUTPUTS) for size in outputs)
        outputs += [0] * (_JOINED - len(outputs))
        _expand_kernel[grid](y, inner, *where, num_shares, *outputs, y.stride(0), **tile, BLOCK_N=_OUTPUTS)


def most_blocks(rows: int, adapters: int) -> int:
    """Return how many blocks any rows among `rows`, of up to so many adapters, have at most: at least one."""
    adapters = min(adapters, rows)
    return max(1, adapters + (rows - adapters) // _ROWS)


class _Sizes(NamedTuple):
    """How many adapters and linears tables have, and the blocks of rows."""

    adapters: int
    linears: int
    blocks: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [(self.adapters, self.linears, 3), (self.blocks, _ROWS), (self.blocks,)]

    @property
    def ends(self) -> list[int]:
        """The bytes after tables, rows and owners, each of which begins aligned."""
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, _DTYPES, strict=True)]
        return list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))

    def parts_of(self, data: Tensor) -> list[Tensor]:
        """Return tables, rows and owners as views of their bytes."""
        starts = [0, *self.ends[:-1]]
        return [
            data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, shape, dtype in zip(starts, self.shapes, _DTYPES, strict=True)
        ]


def _staged(sizes: _Sizes, tables: Tensor, rows: Sequence[NDArray[np.int64]], device: torch.device) -> Tensor:
    """Lay out a step for one copy to `device`. Blocks without rows have owner -1."""
    staged = torch.empty(sizes.ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    own_tables, own_rows, owners = (part.numpy() for part in sizes.parts_of(staged))
    own_tables[: len(tables)] = tables.numpy()
    own_rows.fill(-1)
    owners.fill(-1)
    start = 0
    for number, own in enumerate(rows):
        end = start + -(-len(own) // _ROWS)
        own_rows[start:end].reshape(-1)[: len(own)] = own
        owners[start:end] = number
        start = end
    return staged


def _width_of(rank: int) -> int:
    """Return the columns of A's products: tensor cores multiply at least 16."""
    return max(16, int(triton.next_power_of_2(rank)))


@triton.jit(do_not_specialize=["linear"])
def _shrink_kernel(
    x, inner, rows, owners, tables, linear, num_linears, K, x_row,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, SHARE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply a share of the inputs of a block of rows by the A of their adapter.

    `inner`: [linears of one input, shares, blocks, BLOCK_T, BLOCK_R] float32.
    """
    block = tl.program_id(0)
    share = tl.program_id(1)
    number = tl.program_id(2)  # of the linear among those of one input
    owner = tl.load(owners + block)
    entry = tables + (tl.maximum(owner, 0) * num_linears + linear + number) * 3
    rank = tl.load(entry + 2)
    if (owner >= 0) & (rank > 0):
        a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(x.dtype.element_ty)), 16)
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
        place = ((number * tl.num_programs(1) + share) * tl.num_programs(0) + block) * BLOCK_T
        tl.store(inner + (place + t)[:, None] * BLOCK_R + r[None, :], total)


@triton.jit(do_not_specialize=["linear", "num_shares"])
def _expand_kernel(
    y, inner, rows, owners, tables, linear, num_linears, num_shares, N0, N1, N2, y_row,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the shares of a block of rows, multiply by the B of their adapter, and add to the outputs.

    The outputs of the linears of one input are side by side in a row of y: N0, N1 and N2 of them.
    """
    block = tl.program_id(0)
    column = tl.program_id(1)  # a block of outputs of one linear
    first = tl.cdiv(N0, BLOCK_N)
    second = first + tl.cdiv(N1, BLOCK_N)
    number = (column >= first).to(tl.int32) + (column >= second).to(tl.int32)
    N = tl.where(number == 0, N0, tl.where(number == 1, N1, N2))
    start = tl.where(number == 0, 0, tl.where(number == 1, N0, N0 + N1))
    column -= tl.where(number == 0, 0, tl.where(number == 1, first, second))
    owner = tl.load(owners + block)
    entry = tables + (tl.maximum(owner, 0) * num_linears + linear + number) * 3
    rank = tl.load(entry + 2)
    if (owner >= 0) & (rank > 0):
        b = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(y.dtype.element_ty)), 16)
        t = tl.arange(0, BLOCK_T)
        r = tl.arange(0, BLOCK_R)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        row = tl.load(rows + block * BLOCK_T + t).to(tl.int64)
        total = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for share in range(num_shares):
            place = ((number * num_shares + share) * tl.num_programs(0) + block) * BLOCK_T
            total += tl.load(inner + (place + t)[:, None] * BLOCK_R + r[None, :])
        right = tl.load(b + r[:, None] * N + n[None, :], mask=(r < rank)[:, None] & (n < N)[None, :], other=0.0)
        delta = tl.dot(total.to(y.dtype.element_ty), right, input_precision="ieee")
        at = y + row[:, None] * y_row + start + n[None, :]
        live = (row >= 0)[:, None] & (n < N)[None, :]
        tl.store(at, (tl.load(at, mask=live, other=0.0).to(tl.float32) + delta).to(y.dtype.element_ty), mask=live)
