"""The Triton kernels for chunks of prompts: a program for each block of query rows, KV head and part of the context.

The query heads that share a KV head are rows of one tile, as in FlashInfer and vLLM's unified kernel. A few tiles deep
in a long prompt would leave most of the device idle. So their contexts are cut into parts, and `chunk_join_kernel`
joins the parts (Flash-Decoding). How many parts a block has depends on the blocks that have rows, which `block_kernel`
lists on the device: in a CUDA graph most sequences are empty.
"""

import triton
import triton.language as tl

from crossdock.kernels.gpu.triton_scan import STEP_TENSORS, first_key, load_queries, scan


def num_listed(num_programs: int) -> int:
    """Return the length of the tensor that lists the blocks of P programs: their number, sequences, first tokens."""
    return 1 + 2 * num_programs


@triton.jit(do_not_specialize=["S", "D", "P"], do_not_specialize_on_alignment=STEP_TENSORS)
def block_kernel(listed, query_start, S, D, P, QUERIES: tl.constexpr, BLOCK_S: tl.constexpr):
    """List the blocks of rows that the sequences [D, S) have, in order. Sequences without rows have none."""
    some = tl.arange(0, BLOCK_S)
    num_blocks = D * 0
    for first in range(D, S, BLOCK_S):
        sequence = first + some
        start = tl.load(query_start + sequence, mask=sequence < S, other=0)
        blocks = tl.cdiv(tl.load(query_start + sequence + 1, mask=sequence < S, other=0) - start, QUERIES)
        place = listed + 1 + num_blocks + tl.cumsum(blocks, 0) - blocks
        for number in range(tl.max(blocks, 0)):
            tl.store(place + number, sequence, mask=number < blocks)
            tl.store(place + P + number, some * 0 + number * QUERIES, mask=number < blocks)
        num_blocks += tl.sum(blocks, 0)
    tl.store(listed, num_blocks)


@triton.jit
def _block_of(block, listed, query_start, P):
    """Return the sequence of a block, its first row, its rows, and the first of these in the block."""
    sequence = tl.load(listed + 1 + block)
    start = tl.load(query_start + sequence)
    return sequence, start, tl.load(query_start + sequence + 1) - start, tl.load(listed + 1 + P + block)


@triton.jit
def _seen_by(
    first_position, kv_len, key_end, row, live,
    QUERIES: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr,
    HAS_ENDS: tl.constexpr,
):  # fmt: skip
    """Find what a block's rows from `first_position` on see: the first token, the end, the first tile, the tiles."""
    first = first_key(first_position, WINDOW, ATTENTION_CHUNK)
    end = tl.minimum(first_position + QUERIES, kv_len)
    if HAS_ENDS:
        end = tl.max(tl.load(key_end + row, mask=live, other=0), 0)
    return first, end, first // BLOCK_N, tl.cdiv(end, BLOCK_N) - first // BLOCK_N


@triton.jit(do_not_specialize=["all_parts", "table_row"], do_not_specialize_on_alignment=STEP_TENSORS)
def chunk_kernel(
    out, part_out, part_lse, listed, query_start, kv_lens, key_end, sinks,
    q, k_pages, v_pages, k_scale, v_scale, page_table,
    all_parts, scale, q_token, q_head, k_page, k_head, v_page, v_head, table_row,
    GROUP: tl.constexpr, PAGE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, V_ROW: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr,
    LATENT: tl.constexpr, HAS_ENDS: tl.constexpr, MIN_TILES: tl.constexpr, ONE_LOOP: tl.constexpr,
):  # fmt: skip
    """Compute one part of the context of a listed block. The blocks have `all_parts` together, rounded up for each.

    A whole context goes to `out`. A part goes to `part_out` [P, Hkv, ROWS, Dv] and, as log2 of its sum of exp2, to
    `part_lse` [P, Hkv, ROWS]. `ONE_LOOP`: the same code computes a tile whatever rows are beside a row.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    num_blocks = tl.load(listed)
    head, part = tl.program_id(1), tl.program_id(0) // tl.maximum(num_blocks, 1)
    parts = tl.cdiv(all_parts, tl.maximum(num_blocks, 1))
    if (part < parts) & (num_blocks > 0):
        block = num_blocks - 1 - tl.program_id(0) % num_blocks  # the end of a prompt has most context: it starts first
        sequence, start, length, first_token = _block_of(block, listed, query_start, tl.num_programs(0))
        kv_len = tl.load(kv_lens + sequence)
        row = tl.arange(0, ROWS)
        token, row_head = first_token + row // GROUP, head * GROUP + row % GROUP
        live = (token < length) & (row < QUERIES * GROUP)
        first_position = kv_len - length + first_token
        first, end, tile, num_tiles = _seen_by(
            first_position, kv_len, key_end, start + token, live, QUERIES, BLOCK_N, WINDOW, ATTENTION_CHUNK, HAS_ENDS
        )
        tiles = tl.maximum(tl.cdiv(num_tiles, parts), MIN_TILES)  # of a part, at most
        is_whole = num_tiles <= tiles
        if part * tiles < num_tiles:
            tile += part * tiles
            end = tl.minimum((tile + tiles) * BLOCK_N, end)
            begin = tile * BLOCK_N
            pages = page_table + tl.cast(sequence, tl.int64) * table_row
            k_pages += tl.cast(head, tl.int64) * k_head
            v_pages += tl.cast(head, tl.int64) * v_head
            out_scale = 1.0
            if HAS_SCALES:
                scale *= tl.load(k_scale + head)
                out_scale = tl.load(v_scale + head)
            position = kv_len - length + token
            last = position
            if HAS_ENDS:
                last = tl.load(key_end + start + token, mask=live, other=0) - 1
            j = tl.arange(0, BLOCK_V)[None, :]
            q_at = q + ((start + token).to(tl.int64) * q_token + row_head * q_head)[:, None]
            rows, rest = load_queries(q_at, live, K_DIM, V_DIM, BLOCK_K, BLOCK_V, LATENT)
            acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            top = tl.full([ROWS], -1e30, tl.float32)  # finite: a row that sees nothing of a tile must not become NaN
            if HAS_SINKS:
                sink = tl.load(sinks + row_head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
                top = tl.where(is_whole, sink, top)
                total += is_whole.to(tl.float32)
            if WINDOW == 0 and ATTENTION_CHUNK == 0 and not ONE_LOOP:  # first the tiles that every row sees in full
                open_end = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N, tile + tiles), tile) * BLOCK_N
                acc, total, top = scan(
                    acc, total, top, rows, rest, position, last, begin, open_end, first, scale,
                    k_pages, v_pages, pages, k_page, v_page, PAGE, K_DIM, V_DIM, V_ROW,
                    BLOCK_K, BLOCK_V, BLOCK_N, WINDOW, ATTENTION_CHUNK, SOFTCAP, LATENT, False,
                )  # fmt: skip
                begin = open_end
            acc, total, top = scan(
                acc, total, top, rows, rest, position, last, begin, end, first, scale,
                k_pages, v_pages, pages, k_page, v_page, PAGE, K_DIM, V_DIM, V_ROW,
                BLOCK_K, BLOCK_V, BLOCK_N, WINDOW, ATTENTION_CHUNK, SOFTCAP, LATENT, True,
            )  # fmt: skip
            total = tl.where(total > 0, total, 1.0)
            acc = acc * (out_scale / total)[:, None]
            if is_whole:
                number = (start + token).to(tl.int64) * (tl.num_programs(1) * GROUP) + row_head
                out_at = out + (number * V_DIM)[:, None] + j
                tl.store(out_at, acc.to(out.dtype.element_ty), mask=live[:, None] & (j < V_DIM))
            else:
                place = (tl.cast(part, tl.int64) * num_blocks + block) * tl.num_programs(1) + head
                part_at = part_out + place * (ROWS * V_DIM) + row[:, None] * V_DIM + j
                tl.store(part_at, acc, mask=live[:, None] & (j < V_DIM))
                tl.store(part_lse + place * ROWS + row, top + tl.log2(total), mask=live)


@triton.jit(do_not_specialize=["all_parts", "P"], do_not_specialize_on_alignment=STEP_TENSORS)
def chunk_join_kernel(
    out, part_out, part_lse, listed, query_start, kv_lens, key_end, sinks, all_parts, P,
    GROUP: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ENDS: tl.constexpr,
    MIN_TILES: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Join the parts of `SOME` rows of a block, each part weighted by its sum."""
    QUERIES: tl.constexpr = ROWS // GROUP
    block, head = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.load(listed)
    if block < num_blocks:
        parts = tl.cdiv(all_parts, num_blocks)
        sequence, start, length, first_token = _block_of(block, listed, query_start, P)
        kv_len = tl.load(kv_lens + sequence)
        first_position = kv_len - length + first_token
        query = tl.arange(0, ROWS) // GROUP
        inside = (first_token + query < length) & (query < QUERIES)
        _, _, _, num_tiles = _seen_by(
            first_position,
            kv_len,
            key_end,
            start + first_token + query,
            inside,
            QUERIES,
            BLOCK_N,
            WINDOW,
            ATTENTION_CHUNK,
            HAS_ENDS,
        )
        tiles = tl.maximum(tl.cdiv(num_tiles, parts), MIN_TILES)
        if num_tiles > tiles:
            row = tl.program_id(2) * SOME + tl.arange(0, SOME)
            token, row_head = first_token + row // GROUP, head * GROUP + row % GROUP
            live = (token < length) & (row < QUERIES * GROUP)
            j = tl.arange(0, BLOCK_V)[None, :]
            inner = live[:, None] & (j < V_DIM)
            top = tl.full([SOME], -1e30, tl.float32)
            total = tl.zeros([SOME], tl.float32)
            acc = tl.zeros([SOME, BLOCK_V], tl.float32)
            if HAS_SINKS:
                top = tl.load(sinks + row_head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
                total += 1.0
            for part in range(tl.cdiv(num_tiles, tiles)):
                place = (tl.cast(part, tl.int64) * num_blocks + block) * tl.num_programs(1) + head
                place = place * ROWS + row
                lse = tl.load(part_lse + place, mask=live, other=float("-inf"))
                values = tl.load(part_out + place[:, None] * V_DIM + j, mask=inner, other=0.0)
                new_top = tl.maximum(top, lse)
                weight, keep = tl.exp2(lse - new_top), tl.exp2(top - new_top)
                total = total * keep + weight
                acc = acc * keep[:, None] + values * weight[:, None]
                top = new_top
            acc = acc / tl.where(total > 0, total, 1.0)[:, None]
            heads = tl.num_programs(1) * GROUP
            out_at = out + (((start + token).to(tl.int64) * heads + row_head) * V_DIM)[:, None] + j
            tl.store(out_at, acc.to(out.dtype.element_ty), mask=inner)
