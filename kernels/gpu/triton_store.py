"""The Triton kernel that writes the keys and values of a step to the slots of their pages."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["slots"])  # of groups of layers
def store_kernel(
    k, v, k_pages, v_pages, slots, k_scale, v_scale, T,
    k_token, k_head, v_token, v_head, k_page, k_page_head, v_page, v_page_head,
    PAGE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)  # all offsets into the pool are int64: it may have more than 2^31 elements
    slot = tl.load(slots + token, mask=token < T, other=-1)
    live = (slot >= 0)[:, None]
    token = token.to(tl.int64)[:, None]
    page = (slot // PAGE)[:, None]
    offset = (slot % PAGE)[:, None]
    i = tl.arange(0, BLOCK_K)[None, :]
    x = tl.load(k + token * k_token + head * k_head + i, mask=live & (i < K_DIM))
    if HAS_SCALES:
        x = quantised(x, tl.load(k_scale + head), k_pages)
    tl.store(k_pages + page * k_page + head * k_page_head + offset * K_DIM + i, x, mask=live & (i < K_DIM))
    i = tl.arange(0, BLOCK_V)[None, :]
    x = tl.load(v + token * v_token + head * v_head + i, mask=live & (i < V_DIM))
    if HAS_SCALES:
        x = quantised(x, tl.load(v_scale + head), v_pages)
    tl.store(v_pages + page * v_page + head * v_page_head + offset * V_DIM + i, x, mask=live & (i < V_DIM))


@triton.jit
def quantised(x, scale, pages):
    """Return x / scale as an e4m3, clamped to the largest finite one."""
    x = tl.div_rn(x.to(tl.float32), scale)
    return tl.minimum(tl.maximum(x, -448.0), 448.0).to(pages.dtype.element_ty)
