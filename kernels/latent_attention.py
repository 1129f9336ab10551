"""Attention over latents (MLA): a page holds one latent and one rotated key per token, which all heads share.

A head's keys and values are projections of the latent; the rotated key is appended to every head's keys. There are two
ways, which give the same but for rounding:

- absorbed: queries are projected into the space of latents instead. All heads attend over the latents as over one KV
  head, and its output is projected to values. No key or value of a head is ever computed, but rows are wide.
- expanded: the keys and values of the whole context are computed first, for some heads at a time. Rows are narrow.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch

_EXPANDED_BYTES = 256 << 20  # of the keys and values that exist at a time, if those of one head are fewer


@dataclass(frozen=True, slots=True)
class UpProjections:
    """The projections of a layer from a latent [R] to each head's key [Dn], except its rotated part, and value [Dv]."""

    weight: Tensor  # [H, Dn + Dv, R]
    key_dim: int  # Dn

    @property
    def value_dim(self) -> int:
        return self.weight.shape[1] - self.key_dim


def latent_attention(
    paged_attention: Callable[..., Tensor],
    q: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    up: UpProjections,
    *,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of q [T, H, Dn + Dr] over latents; return [T, H, Dv], contiguous.

    `pages` [pages, 1, page, R + Dr] hold latents and rotated keys, side by side. `paged_attention` computes each way's
    attention; see `reference_paged_attention`, also for the scales, which are equal here.
    """
    assert batch.key_end is None, "no model with latents has pictures whose rows see later keys"
    up = replace(up, weight=up.weight.to(q.dtype))
    scales = {} if k_scale is None else {"k_scale": k_scale, "v_scale": v_scale}
    D = batch.num_decodes
    num_chunks = len(batch.kv_len) - batch.num_decodes
    if not expanding_is_cheaper(len(q) - D, num_chunks, up):
        return _absorbed(paged_attention, q, pages, batch, up, scale, scales)
    out = q.new_empty(len(q), len(up.weight), up.value_dim)
    if D > 0:
        out[:D] = _absorbed(paged_attention, q[:D], pages, batch.decodes(), up, scale, scales)
    _expand(paged_attention, q[D:], pages, batch.chunks(), up, scale, k_scale, out[D:])
    return out


def expanding_is_cheaper(num_rows: int, num_chunks: int, up: UpProjections) -> bool:
    """Return whether chunks of `num_rows` tokens in all take fewer products if their contexts are expanded.

    Per head and token of context, expanding takes R (Dn + Dv) products, after which a row takes Dn + Dr + Dv of them.
    Without it a row takes R + Dr + R. The length of the context plays no role, so that the shapes of a step decide.
    Measured after 2,048 tokens with 16 of DeepSeek-V3's heads in bfloat16, on a Zen 4 core (2026-11-23). Absorbed and
    expanded, in ms: a chunk of 64 tokens 14 and 26, of 171 tokens 34 and 34, of 256 tokens 50 and 41.
    """
    R = up.weight.shape[2]
    expanded = up.weight.shape[1]
    return num_rows * (2 * R - expanded) > num_chunks * R * expanded


def _absorbed(
    paged_attention: Callable[..., Tensor],
    q: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    up: UpProjections,
    scale: float,
    scales: dict[str, Tensor | None],
) -> Tensor:
    R = up.weight.shape[2]
    # [H, Dn, R], [H, Dv, R].
    to_keys = up.weight[:, : up.key_dim]
    to_values = up.weight[:, up.key_dim :]
    q_latent = q.new_empty(*q.shape[:2], pages.shape[3])
    torch.bmm(q[:, :, : up.key_dim].transpose(0, 1), to_keys, out=q_latent[:, :, :R].transpose(0, 1))
    q_latent[:, :, R:] = q[:, :, up.key_dim :]
    seen = paged_attention(q_latent, pages, pages[..., :R], batch, scale=scale, **scales)  # [T, H, R]
    return torch.bmm(seen.transpose(0, 1), to_values.transpose(1, 2)).transpose(0, 1).contiguous()


def _expand(
    paged_attention: Callable[..., Tensor],
    q: Tensor,
    pages: Tensor,
    batch: AttentionBatch,
    up: UpProjections,
    scale: float,
    k_scale: Tensor | None,
    out: Tensor,
) -> None:
    """Compute the attention of chunks, into `out`, over keys and values in pages that exist only here."""
    page_size = pages.shape[2]
    (H, _, R) = up.weight.shape
    key_dim = q.shape[2]
    # The table's width may be another sequence's. Its entries beyond a context are arbitrary, and attention reads none.
    table = batch.page_table[:, : -(-batch.max_kv_len // page_size)].clamp(0, len(pages) - 1)
    rows = _read(pages, table.flatten().long(), k_scale, q.dtype)  # [C * P, page, R + Dr]
    latents = rows[..., :R]
    rotated = rows[..., None, :, R:]
    places = torch.arange(table.numel(), dtype=torch.int32, device=q.device).view(table.shape)
    batch = replace(batch, page_table=places, derived={})
    bytes_of_head = rows.shape[0] * page_size * (key_dim + 2 * up.weight.shape[1]) * q.itemsize
    step = max(1, _EXPANDED_BYTES // bytes_of_head)
    for first in range(0, H, step):
        heads = slice(first, first + step)
        both = F.linear(latents, up.weight[heads].flatten(0, 1))
        both = both.view(*both.shape[:2], -1, up.weight.shape[1]).transpose(1, 2)
        # [C * P, heads, page, Dn or Dv].
        keys = both[..., : up.key_dim]
        values = both[..., up.key_dim :]
        keys = torch.cat((keys, rotated.expand(*keys.shape[:-1], -1)), -1)
        out[:, heads] = paged_attention(q[:, heads], keys, values.contiguous(), batch, scale=scale)


def _read(pages: Tensor, numbers: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the tokens [n, page, D] of the pages with these numbers."""
    if scale is None:
        return pages[numbers, 0]
    codes = pages.view(torch.uint8)[numbers, 0].view(pages.dtype)
    return (codes.float() * scale).to(dtype)
