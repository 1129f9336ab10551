"""Attention over the tokens that an indexer chooses (DeepSeek Sparse Attention), from pages of latents.

A page holds one more row for each token: the indexer's key, which the heads of all queries of the indexer share. A row
scores the keys of all tokens that it sees. Then it attends to the `top_k` tokens with the highest scores, or to all
where it sees no more than these. Attention over these few latents costs the same at every length of the context.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch, library_for
from crossdock.kernels.latent_attention import UpProjections, latent_attention

_SCORED_BYTES = 64 << 20  # of the scores of all heads of an indexer that exist at a time, if those of a row are fewer
_BLOCK_BYTES = 64 << 20  # of the queries of some rows, or of their chosen latents, if those of a row are fewer


@dataclass(slots=True)
class ChosenTokens:
    """The tokens to which the rows of one step attend, where their sequences are longer than `top_k`."""

    rows: Tensor  # [R] int64, of the flat batch; their sequences are longer than top_k
    slots: Tensor  # [R, top_k] int32: page * page_size + offset, in the order of tokens; entries past `counts`: 0
    counts: Tensor  # [R] int32
    other_rows: Tensor  # [T - R] int64: of sequences that attend to all tokens
    others: AttentionBatch | None  # these sequences; None: there are none


@dataclass(slots=True)
class Indexer:
    """Holds what the indexer of one layer computed for the rows of one step, and the tokens that it chose by that."""

    layer: int
    keys: Tensor  # [T, Di]
    queries: Tensor  # [T, Hi, Di]
    weights: Tensor  # [T, Hi] float32: of each head's score
    top_k: int
    chosen: ChosenTokens | None = field(default=None)  # layers that share the indexer's choice read this


def indexed_attention(
    paged_attention: Callable[..., Tensor],
    q: Tensor,
    pages: Tensor,
    index_pages: Tensor,
    batch: AttentionBatch,
    up: UpProjections,
    indexer: Indexer,
    *,
    scale: float,
) -> Tensor:
    """Compute attention of q [T, H, Dn + Dr] over the latents that `indexer` chooses; return [T, H, Dv], contiguous.

    `pages` and `paged_attention`: as of `latent_attention`. `index_pages` [pages, 1, page, Di] hold the indexer's keys;
    pages of a layer that shares an earlier layer's choice have none, Di = 0.
    """
    if batch.max_kv_len <= indexer.top_k:
        return latent_attention(paged_attention, q, pages, batch, up, scale=scale)
    if indexer.chosen is None:
        indexer.chosen = choose_tokens(indexer, index_pages, batch)
    chosen = indexer.chosen
    out = q.new_empty(len(q), len(up.weight), up.value_dim)
    if chosen.others is not None:
        others = chosen.other_rows
        out[others] = latent_attention(paged_attention, q[others], pages, chosen.others, up, scale=scale)
    tokens = _pages_of_one_token(pages)
    is_copied = tokens is None or library_for(q, None, tokens, tokens) is None
    width = indexer.top_k if is_copied else q.shape[1]
    step = max(1, _BLOCK_BYTES // (width * pages.shape[3] * pages.itemsize))
    for first in range(0, len(chosen.rows), step):
        rows = chosen.rows[first : first + step]
        slots = chosen.slots[first : first + step]
        seen, table = _copied(pages, slots) if tokens is None or is_copied else (tokens, _numbers(pages, slots))
        each = single_rows(table, chosen.counts[first : first + step], indexer.top_k)
        out[rows] = latent_attention(paged_attention, q[rows], seen, each, up, scale=scale)
    return out


def choose_tokens(indexer: Indexer, pages: Tensor, batch: AttentionBatch) -> ChosenTokens:
    """Choose the tokens of each row of a step by the scores of their keys in `pages` [pages, 1, page, Di].

    A token's score is the sum over the indexer's heads of weight * relu(query · key), in float32. Of equal scores the
    earlier token is chosen: so a choice does not depend on how a prompt was divided into chunks.
    """
    page_size = pages.shape[2]
    split = SplitRows.of(batch, indexer.top_k)
    slots = []
    counts = []
    for scored in scored_rows(split, batch, pages, indexer.queries.shape[1]):
        scores = token_scores(indexer, scored.rows, scored.keys)
        positions, count = best_tokens(scores, scored.last, indexer.top_k)
        found = scored.table[positions // page_size] * page_size + positions % page_size
        slots.append(found.int())
        counts.append(count)
    return ChosenTokens(split.rows, torch.cat(slots), torch.cat(counts), split.other_rows, split.others)


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The rows of a step whose sequences are longer than what a row reads, and the sequences that are not."""

    long: list[int]  # sequences
    bounds: list[int]  # [S + 1]: sequence s owns rows bounds[s]:bounds[s + 1]
    lengths: list[int]  # [S]: of the sequences
    rows: Tensor  # [R] int64, of the long sequences
    other_rows: Tensor  # [T - R] int64
    others: AttentionBatch | None  # the other sequences, whose rows see all tokens; None: there are none

    @classmethod
    def of(cls, batch: AttentionBatch, top_k: int) -> "SplitRows":
        """Split a step by whether a sequence is longer than `top_k` tokens."""
        starts, lengths = batch.on_host or (batch.query_start, batch.kv_len)
        bounds: list[int] = starts.tolist()
        lens: list[int] = lengths.tolist()
        device = batch.page_table.device
        long = [s for s, length in enumerate(lens) if length > top_k]
        short = [s for s, length in enumerate(lens) if length <= top_k]
        others = _some(batch, short, bounds, lens) if short else None
        return cls(long, bounds, lens, _rows_of(long, bounds, device), _rows_of(short, bounds, device), others)


class ScoredRows(NamedTuple):
    """Some rows of one long sequence, whose scores exist at the same time."""

    sequence: int
    rows: slice  # of the flat batch
    last: Tensor  # [n] int64: the position of each row, up to which it sees tokens
    table: Tensor  # [P] int64: the sequence's pages
    keys: Tensor  # [L, Di] float32: the indexer's keys of its tokens


def scored_rows(split: SplitRows, batch: AttentionBatch, pages: Tensor, heads: int) -> Iterator[ScoredRows]:
    """Yield the rows of long sequences in the order of the flat batch, as many at a time as memory bounds.

    `pages` [pages, 1, page, Di] hold the indexer's keys. `heads`: of its queries.
    """
    page_size = pages.shape[2]
    for s in split.long:
        length = split.lengths[s]
        table = batch.page_table[s, : -(-length // page_size)].long()
        keys = pages[table, 0].flatten(0, 1)[:length].float()
        step = max(1, _SCORED_BYTES // (max(heads, 1) * length * 4))
        end = split.bounds[s + 1]
        for first in range(split.bounds[s], end, step):
            rows = slice(first, min(first + step, end))
            last = torch.arange(rows.start, rows.stop, device=pages.device) + (length - end)
            yield ScoredRows(s, rows, last, table, keys)


def choice_of_rows(chosen: ChosenTokens | None, rows: Tensor, batch: AttentionBatch) -> ChosenTokens:
    """Return the choice for a step with one row for each sequence, row s of which reads what `rows[s]` has chosen.

    chosen: of an earlier step over the same pages; None: none of its rows chose. rows: [S] int64, of the earlier step.
    Where a row there saw all tokens, the row here does too.
    """
    if chosen is None:
        nothing = rows[:0]
        every = torch.arange(len(rows), device=rows.device)
        return ChosenTokens(nothing, nothing[:, None].int(), nothing.int(), every, batch)
    is_chosen = torch.isin(rows, chosen.rows)
    places = torch.searchsorted(chosen.rows, rows[is_chosen])
    others: list[int] = (~is_chosen).nonzero()[:, 0].tolist()
    lens: list[int] = (batch.on_host[1] if batch.on_host else batch.kv_len).tolist()
    return ChosenTokens(
        is_chosen.nonzero()[:, 0],
        chosen.slots[places],
        chosen.counts[places],
        torch.tensor(others, dtype=torch.long, device=rows.device),
        _some(batch, others, range(len(lens) + 1), lens) if others else None,
    )


def best_tokens(scores: Tensor, last: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the positions [R, top_k] of the highest of `scores` [R, L], ascending, and how many there are, [R] int32.

    Row r sees the tokens up to position `last[r]`. Of equal scores the earlier token is taken. Positions past the
    number of a row are 0. L is more than `top_k`.
    """
    token = torch.arange(scores.shape[1], device=scores.device)
    is_seen = token <= last[:, None]
    scores = scores.masked_fill(~is_seen, float("-inf"))
    least = scores.topk(top_k, dim=1, sorted=False).values.amin(1, keepdim=True)
    is_above = scores > least
    is_equal = (scores == least) & is_seen
    num_left = top_k - is_above.sum(1, keepdim=True)
    is_chosen = is_above | (is_equal & (is_equal.cumsum(1) <= num_left))
    row, position = is_chosen.nonzero(as_tuple=True)
    place = is_chosen.cumsum(1)[row, position] - 1
    positions = torch.zeros(len(scores), top_k, dtype=torch.long, device=scores.device)
    positions[row, place] = position
    # A row of NaN chooses nothing; attention over no token is not defined, and its query is NaN as well.
    return positions, is_chosen.sum(1).clamp(min=1).int()


def token_scores(indexer: Indexer, rows: slice, keys: Tensor) -> Tensor:
    """Return the scores [n, L] of keys [L, Di], in float32, for some rows of the step: see `choose_tokens`."""
    by_head = (indexer.queries[rows].float() @ keys.T).relu_()  # [n, Hi, L]
    return torch.bmm(indexer.weights[rows, None], by_head)[:, 0]


def _rows_of(sequences: Sequence[int], bounds: Sequence[int], device: torch.device) -> Tensor:
    """Return the rows of the flat batch that these sequences own."""
    rows = [row for s in sequences for row in range(bounds[s], bounds[s + 1])]
    return torch.tensor(rows, dtype=torch.long, device=device)


def _some(
    batch: AttentionBatch, sequences: Sequence[int], bounds: Sequence[int], lens: Sequence[int]
) -> AttentionBatch:
    """Return some sequences of a batch as a batch of their own, which stores nothing."""
    sizes = [bounds[s + 1] - bounds[s] for s in sequences]
    starts = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([lens[s] for s in sequences], dtype=torch.int32)
    device = batch.page_table.device
    return AttentionBatch(
        starts.to(device),
        lengths.to(device),
        batch.page_table[torch.tensor(sequences, device=device)],
        batch.slots[:0],
        max(sizes),
        max(lens[s] for s in sequences),
        sum(s < batch.num_decodes for s in sequences),
        on_host=(starts, lengths),
    )


def _copied(pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of the tokens in `slots` [n, top_k], a page for each line, and the pages' numbers [n, 1]."""
    page_size = pages.shape[2]
    numbers = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    places = slots.long()
    return pages[places // page_size, 0, places % page_size][:, None], numbers[:, None]


def _pages_of_one_token(pages: Tensor) -> Tensor | None:
    """Return a view of `pages` [pages, 1, page, D] in which every token is a page, [n, 1, 1, D]; `_numbers` are theirs.

    A page holds other layers' rows too, so the tokens of one layer do not lie at equal distances. Views begin at every
    common divisor of the distances, and overlap. None: their numbers would not be int32.
    """
    (num_pages, _, page_size, D) = pages.shape
    unit, page_units, token_units = _units(pages)
    number = (num_pages - 1) * page_units + (page_size - 1) * token_units + 1
    return pages.as_strided((number, 1, 1, D), (unit, D, D, 1)) if number < 1 << 31 else None


def _numbers(pages: Tensor, slots: Tensor) -> Tensor:
    """Return the page of each of `slots` in the view of `_pages_of_one_token`."""
    page_size = pages.shape[2]
    _, page_units, token_units = _units(pages)
    return slots // page_size * page_units + slots % page_size * token_units


def _units(pages: Tensor) -> tuple[int, int, int]:
    """Return the common divisor of the distances between pages and between tokens, in elements, and both in these."""
    page_stride = pages.stride(0)
    token_stride = pages.stride(2)
    unit = gcd(page_stride, token_stride)
    return unit, page_stride // unit, token_stride // unit


def single_rows(page_table: Tensor, counts: Tensor, most: int) -> AttentionBatch:
    """Return a batch of one row for each line of `page_table` [n, P] int32; row r sees `counts[r]` tokens, at most
    `most`. It stores nothing."""
    n = len(counts)
    starts = torch.arange(n + 1, dtype=torch.int32, device=counts.device)
    return AttentionBatch(starts, counts, page_table, starts[:0].long(), 1, most, n)
