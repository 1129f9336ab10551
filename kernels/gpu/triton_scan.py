"""The inner loop of attention on GPUs: the online softmax of a tile of rows over a part of one sequence's pages.

The softmax is in base 2 and float32 (FlashAttention-2). Tiles of e4m3 pages are converted to the dtype of the queries.
The scale of a head's keys is multiplied into the scale of its scores. The scale of its values is multiplied into its
output. So no single element is scaled.

The first V_DIM elements of a latent are its value, and each tile of latents is read once. So queries and keys of
latents come in two pieces: these elements, and the others in `rest`.
"""

import triton
import triton.language as tl

STEP_TENSORS = ["shares", "listed", "query_start", "kv_lens", "key_end", "page_table"]
"""Arguments read one number at a time. A part of a batch begins anywhere in them, and compiles no kernel again."""


@triton.jit
def first_key(position, WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr):
    """Return the first token that the row at `position` sees."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    if ATTENTION_CHUNK > 0:
        first = position // ATTENTION_CHUNK * ATTENTION_CHUNK
    return first


@triton.jit
def load_queries(
    q_at, live,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, LATENT: tl.constexpr,
):  # fmt: skip
    """Load the queries at `q_at` [rows, 1], and their pieces `rest`; without latents both are the whole queries."""
    i = tl.arange(0, BLOCK_K)[None, :]
    j = tl.arange(0, BLOCK_V)[None, :]
    if LATENT:
        rows = tl.load(q_at + j, mask=live[:, None] & (j < V_DIM), other=0.0)
        rest = tl.load(q_at + V_DIM + i, mask=live[:, None] & (i < K_DIM - V_DIM), other=0.0)
    else:
        rows = tl.load(q_at + i, mask=live[:, None] & (i < K_DIM), other=0.0)
        rest = rows
    return rows, rest


@triton.jit
def scan(
    acc, total, top, q, rest, position, last, begin, end, first, scale,
    k_pages, v_pages, pages, k_page, v_page,
    PAGE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, V_ROW: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, LATENT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over the tiles of [begin, end); tokens before `first` are never read.

    Rows are at `position`, and see tokens up to `last`.
    """
    K_REST: tl.constexpr = K_DIM - V_DIM if LATENT else K_DIM
    i = tl.arange(0, BLOCK_K)[None, :]
    j = tl.arange(0, BLOCK_V)[None, :]
    for tile in tl.range(begin, end, BLOCK_N):
        token = tile + tl.arange(0, BLOCK_N)
        if MASKED:
            live = (token >= first) & (token < end)
            page = tl.load(pages + token // PAGE, mask=live, other=0).to(tl.int64)
            k_live = live[:, None] & (i < K_REST)
            v_live = live[:, None] & (j < V_DIM)
        else:
            page = tl.load(pages + token // PAGE).to(tl.int64)
            k_live = i < K_REST
            v_live = j < V_DIM
        k_at = k_pages + (page * k_page + (token % PAGE) * K_DIM)[:, None] + (K_DIM - K_REST) + i
        v_at = v_pages + (page * v_page + (token % PAGE) * V_ROW)[:, None] + j
        k = tl.load(k_at) if not MASKED and K_REST == BLOCK_K else tl.load(k_at, mask=k_live, other=0.0)
        if LATENT:
            v = tl.load(v_at) if not MASKED and V_DIM == BLOCK_V else tl.load(v_at, mask=v_live, other=0.0)
            scores = tl.dot(rest, tl.trans(k.to(q.dtype)), input_precision="ieee")
            scores = tl.dot(q, tl.trans(v.to(q.dtype)), scores, input_precision="ieee") * scale
        else:
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if SOFTCAP > 0:
            scores = SOFTCAP - 2 * SOFTCAP / (tl.exp2(scores) + 1)  # tanh
        if MASKED:
            visible = last[:, None] >= token[None, :]
            if WINDOW > 0:
                visible = visible & (position[:, None] - token[None, :] < WINDOW)
            if ATTENTION_CHUNK > 0:
                visible = visible & ((position // ATTENTION_CHUNK * ATTENTION_CHUNK)[:, None] <= token[None, :])
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        keep = tl.exp2(top - new_top)
        total = total * keep + tl.sum(weights, 1)
        if not LATENT:
            v = tl.load(v_at) if not MASKED and V_DIM == BLOCK_V else tl.load(v_at, mask=v_live, other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * keep[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top
