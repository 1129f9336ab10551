"""Paged attention by FlashAttention-3 for Hopper GPUs, which reads pages of any size in place.

Its module is `flash_attn_interface`, built from the folder hopper/ of the flash-attention repository.
"""

from flash_attn_interface import flash_attn_with_kvcache
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch

_MULTIPLE = 8  # elements: for other sizes the package copies the whole pool in each call, or refuses
_MOST = 256


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

    The model's probe calls every layer at load, so a server that starts has no layer that is refused here.

    Raises:
        ValueError: the layer has attention sinks, keys and values of different sizes, or a head size that is not a
            multiple of 8 up to 256.
    """
    key_dim, value_dim = k_pages.shape[3], v_pages.shape[3]
    if sinks is not None or key_dim != value_dim or key_dim > _MOST:
        raise ValueError(
            f"attention_backend flash_attn_3 takes no attention sinks, and keys and values of one size up to {_MOST}, "
            f"not {key_dim} and {value_dim}; choose triton"
        )
    if key_dim % _MULTIPLE:
        raise ValueError(
            f"attention_backend flash_attn_3 takes head sizes that are multiples of {_MULTIPLE}, not {key_dim}: it "
            f"would copy all pages in every call; choose triton"
        )
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
