"""Attention over the paged KV pool: one call for a ragged batch in which chunks of prompts and decodes are mixed.

The torch functions here are the specification and run anywhere; on a CPU for which `cpu.cpp` compiles, that is used.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Query rows per explicit score matrix: bounds the reference's memory to 256 x context x heads floats.
_REFERENCE_ROWS = 256


@dataclass(slots=True)
class AttentionBatch:
    """Where the rows of one step lie, built once and read by every layer. S sequences, T rows in all.

    Row i of sequence s is row `query_start[s] + i` of the flat batch; its position in the sequence is
    `kv_len[s] - query_len[s] + i`.
    """

    query_start: Tensor  # [S+1] int32; sequence s owns rows query_start[s]:query_start[s+1]
    kv_len: Tensor  # [S] int32; tokens of s in its pages, this step's rows among them
    page_table: Tensor  # [S, P] int32; entries past kv_len are arbitrary
    slots: Tensor  # [T] int64; page * page_size + offset, where the row's key and value go
    max_query_len: int
    max_kv_len: int


def store_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write keys [T, Hkv, Dk] and values [T, Hkv, Dv] to their slots of [pages, Hkv, page, Dk] and [..., Dv]."""
    reference_store_kv(k, v, k_pages, v_pages, slots)


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
    """Causal attention of q [T, Hq, Dk] over the pages of each row's sequence; returns [T, Hq, Dv], contiguous.

    `k_pages` [pages, Hkv, page, Dk] and `v_pages` [pages, Hkv, page, Dv] are views of one layer of the pool: tokens
    and elements adjacent, pages and heads at any stride. The row at position p sees keys j <= p and, with a window,
    only p - j < window. `softcap` c replaces a score s by c * tanh(s / c). `sinks` [Hq] is one more logit per head
    that takes its share of the softmax and has no value. Head h reads kv head h // (Hq // Hkv).
    """
    return reference_paged_attention(
        q, k_pages, v_pages, batch, scale=scale, window=window, softcap=softcap, sinks=sinks
    )


def reference_store_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """`store_kv` in torch."""
    page_size = k_pages.shape[2]
    pages, offsets = slots // page_size, slots % page_size
    k_pages[pages, :, offsets] = k
    v_pages[pages, :, offsets] = v


def reference_paged_attention(
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
    """`paged_attention` in torch: gather each sequence's visible tokens, then scaled_dot_product_attention."""
    out = q.new_empty(q.shape[0], q.shape[1], v_pages.shape[3])
    page_size = k_pages.shape[2]
    starts: list[int] = batch.query_start.tolist()
    for s, kv_len in enumerate(batch.kv_len.tolist()):
        rows = slice(starts[s], starts[s + 1])
        first_position = kv_len - (rows.stop - rows.start)
        first_page = max(0, first_position - window + 1) // page_size if window is not None else 0
        pages = batch.page_table[s, first_page : -(-kv_len // page_size)].long()
        start, length = first_page * page_size, kv_len - first_page * page_size
        k = k_pages[pages].transpose(0, 1).flatten(1, 2)[:, :length]  # [Hkv, length, Dk]
        v = v_pages[pages].transpose(0, 1).flatten(1, 2)[:, :length]  # [Hkv, length, Dv]
        for row in range(rows.start, rows.stop, _REFERENCE_ROWS):
            end = min(row + _REFERENCE_ROWS, rows.stop)
            position = torch.arange(row, end, device=q.device) - rows.start + first_position
            distance = position[:, None] - torch.arange(start, start + length, device=q.device)  # [rows, length]
            visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            out[row:end] = _attend(q[row:end].transpose(0, 1), k, v, visible, scale, softcap, sinks).transpose(0, 1)
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention of q [Hq, R, Dk] over k [Hkv, L, Dk] and v [Hkv, L, Dv] where `visible` [R, L]; [Hq, R, Dv]."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=q.shape[0] != k.shape[0]
        )[0]
    # SDPA knows neither softcap nor sinks: the same in fp32, spelled out.
    group = q.shape[0] // k.shape[0]
    scores = q.float() @ k.float().repeat_interleave(group, 0).transpose(1, 2) * scale  # [Hq, R, L]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink_column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, sink_column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v.float().repeat_interleave(group, 0)).to(q.dtype)
