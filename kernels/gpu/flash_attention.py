"""Paged attention by the flash-attn package (2.8), which reads our pages in place if they are large enough."""

import torch
from flash_attn import flash_attn_varlen_func
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.gpu.flash_heads import require_heads

PAGE_MULTIPLE = 256  # tokens: a tile of its kernels must not cross pages


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
    """`crossdock.kernels.attention.paged_attention` for 16-bit tensors on one GPU.

    Raises:
        ValueError: see `require_heads`.
    """
    require_heads("flash_attn", k_pages, v_pages, sinks)
    assert batch.key_end is None, "replicas with this attention refuse pictures whose rows see later keys"
    if "kv_start" not in batch.derived:
        batch.derived["kv_start"] = torch.nn.functional.pad(batch.kv_len.cumsum(0, dtype=torch.int32), (1, 0))
    out: Tensor = flash_attn_varlen_func(
        q,
        k_pages.transpose(1, 2),  # [pages, page, Hkv, D]
        v_pages.transpose(1, 2),
        batch.query_start,
        batch.derived["kv_start"],
        batch.max_query_len,
        batch.max_kv_len,
        softmax_scale=scale,
        causal=True,  # aligned at the end, as chunks are
        window_size=(window - 1, 0) if window is not None else (-1, -1),
        softcap=softcap or 0.0,
        block_table=batch.page_table,
    )
    return out
