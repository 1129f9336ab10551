"""Attention over the paged KV pool on GPUs, in Triton: chunks and decodes in one launch, straight on the pool's layout.

The query heads that share a KV head are rows of one tile, as in FlashInfer and vLLM's unified kernel. A sequence with
few rows takes a small tile and is split along its context, as in Flash-Decoding; a second pass joins the parts. The
softmax is online, in base 2 and float32 (FlashAttention-2).

Tiles of e4m3 pages are converted to the dtype of the queries. The scale of a head's keys is multiplied into that of its
scores, the scale of its values into its output, so that no single element is scaled.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch

_LOG2_E = 1.4426950408889634
_SMALL_ROWS = 16  # the fewest rows that tl.dot multiplies
_MAX_SPLITS = 64
SPLIT_TOKENS = 256  # the shortest part of a context: reading a part must outweigh storing its result
FULL_SPLIT_TOKENS = 4096  # likewise if the batch fills the device without splits; then they are for stragglers
_WAVES = 2  # programs per multiprocessor that saturate memory bandwidth


class Tiles(NamedTuple):
    """The sizes of the tiles that one program holds at a time."""

    rows: int  # query tokens times the heads of a group
    tokens: int  # of context
    num_warps: int
    num_stages: int


def tiles_for(key_dim: int, value_dim: int, itemsize: int, has_chunks: bool) -> Tiles:
    """Return the largest tiles that do not spill registers on sm_90.

    The pipeline has an additional step for the page numbers, for which the loads of keys and values wait. So five
    stages have two tiles in flight, and three stages one.
    """
    width = _power_of_2(max(key_dim, value_dim)) * itemsize  # bytes of a row
    tokens = min(64, max(16, 16384 // width))
    if not has_chunks:
        return Tiles(_SMALL_ROWS, tokens, 4, 5)
    if itemsize == 4:  # multiplied without tensor cores
        return Tiles(32, min(tokens, 32), 4, 2)
    return Tiles(128, tokens, 8, 3) if width <= 256 else Tiles(64, tokens, 8, 2)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`reference_store_kv` of kernels/attention.py with every tensor on one GPU."""
    (T, H, Dk), Dv = k.shape, v.shape[2]
    _check(k_pages, v_pages, k_scale is not None, k, v)
    k, v = _adjacent(k), _adjacent(v)
    block = 16
    _store_kernel[triton.cdiv(T, block), H](
        *(k, v, k_pages, v_pages, slots, k_scale, v_scale, T),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(k_pages.stride(0), k_pages.stride(1), v_pages.stride(0), v_pages.stride(1)),
        PAGE=k_pages.shape[2],
        **block_widths(Dk, Dv),
        BLOCK_T=block,
        HAS_SCALES=k_scale is not None,
    )


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`reference_paged_attention` with every tensor on one GPU. Rows that belong to no sequence are undefined."""
    (T, Hq, Dk), (_, Hkv, page_size, Dv) = q.shape, v_pages.shape
    _check(k_pages, v_pages, k_scale is not None, q)
    q = _adjacent(q)
    assert batch.page_table.stride(1) == 1 or batch.page_table.shape[1] == 1
    S, group = len(batch.kv_len), Hq // Hkv
    small_rows = max(_SMALL_ROWS, triton.next_power_of_2(group))
    small_queries = small_rows // group
    has_chunks = batch.max_query_len > small_queries
    tiles = tiles_for(Dk, Dv, q.element_size(), has_chunks)
    large_rows = max(tiles.rows, triton.next_power_of_2(group)) if has_chunks else 0
    num_blocks = T // (large_rows // group) + S if has_chunks else S
    splits, split_tokens = _splits(S * Hkv, batch.max_kv_len, _num_multiprocessors(q.device))

    out = q.new_empty(T, Hq, Dv)
    part = q.new_empty(S, Hkv, splits, small_rows, Dv, dtype=torch.float32) if splits > 1 else out
    part_lse = part.new_empty(part.shape[:-1]) if splits > 1 else out  # log2 of the sum of exp2
    rows = (out, part, part_lse, batch.query_start, batch.kv_len, sinks)
    widths = block_widths(Dk, Dv)
    shape = {
        "GROUP": group,
        "SMALL": small_rows,
        "BLOCK_N": tiles.tokens,
        "SPLITS": splits,
        "SPLIT_TILES": triton.cdiv(split_tokens, tiles.tokens),
        "WINDOW": window or 0,
        "HAS_SINKS": sinks is not None,
    }
    attention_kernel[num_blocks, Hkv, splits](
        *(*rows, q, k_pages, v_pages, k_scale, v_scale, batch.page_table),
        *(S, scale * _LOG2_E if softcap is None else scale * 2 * _LOG2_E / softcap),
        *(q.stride(0), q.stride(1), k_pages.stride(0), k_pages.stride(1), v_pages.stride(0), v_pages.stride(1)),
        batch.page_table.stride(0),
        **shape,
        **widths,
        PAGE=page_size,
        LARGE=large_rows,
        SOFTCAP=(softcap or 0.0) * _LOG2_E,
        HAS_SCALES=k_scale is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if splits > 1:
        num_queries = min(batch.max_query_len, small_queries)
        _join_kernel[S, num_queries, Hq](
            *rows, **shape, V_DIM=Dv, BLOCK_V=widths["BLOCK_V"], BLOCK_SPLITS=triton.next_power_of_2(splits)
        )
    return out


def _check(k_pages: Tensor, v_pages: Tensor, has_scales: bool, *rows: Tensor) -> None:
    for x in rows:
        dtype = torch.float8_e4m3fn if has_scales else x.dtype
        assert (x.device, dtype) == (k_pages.device, k_pages.dtype), "pages have the rows' device, and dtype or e4m3"
    for pages in (k_pages, v_pages):
        adjacent = pages.stride(3) == 1 and (pages.stride(2) == pages.shape[3] or pages.shape[2] == 1)
        assert adjacent, "tokens of a page are adjacent"


def _adjacent(x: Tensor) -> Tensor:
    """Return `x` with adjacent elements of a head, as nearly all models have them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def block_widths(key_dim: int, value_dim: int) -> dict[str, int]:
    """Return the head dimensions, and the powers of two that hold them."""
    return {"K_DIM": key_dim, "V_DIM": value_dim, "BLOCK_K": _power_of_2(key_dim), "BLOCK_V": _power_of_2(value_dim)}


def _power_of_2(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _splits(num_programs: int, max_kv_len: int, num_multiprocessors: int) -> tuple[int, int]:
    """Return into how many parts a context is split at most, and the fewest tokens of a part."""
    to_fill = -(-_WAVES * num_multiprocessors // num_programs)
    tokens = SPLIT_TOKENS if to_fill > 1 else FULL_SPLIT_TOKENS
    longest = -(-max_kv_len // tokens)
    return min(longest, _MAX_SPLITS if to_fill == 1 else min(to_fill, _MAX_SPLITS)), tokens


@lru_cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":  # Triton's interpreter
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@triton.jit(do_not_specialize=["T"])
def _store_kernel(
    k, v, k_pages, v_pages, slots, k_scale, v_scale, T,
    k_token, k_head, v_token, v_head, k_page, k_page_head, v_page, v_page_head,
    PAGE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    slot = tl.load(slots + token, mask=token < T, other=-1)
    live = (slot >= 0)[:, None]
    token, page, offset = token.to(tl.int64)[:, None], (slot // PAGE)[:, None], (slot % PAGE)[:, None]
    i = tl.arange(0, BLOCK_K)[None, :]
    x = tl.load(k + token * k_token + head * k_head + i, mask=live & (i < K_DIM))
    if HAS_SCALES:
        x = _quantised(x, k_scale + head, k_pages)
    tl.store(k_pages + page * k_page + head * k_page_head + offset * K_DIM + i, x, mask=live & (i < K_DIM))
    i = tl.arange(0, BLOCK_V)[None, :]
    x = tl.load(v + token * v_token + head * v_head + i, mask=live & (i < V_DIM))
    if HAS_SCALES:
        x = _quantised(x, v_scale + head, v_pages)
    tl.store(v_pages + page * v_page + head * v_page_head + offset * V_DIM + i, x, mask=live & (i < V_DIM))


@triton.jit
def _quantised(x, scale, pages):
    x = tl.div_rn(x.to(tl.float32), tl.load(scale))
    return tl.minimum(tl.maximum(x, -448.0), 448.0).to(pages.dtype.element_ty)


@triton.jit
def _scan(
    acc, total, top, q, position, begin, end, first, scale,
    k_pages, v_pages, pages, k_page, v_page,
    PAGE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over the tiles of [begin, end); tokens before `first` are never read."""
    i, j = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_V)[None, :]
    for tile in tl.range(begin, end, BLOCK_N):
        token = tile + tl.arange(0, BLOCK_N)
        if MASKED:
            live = (token >= first) & (token < end)
            page = tl.load(pages + token // PAGE, mask=live, other=0).to(tl.int64)
            k_live, v_live = live[:, None] & (i < K_DIM), live[:, None] & (j < V_DIM)
        else:
            page = tl.load(pages + token // PAGE).to(tl.int64)
            k_live, v_live = i < K_DIM, j < V_DIM
        k_at = k_pages + (page * k_page + (token % PAGE) * K_DIM)[:, None] + i
        v_at = v_pages + (page * v_page + (token % PAGE) * V_DIM)[:, None] + j
        k = tl.load(k_at) if not MASKED and K_DIM == BLOCK_K else tl.load(k_at, mask=k_live, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if SOFTCAP > 0:
            scores = SOFTCAP - 2 * SOFTCAP / (tl.exp2(scores) + 1)  # tanh
        if MASKED:
            visible = position[:, None] >= token[None, :]
            if WINDOW > 0:
                visible = visible & (position[:, None] - token[None, :] < WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        keep = tl.exp2(top - new_top)
        total = total * keep + tl.sum(weights, 1)
        v = tl.load(v_at) if not MASKED and V_DIM == BLOCK_V else tl.load(v_at, mask=v_live, other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * keep[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit
def _attend(
    out, part, part_lse, sinks, q, start, length, kv_len, first_token, head, begin, end, place, scale, out_scale,
    k_pages, v_pages, pages, q_token, q_head, k_page, v_page,
    GROUP: tl.constexpr, PAGE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, IS_CHUNK: tl.constexpr, IS_PART: tl.constexpr,
):  # fmt: skip
    """Compute a tile of query rows, from `first_token` of its sequence on, over the context in [begin, end)."""
    QUERIES: tl.constexpr = ROWS // GROUP
    row = tl.arange(0, ROWS)
    token, row_head = first_token + row // GROUP, head * GROUP + row % GROUP
    live = (token < length) & (row < QUERIES * GROUP)
    position = kv_len - length + token
    i, j = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_V)[None, :]
    q_at = q + ((start + token).to(tl.int64) * q_token + row_head * q_head)[:, None] + i
    rows = tl.load(q_at, mask=live[:, None] & (i < K_DIM), other=0.0)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], -1e30, tl.float32)  # finite: a row that sees nothing of a tile must not become NaN
    if HAS_SINKS and not IS_PART:
        top = tl.load(sinks + row_head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        total += 1.0
    first = 0
    if WINDOW > 0:
        first = tl.maximum(kv_len - length + first_token - WINDOW + 1, 0)
    elif IS_CHUNK:  # first the tiles that every row sees in full
        open_end = (kv_len - length + first_token + 1) // BLOCK_N * BLOCK_N
        acc, total, top = _scan(
            acc, total, top, rows, position, begin, open_end, first, scale,
            k_pages, v_pages, pages, k_page, v_page,
            PAGE, K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_N, WINDOW, SOFTCAP, False,
        )  # fmt: skip
        begin = open_end
    acc, total, top = _scan(
        acc, total, top, rows, position, begin, end, first, scale,
        k_pages, v_pages, pages, k_page, v_page,
        PAGE, K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_N, WINDOW, SOFTCAP, True,
    )  # fmt: skip
    total = tl.where(total > 0, total, 1.0)
    acc = acc * (out_scale / total)[:, None]
    if IS_PART:
        place = place * ROWS + row
        tl.store(part + place[:, None] * V_DIM + j, acc, mask=live[:, None] & (j < V_DIM))
        tl.store(part_lse + place, top + tl.log2(total), mask=live)
    else:
        heads = tl.num_programs(1) * GROUP
        out_at = out + (((start + token).to(tl.int64) * heads + row_head) * V_DIM)[:, None] + j
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=live[:, None] & (j < V_DIM))


@triton.jit
def _parts_of(length, kv_len, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SPLIT_TILES: tl.constexpr,
              WINDOW: tl.constexpr):  # fmt: skip
    """Return where the context of a sequence with few rows begins, and the tokens in a part of the context."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(kv_len - length - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    return begin, tl.maximum(tl.cdiv(tl.cdiv(kv_len - begin, BLOCK_N), SPLITS), SPLIT_TILES) * BLOCK_N


@triton.jit(do_not_specialize=["S", "table_row"])
def attention_kernel(
    out, part, part_lse, query_start, kv_lens, sinks, q, k_pages, v_pages, k_scale, v_scale, page_table,
    S, scale, q_token, q_head, k_page, k_head, v_page, v_head, table_row,
    GROUP: tl.constexpr, PAGE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    SMALL: tl.constexpr, LARGE: tl.constexpr, SPLITS: tl.constexpr, SPLIT_TILES: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Compute one KV head for a block of a sequence's query tokens; if they are few, for one part of their context."""
    # Chunks come last in a batch, and the last block of a chunk sees most: the longest programs start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, split = tl.program_id(1), tl.program_id(2)
    sequence, number = block, 0
    if LARGE > 0:
        # Sequence s owns the blocks from query_start[s] // QUERIES + s on: at least as many as it needs.
        QUERIES: tl.constexpr = LARGE // GROUP
        sequence, above = block * 0, block * 0 + S
        while above - sequence > 1:
            middle = (sequence + above) // 2
            is_beyond = tl.load(query_start + middle) // QUERIES + middle > block
            sequence = tl.where(is_beyond, sequence, middle)
            above = tl.where(is_beyond, middle, above)
        number = block - tl.load(query_start + sequence) // QUERIES - sequence
    start = tl.load(query_start + sequence)
    length = tl.load(query_start + sequence + 1) - start
    kv_len = tl.load(kv_lens + sequence)
    pages = page_table + tl.cast(sequence, tl.int64) * table_row
    k_pages += tl.cast(head, tl.int64) * k_head
    v_pages += tl.cast(head, tl.int64) * v_head
    out_scale = 1.0
    if HAS_SCALES:
        scale *= tl.load(k_scale + head)
        out_scale = tl.load(v_scale + head)
    if LARGE > 0:
        first_token = number * QUERIES
        if (length > SMALL // GROUP) & (split == 0) & (first_token < length):
            begin = 0
            if WINDOW > 0:
                begin = tl.maximum(kv_len - length + first_token - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
            end = tl.minimum(kv_len - length + first_token + QUERIES, kv_len)
            _attend(
                out, part, part_lse, sinks, q, start, length, kv_len, first_token, head, begin, end, 0, scale,
                out_scale, k_pages, v_pages, pages, q_token, q_head, k_page, v_page,
                GROUP, PAGE, K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_N, WINDOW, HAS_SINKS, SOFTCAP, LARGE, True, False,
            )  # fmt: skip
    begin, tokens = _parts_of(length, kv_len, BLOCK_N, SPLITS, SPLIT_TILES, WINDOW)
    begin += split * tokens
    if (length <= SMALL // GROUP) & (length > 0) & (number == 0) & (begin < kv_len):
        place = (tl.cast(sequence, tl.int64) * tl.num_programs(1) + head) * SPLITS + split
        _attend(
            out, part, part_lse, sinks, q, start, length, kv_len, 0, head, begin, tl.minimum(begin + tokens, kv_len),
            place, scale, out_scale, k_pages, v_pages, pages, q_token, q_head, k_page, v_page,
            GROUP, PAGE, K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_N, WINDOW, HAS_SINKS, SOFTCAP, SMALL, False, SPLITS > 1,
        )  # fmt: skip


@triton.jit
def _join_kernel(
    out, part, part_lse, query_start, kv_lens, sinks,
    GROUP: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    SMALL: tl.constexpr, SPLITS: tl.constexpr, SPLIT_TILES: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row of a sequence with few rows, each weighted by its sum."""
    sequence, token, q_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + sequence)
    length = tl.load(query_start + sequence + 1) - start
    if (length <= SMALL // GROUP) & (token < length):
        kv_len = tl.load(kv_lens + sequence)
        begin, tokens = _parts_of(length, kv_len, BLOCK_N, SPLITS, SPLIT_TILES, WINDOW)
        split = tl.arange(0, BLOCK_SPLITS)
        live = begin + split * tokens < kv_len
        kv_heads = tl.num_programs(2) // GROUP
        place = (tl.cast(sequence, tl.int64) * kv_heads + q_head // GROUP) * SPLITS + split
        place = place * SMALL + token * GROUP + q_head % GROUP
        lse = tl.load(part_lse + place, mask=live, other=float("-inf"))
        top = tl.max(lse, 0)
        if HAS_SINKS:
            sink = tl.load(sinks + q_head).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(top, sink)
        weights = tl.exp2(lse - top)
        total = tl.sum(weights, 0)
        if HAS_SINKS:
            total += tl.exp2(sink - top)
        j = tl.arange(0, BLOCK_V)
        values = tl.load(
            part + place[:, None] * V_DIM + j[None, :], mask=live[:, None] & (j < V_DIM)[None, :], other=0.0
        )
        result = tl.sum(values * weights[:, None], 0) / total
        out_at = out + ((start + token).to(tl.int64) * tl.num_programs(2) + q_head) * V_DIM + j
        tl.store(out_at, result.to(out.dtype.element_ty), mask=j < V_DIM)
