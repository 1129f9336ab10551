"""The Triton kernel for chunks of prompts: one program for each tile of query rows and KV head, never split.

The query heads that share a KV head are rows of one tile, as in FlashInfer and vLLM's unified kernel.
"""

import triton
import triton.language as tl

from crossdock.kernels.gpu.triton_scan import first_key, scan


@triton.jit(do_not_specialize=["S", "D", "table_row"])
def chunk_kernel(
    out, query_start, kv_lens, key_end, sinks, q, k_pages, v_pages, k_scale, v_scale, page_table,
    S, D, scale, q_token, q_head, k_page, k_head, v_page, v_head, table_row,
    GROUP: tl.constexpr, PAGE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr, LATENT: tl.constexpr, HAS_ENDS: tl.constexpr,
):  # fmt: skip
    """Compute the sequences [D, S). The D before them have one row each.

    Sequence s owns the blocks from (query_start[s] - D) // QUERIES + s - D on: at least as many as it needs.
    """
    QUERIES: tl.constexpr = ROWS // GROUP
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the end of a prompt has the most context: it starts first
    head = tl.program_id(1)
    sequence, above = block * 0 + D, block * 0 + S
    while above - sequence > 1:
        middle = (sequence + above) // 2
        is_beyond = (tl.load(query_start + middle) - D) // QUERIES + middle - D > block
        sequence = tl.where(is_beyond, sequence, middle)
        above = tl.where(is_beyond, middle, above)
    start = tl.load(query_start + sequence)
    length = tl.load(query_start + sequence + 1) - start
    first_token = (block - (start - D) // QUERIES - sequence + D) * QUERIES
    if first_token < length:
        kv_len = tl.load(kv_lens + sequence)
        pages = page_table + tl.cast(sequence, tl.int64) * table_row
        k_pages += tl.cast(head, tl.int64) * k_head
        v_pages += tl.cast(head, tl.int64) * v_head
        out_scale = 1.0
        if HAS_SCALES:
            scale *= tl.load(k_scale + head)
            out_scale = tl.load(v_scale + head)
        row = tl.arange(0, ROWS)
        token, row_head = first_token + row // GROUP, head * GROUP + row % GROUP
        live = (token < length) & (row < QUERIES * GROUP)
        position = kv_len - length + token
        i, j = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_V)[None, :]
        q_at = q + ((start + token).to(tl.int64) * q_token + row_head * q_head)[:, None]
        if LATENT:
            rows = tl.load(q_at + j, mask=live[:, None] & (j < V_DIM), other=0.0)
            rest = tl.load(q_at + V_DIM + i, mask=live[:, None] & (i < K_DIM - V_DIM), other=0.0)
        else:
            rows = tl.load(q_at + i, mask=live[:, None] & (i < K_DIM), other=0.0)
            rest = rows
        acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        top = tl.full([ROWS], -1e30, tl.float32)  # finite: a row that sees nothing of a tile must not become NaN
        if HAS_SINKS:
            top = tl.load(sinks + row_head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
        first_position = kv_len - length + first_token
        begin, end, last = first_position * 0, tl.minimum(first_position + QUERIES, kv_len), position
        if HAS_ENDS:
            last = tl.load(key_end + start + token, mask=live, other=0) - 1
            end = tl.max(last, 0) + 1
        first = begin
        if WINDOW > 0 or ATTENTION_CHUNK > 0:
            first = first_key(first_position, WINDOW, ATTENTION_CHUNK)
            begin = first // BLOCK_N * BLOCK_N
        else:  # first the tiles that every row sees in full
            open_end = (first_position + 1) // BLOCK_N * BLOCK_N
            acc, total, top = scan(
                acc, total, top, rows, rest, position, last, begin, open_end, first, scale,
                k_pages, v_pages, pages, k_page, v_page,
                PAGE, K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_N, WINDOW, ATTENTION_CHUNK, SOFTCAP, LATENT, False,
            )  # fmt: skip
            begin = open_end
        acc, total, top = scan(
            acc, total, top, rows, rest, position, last, begin, end, first, scale,
            k_pages, v_pages, pages, k_page, v_page,
            PAGE, K_DIM, V_DIM, BLOCK_K, BLOCK_V, BLOCK_N, WINDOW, ATTENTION_CHUNK, SOFTCAP, LATENT, True,
        )  # fmt: skip
        acc = acc * (out_scale / tl.where(total > 0, total, 1.0))[:, None]
        heads = tl.num_programs(1) * GROUP
        out_at = out + (((start + token).to(tl.int64) * heads + row_head) * V_DIM)[:, None] + j
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=live[:, None] & (j < V_DIM))
