"""Attention over the blocks of tokens that an indexer chooses for each KV head (MiniMax-M3).

In the pages the indexer's key lies behind the value of each KV head, the same for all: so ranks and transfers divide
both alike. For each KV head a row scores the keys of all tokens that it sees. The score of a block is that of its best
token. The head's queries attend to the `num_blocks` blocks with the highest scores. Among these are always the row's
own block and those just before it, `num_local` in all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.indexed_attention import SplitRows, best_tokens, scored_rows, single_rows

_BLOCK_BYTES = 64 << 20  # of the chosen keys and values that are copied at a time, if those of a row are fewer


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """Holds what the indexer of one layer computed for the rows of one step."""

    keys: Tensor  # [T, Di]
    queries: Tensor  # [T, Hkv, Di]: one for each KV head
    block_size: int  # tokens
    num_blocks: int  # that a row of a KV head attends to
    num_local: int  # of these: the row's own block, and those before it; 1 to num_blocks

    @property
    def top_k(self) -> int:
        """The most tokens that a row attends to."""
        return self.block_size * self.num_blocks

    def behind(self, values: Tensor) -> Tensor:
        """Return the rows [T, Hkv, Dv + Di] that pages hold of values [T, Hkv, Dv]."""
        return torch.cat((values, self.keys[:, None].expand(-1, values.shape[1], -1)), -1)


class ChosenBlocks(NamedTuple):
    """The blocks of some rows, by KV head."""

    blocks: Tensor  # [R, Hkv, num_blocks] int64, ascending: the last of a head's is the row's own; past its count: 0
    counts: Tensor  # [R, Hkv] int32: the tokens in them


def block_attention(
    paged_attention: Callable[..., Tensor],
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: AttentionBatch,
    indexer: BlockIndexer,
    *,
    scale: float,
) -> Tensor:
    """Compute attention of q [T, H, Dk] over the blocks that `indexer` chooses; return [T, H, Dv], contiguous.

    `v_pages` [pages, Hkv, page, Dv + Di] hold values and the indexer's keys. `k_pages` and `paged_attention`: as of
    `reference_paged_attention`. Blocks of whole pages are read in the pages; others are copied.
    """
    value_dim = v_pages.shape[3] - indexer.keys.shape[1]
    values = v_pages[..., :value_dim]
    if batch.max_kv_len <= indexer.top_k:
        return paged_attention(q, k_pages, values, batch, scale=scale)
    split = SplitRows.of(batch, indexer.top_k)
    out = q.new_empty(len(q), q.shape[1], value_dim)
    if split.others is not None:
        others = split.other_rows
        out[others] = paged_attention(q[others], k_pages, values, split.others, scale=scale)
    chosen, sequences = _choose(indexer, v_pages[:, :1, :, value_dim:], batch, split)
    heads = k_pages.shape[1]
    in_pages = None if indexer.block_size % k_pages.shape[2] else _pages_of_one_head(k_pages, values)
    bytes_of_row = heads * indexer.top_k * (k_pages.shape[3] + value_dim) * k_pages.itemsize
    step = max(1, _BLOCK_BYTES // (q[0].nbytes if in_pages is not None else bytes_of_row))
    for first in range(0, len(split.rows), step):
        some = slice(first, first + step)
        rows = split.rows[some]
        table = batch.page_table[sequences[some]].long()
        if in_pages is not None:
            keys, vals = in_pages.keys, in_pages.values
            pages = in_pages.numbers(_pages_of(chosen.blocks[some], table, indexer.block_size // k_pages.shape[2]))
        else:
            slots = _slots_of(chosen.blocks[some], table, indexer.block_size, k_pages.shape[2])
            keys, vals = _copied(k_pages, slots), _copied(values, slots)
            pages = torch.arange(len(keys), dtype=torch.int32, device=q.device)[:, None]
        each = single_rows(pages, chosen.counts[some].flatten(), indexer.top_k)
        of_heads = q[rows].reshape(len(rows) * heads, -1, q.shape[2])
        out[rows] = paged_attention(of_heads, keys, vals, each, scale=scale).view(len(rows), -1, value_dim)
    return out


def _choose(
    indexer: BlockIndexer, pages: Tensor, batch: AttentionBatch, split: SplitRows
) -> tuple[ChosenBlocks, Tensor]:
    """Choose the blocks of the rows of long sequences, and return also the sequence of each row, [R] int64.

    `pages` [pages, 1, page, Di] hold the indexer's keys.
    """
    found = []
    sequences = []
    for scored in scored_rows(split, batch, pages, indexer.queries.shape[1]):
        found.append(best_blocks(indexer, indexer.queries[scored.rows], scored.keys, scored.last))
        sequences.append(torch.full_like(scored.last, scored.sequence))
    blocks, counts = (torch.cat(each) for each in zip(*found, strict=True))
    return ChosenBlocks(blocks, counts), torch.cat(sequences)


def best_blocks(indexer: BlockIndexer, queries: Tensor, keys: Tensor, last: Tensor) -> ChosenBlocks:
    """Return the blocks of rows with `queries` [n, Hkv, Di], which see the tokens [L, Di] of `keys` up to `last` [n].

    Scores are computed in float32. Of equal scores the earlier block is chosen: so a choice does not depend on how a
    prompt was divided into chunks. L is more than `top_k`.
    """
    (n, heads, _) = queries.shape
    size = indexer.block_size
    scores = queries.float() @ keys.T  # [n, Hkv, L]
    token = torch.arange(len(keys), device=keys.device)
    scores.masked_fill_((token > last[:, None])[:, None], float("-inf"))
    scores = F.pad(scores, (0, -len(keys) % size), value=float("-inf")).view(n, heads, -1, size).amax(-1)
    own = last // size
    block = torch.arange(scores.shape[2], device=keys.device)
    is_local = (block <= own[:, None]) & (block > own[:, None] - indexer.num_local)
    scores.masked_fill_(is_local[:, None], float("inf"))
    blocks, counts = best_tokens(scores.flatten(0, 1), own.repeat_interleave(heads), indexer.num_blocks)
    tokens = (counts.view(n, heads) - 1) * size + (last % size + 1)[:, None]
    return ChosenBlocks(blocks.view(n, heads, -1), tokens.int())


def _pages_of(blocks: Tensor, table: Tensor, pages_of_block: int) -> Tensor:
    """Return the pages [n, Hkv, P] of blocks [n, Hkv, B] of rows whose sequences have the pages `table` [n, Q]."""
    within = torch.arange(pages_of_block, device=blocks.device)
    places = (blocks[..., None] * pages_of_block + within).flatten(2).clamp(max=table.shape[1] - 1)
    return table[:, None].expand(-1, blocks.shape[1], -1).gather(2, places)


def _slots_of(blocks: Tensor, table: Tensor, block_size: int, page_size: int) -> Tensor:
    """Return the slots [n, Hkv, L] of the tokens of blocks [n, Hkv, B] of rows whose sequences have pages [n, Q]."""
    within = torch.arange(block_size, device=blocks.device)
    tokens = (blocks[..., None] * block_size + within).flatten(2)
    places = (tokens // page_size).clamp(max=table.shape[1] - 1)
    return table[:, None].expand(-1, blocks.shape[1], -1).gather(2, places) * page_size + tokens % page_size


def _copied(pages: Tensor, slots: Tensor) -> Tensor:
    """Return copies [n * Hkv, 1, L, D] of the tokens in `slots` [n, Hkv, L], a page for each KV head of a row."""
    page_size = pages.shape[2]
    head = torch.arange(slots.shape[1], device=slots.device)[:, None]
    return pages[slots // page_size, head, slots % page_size].flatten(0, 1)[:, None]


class _HeadPages(NamedTuple):
    """Views of pages in which those of each KV head are pages of their own. Views begin at every common divisor of the
    distances, and overlap."""

    keys: Tensor  # [N, 1, page, Dk]
    values: Tensor  # [N, 1, page, Dv]
    page_units: int  # between the numbers of two pages of a head
    head_units: int  # between those of two heads

    def numbers(self, pages: Tensor) -> Tensor:
        """Return the numbers [n * Hkv, P] int32 of `pages` [n, Hkv, P] in the views."""
        head = torch.arange(pages.shape[1], device=pages.device)[:, None]
        return (pages * self.page_units + head * self.head_units).flatten(0, 1).int()


def _pages_of_one_head(k_pages: Tensor, v_pages: Tensor) -> _HeadPages | None:
    """Return views of pages [pages, Hkv, page, D]. None: keys and values have unlike numbers, or these are no int32."""
    units = [gcd(pages.stride(0), pages.stride(1)) for pages in (k_pages, v_pages)]
    both = {(x.stride(0) // unit, x.stride(1) // unit) for x, unit in zip((k_pages, v_pages), units, strict=True)}
    (num_pages, heads, page_size, _) = k_pages.shape
    page_units, head_units = both.pop()
    number = (num_pages - 1) * page_units + (heads - 1) * head_units + 1
    if both or number >= 1 << 31:
        return None
    keys, values = (
        pages.as_strided((number, 1, page_size, pages.shape[3]), (unit, unit, *pages.stride()[2:]))
        for pages, unit in zip((k_pages, v_pages), units, strict=True)
    )
    return _HeadPages(keys, values, page_units, head_units)
