"""Paged attention by FlashInfer, of steps that are not CUDA graphs; those that are run in Triton.

FlashInfer plans a step on the host, from the lengths of its sequences: once for all layers whose heads and windows are
alike. A graph is recorded before lengths are known. So steps of few tokens, which are recorded, keep Triton's kernels,
and long chunks, with decodes beside them, get FlashInfer's, which are written for each generation of GPUs.
"""

from functools import cache
from typing import Any

import flashinfer
import torch
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.gpu import triton_attention
from crossdock.kernels.gpu.flash_heads import require_layer

_WORKSPACE_BYTES = 128 << 20  # as FlashInfer's documentation recommends; all plans of a device share this memory
_HEAD_SIZES = (64, 128, 256)


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
    """`crossdock.kernels.attention.reference_paged_attention` for 16-bit tensors on one GPU.

    Raises:
        ValueError: the layer has sinks, or heads of other sizes than 64, 128 and 256.
    """
    require_layer("flashinfer", k_pages, v_pages, batch, sinks)
    if k_pages.shape[3] not in _HEAD_SIZES:
        raise ValueError(
            f"attention_backend flashinfer takes head sizes 64, 128 and 256, not {k_pages.shape[3]}; choose triton"
        )
    if batch.on_host is None:
        return triton_attention.paged_attention(q, k_pages, v_pages, batch, scale=scale, window=window, softcap=softcap)
    options: dict[str, Any] = {"window_left": -1 if window is None else window - 1, "logits_soft_cap": softcap or 0.0}
    options |= {"sm_scale": scale, "q_data_type": q.dtype, "kv_data_type": k_pages.dtype}
    heads = q.shape[1], k_pages.shape[1], q.shape[2]
    decodes = batch.num_decodes
    out = torch.empty_like(q)
    for kind, rows in (("decodes", slice(0, decodes)), ("chunks", slice(decodes, len(q)))):
        if rows.start < rows.stop:
            key = (kind, heads, *options.values())
            wrapper = _wrapper(q.device, key)
            if key not in batch.derived:
                batch.derived[key] = _plan(wrapper, kind, batch, heads, k_pages.shape[2], options)
            wrapper.run(q[rows], (k_pages, v_pages), out=out[rows])
    return out


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


@cache
def _wrapper(device: torch.device, key: tuple[Any, ...]) -> Any:
    """Return the wrapper that keeps the plan of layers that are alike, from the first to the last in a step."""
    if key[0] == "decodes":
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        return decode(_workspace(device), "HND", use_tensor_cores=True)  # takes any number of heads for each KV head
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "HND")


def _plan(
    wrapper: Any,
    kind: str,
    batch: AttentionBatch,
    heads: tuple[int, int, int],
    page_size: int,
    options: dict[str, Any],
) -> Tensor:
    """Plan the decodes or the chunks of a step, and return their pages. The host does not wait for the device."""
    assert batch.on_host is not None
    starts, lengths = batch.on_host
    some = slice(0, batch.num_decodes) if kind == "decodes" else slice(batch.num_decodes, len(lengths))
    lengths = lengths[some]
    counts = (lengths + page_size - 1) // page_size
    indptr = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    width = batch.page_table.shape[1]
    places = torch.arange(int(indptr[-1])) + torch.repeat_interleave(
        torch.arange(some.start, some.stop) * width - indptr[:-1], counts
    )
    flat = batch.page_table.reshape(-1)
    pages = flat[places.pin_memory().to(flat.device, non_blocking=True) if flat.is_cuda else places]
    last = lengths - (counts - 1) * page_size
    if kind == "decodes":
        wrapper.plan(indptr, pages, last, *heads, page_size, **options)
    else:
        rows = starts[some.start :] - starts[some.start]
        wrapper.plan(rows, indptr, pages, last, *heads, page_size, causal=True, **options)
    return pages
