"""The Triton kernels for decodes: contexts are cut into parts of equal length, one program for each part and KV head.

`share_kernel` cuts the contexts of one step on the device, so that a CUDA graph fits contexts of any length: the number
of parts depends on the number of sequences alone. `decode_kernel` computes each part, `join_kernel` joins the parts of
a sequence (Flash-Decoding).

Shares are int32, in one tensor, in this order:
    1        tiles of context in a part, at most
    1        how many sequences have several parts
    D + 1    the first part of each sequence, and the number of parts
    P        the sequence of each part
    P - D    the sequences with several parts
"""

import triton
import triton.language as tl

from crossdock.kernels.gpu.triton_scan import STEP_TENSORS, first_key, load_queries, scan


def num_shares(num_parts: int) -> int:
    """Return the length of the tensor of shares for P parts."""
    return 3 + 2 * num_parts


@triton.jit
def _first_of(kv_len, WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr):
    """Return the first token that the row at the end of a context sees; 0 where there is no row."""
    return first_key(tl.maximum(kv_len - 1, 0), WINDOW, ATTENTION_CHUNK)


@triton.jit
def _num_tiles(kv_lens, sequence, D, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr):
    """Return the tiles of a context, at least one. With 0, more than P - D sequences could have several parts."""
    kv_len = tl.load(kv_lens + sequence, mask=sequence < D, other=0)
    num_tiles = tl.cdiv(kv_len, BLOCK_N) - _first_of(kv_len, WINDOW, ATTENTION_CHUNK) // BLOCK_N
    return tl.where(sequence < D, tl.maximum(num_tiles, 1), 0)


@triton.jit(do_not_specialize=["D", "P"], do_not_specialize_on_alignment=STEP_TENSORS)
def share_kernel(
    shares, kv_lens, D, P,
    MIN_TILES: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Cut the contexts of D sequences into at most P >= D parts. The longest part is as short as possible."""
    some = tl.arange(0, BLOCK_S)
    low = D * 0 + MIN_TILES
    high = D * 0 + MIN_TILES
    for first in range(0, D, BLOCK_S):
        high = tl.maximum(high, tl.max(_num_tiles(kv_lens, first + some, D, BLOCK_N, WINDOW, ATTENTION_CHUNK), 0))
    while low < high:
        middle = (low + high) // 2
        needed = D * 0
        for first in range(0, D, BLOCK_S):
            needed += tl.sum(tl.cdiv(_num_tiles(kv_lens, first + some, D, BLOCK_N, WINDOW, ATTENTION_CHUNK), middle), 0)
        low = tl.where(needed <= P, low, middle + 1)
        high = tl.where(needed <= P, middle, high)
    first_parts = shares + 2
    owners = shares + 3 + D
    split = shares + 3 + D + P
    num_parts = D * 0
    num_split = D * 0
    for first in range(0, D, BLOCK_S):
        sequence = first + some
        parts = tl.cdiv(_num_tiles(kv_lens, sequence, D, BLOCK_N, WINDOW, ATTENTION_CHUNK), low)
        first_part = num_parts + tl.cumsum(parts, 0) - parts
        tl.store(first_parts + sequence, first_part, mask=sequence < D)
        for number in range(tl.max(parts, 0)):
            tl.store(owners + first_part + number, sequence, mask=number < parts)
        is_split = (parts > 1).to(tl.int32)
        tl.store(split + num_split + tl.cumsum(is_split, 0) - 1, sequence, mask=parts > 1)
        num_parts += tl.sum(parts, 0)
        num_split += tl.sum(is_split, 0)
    tl.store(first_parts + D, num_parts)
    tl.store(shares, low)
    tl.store(shares + 1, num_split)


@triton.jit(do_not_specialize=["D", "table_row"], do_not_specialize_on_alignment=STEP_TENSORS)
def decode_kernel(
    out, part_out, part_lse, shares, query_start, kv_lens, sinks,
    q, k_pages, v_pages, k_scale, v_scale, page_table,
    D, scale, q_token, q_head, k_page, k_head, v_page, v_head, table_row,
    GROUP: tl.constexpr, PAGE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, V_ROW: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    """Compute one part of one sequence's context for the query heads of a KV head.

    A whole context goes to `out`. A part goes to `part_out` [P, Hkv, GROUP, Dv] and, as log2 of its sum of exp2, to
    `part_lse` [P, Hkv, GROUP].
    """
    part = tl.program_id(0)
    head = tl.program_id(1)
    first_parts = shares + 2
    if part < tl.load(first_parts + D):
        sequence = tl.load(shares + 3 + D + part)
        first_part = tl.load(first_parts + sequence)
        is_whole = tl.load(first_parts + sequence + 1) - first_part == 1
        row = tl.load(query_start + sequence)
        kv_len = tl.load(kv_lens + sequence)
        tokens = tl.load(shares) * BLOCK_N
        first = _first_of(kv_len, WINDOW, ATTENTION_CHUNK)
        begin = first // BLOCK_N * BLOCK_N + (part - first_part) * tokens
        end = tl.minimum(begin + tokens, kv_len)
        pages = page_table + tl.cast(sequence, tl.int64) * table_row
        k_pages += tl.cast(head, tl.int64) * k_head
        v_pages += tl.cast(head, tl.int64) * v_head
        out_scale = 1.0
        if HAS_SCALES:
            scale *= tl.load(k_scale + head)
            out_scale = tl.load(v_scale + head)
        member = tl.arange(0, ROWS)  # of the query heads that share the KV head
        live = (member < GROUP) & (tl.load(query_start + sequence + 1) > row)
        j = tl.arange(0, BLOCK_V)[None, :]
        q_at = q + tl.cast(row, tl.int64) * q_token + ((head * GROUP + member) * q_head)[:, None]
        rows, rest = load_queries(q_at, live, K_DIM, V_DIM, BLOCK_K, BLOCK_V, LATENT)
        acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        top = tl.full([ROWS], -1e30, tl.float32)  # finite: see chunk_kernel
        if HAS_SINKS:
            sink = tl.load(sinks + head * GROUP + member, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
            top = tl.where(is_whole, sink, top)
            total += is_whole.to(tl.float32)
        position = kv_len - 1 + member * 0
        acc, total, top = scan(
            acc, total, top, rows, rest, position, position, begin, end, first, scale,
            k_pages, v_pages, pages, k_page, v_page,
            PAGE, K_DIM, V_DIM, V_ROW, BLOCK_K, BLOCK_V, BLOCK_N, WINDOW, ATTENTION_CHUNK, SOFTCAP, LATENT, True,
        )  # fmt: skip
        total = tl.where(total > 0, total, 1.0)
        acc = acc * (out_scale / total)[:, None]
        place = (tl.where(is_whole, row, part).to(tl.int64) * tl.num_programs(1) + head) * GROUP + member
        at = place[:, None] * V_DIM + j
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=live[:, None] & (j < V_DIM) & is_whole)
        tl.store(part_out + at, acc, mask=live[:, None] & (j < V_DIM) & (is_whole == 0))
        tl.store(part_lse + place, top + tl.log2(total), mask=live & (is_whole == 0))


@triton.jit(do_not_specialize=["D", "P"], do_not_specialize_on_alignment=STEP_TENSORS)
def join_kernel(
    out, part_out, part_lse, shares, query_start, sinks, D, P,
    GROUP: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_G: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Join the parts of a sequence for the query heads of a KV head, each part weighted by its sum."""
    number = tl.program_id(0)
    head = tl.program_id(1)
    if number < tl.load(shares + 1):
        sequence = tl.load(shares + 3 + D + P + number)
        first_part = tl.load(shares + 2 + sequence)
        end = tl.load(shares + 3 + sequence)
        row = tl.load(query_start + sequence)
        member = tl.arange(0, BLOCK_G)
        j = tl.arange(0, BLOCK_V)
        live = (member < GROUP) & (tl.load(query_start + sequence + 1) > row)
        top = tl.full([BLOCK_G], -1e30, tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
        if HAS_SINKS:
            top = tl.load(sinks + head * GROUP + member, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
        for block in range(first_part, end, BLOCK_P):
            part = block + tl.arange(0, BLOCK_P)
            place = (part.to(tl.int64) * tl.num_programs(1) + head)[:, None] * GROUP + member[None, :]
            is_stored = (part < end)[:, None] & live[None, :]
            lse = tl.load(part_lse + place, mask=is_stored, other=float("-inf"))
            values = tl.load(
                part_out + place[:, :, None] * V_DIM + j[None, None, :],
                mask=is_stored[:, :, None] & (j < V_DIM)[None, None, :],
                other=0.0,
            )  # [BLOCK_P, BLOCK_G, BLOCK_V]
            new_top = tl.maximum(top, tl.max(lse, 0))
            weights = tl.exp2(lse - new_top[None, :])
            keep = tl.exp2(top - new_top)
            total = total * keep + tl.sum(weights, 0)
            acc = acc * keep[:, None] + tl.sum(values * weights[:, :, None], 0)
            top = new_top
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        heads = tl.num_programs(1) * GROUP
        out_at = out + ((tl.cast(row, tl.int64) * heads + head * GROUP + member) * V_DIM)[:, None] + j[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=live[:, None] & (j < V_DIM)[None, :])
