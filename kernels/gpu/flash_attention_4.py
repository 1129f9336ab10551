"""Paged attention by FlashAttention-4 for Hopper and Blackwell GPUs, which reads pages of any size in place.

The package is flash-attn-4, whose module is `flash_attn.cute`. It compiles a kernel for each kind of layer.
"""

from functools import partial
from typing import Any

from flash_attn.cute import flash_attn_varlen_func
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.gpu.flash_heads import flash_attention


def _attend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, **options: Any) -> Tensor:
    found = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=batch.query_start,
        seqused_k=batch.kv_len,  # this step's keys and values are in their pages already
        max_seqlen_q=batch.max_query_len,
        page_table=batch.page_table,
        **options,
    )
    out: Tensor = found[0] if isinstance(found, tuple) else found  # beside the log of the sums
    return out


paged_attention = partial(flash_attention, "flash_attn_4", _attend)
