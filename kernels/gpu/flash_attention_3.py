"""Paged attention by FlashAttention-3 for Hopper GPUs, which reads pages of any size in place.

Its module is `flash_attn_interface`, built from the folder hopper/ of the flash-attention repository.
"""

from flash_attn_interface import flash_attn_with_kvcache
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.gpu.flash_heads import require_heads


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
) -> Tensor:
    """`crossdock.kernels.attention.paged_attention` for 16-bit tensors on one Hopper GPU.

    Raises:
        ValueError: see `require_heads`.
    """
    require_heads("flash_attn_3", k_pages, v_pages, sinks)
    assert batch.key_end is None, "replicas with this attention refuse pictures whose rows see later keys"
    out: Tensor = flash_attn_with_kvcache(
        q,
        k_pages.transpose(1, 2),  # [pages, page, Hkv, D]
        v_pages.transpose(1, 2),
        cache_seqlens=batch.kv_len,  # this step's keys and values are in their pages already
        page_table=batch.page_table,
        cu_seqlens_q=batch.query_start,
        max_seqlen_q=batch.max_query_len,
        softmax_scale=scale,
        causal=True,  # aligned at the end, as chunks are
        window_size=(window - 1, 0) if window is not None else (-1, -1),
        softcap=softcap or 0.0,
    )
    return out
