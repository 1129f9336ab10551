"""Paged attention by the flash-attn package (2.8), which reads our pages in place if they are large enough."""

from functools import partial
from typing import Any

import torch
from flash_attn import flash_attn_varlen_func
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.gpu.flash_heads import flash_attention

PAGE_MULTIPLE = 256  # tokens: a tile of its kernels must not cross pages


def _attend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch, **options: Any) -> Tensor:
    if "kv_start" not in batch.derived:
        batch.derived["kv_start"] = torch.nn.functional.pad(batch.kv_len.cumsum(0, dtype=torch.int32), (1, 0))
    starts = batch.query_start, batch.derived["kv_start"]
    longest = batch.max_query_len, batch.max_kv_len
    out: Tensor = flash_attn_varlen_func(q, k, v, *starts, *longest, block_table=batch.page_table, **options)
    return out


paged_attention = partial(flash_attention, "flash_attn", _attend)
