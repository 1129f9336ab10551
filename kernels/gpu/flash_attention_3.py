"""Paged attention by FlashAttention-3 for Hopper GPUs, which reads pages of any size in place.

Its module is `flash_attn_interface`, built from the folder hopper/ of the flash-attention repository.
"""

from functools import partial
from typing import Any

from flash_attn_interface import flash_attn_with_kvcache
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.gpu.flash_heads import flash_attention


def _attend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, **options: Any) -> Tensor:
    out: Tensor = flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=batch.kv_len,  # this step's keys and values are in their pages already
        page_table=batch.page_table,
        cu_seqlens_q=batch.query_start,
        max_seqlen_q=batch.max_query_len,
        **options,
    )
    return out


paged_attention = partial(flash_attention, "flash_attn_3", _attend)
