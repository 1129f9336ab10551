"""Check a layer for the packages of attention, and give both flash-attn packages its arguments."""

from collections.abc import Callable

from torch import Tensor

from crossdock.kernels.attention import AttentionBatch

_MULTIPLE = 8  # elements: for other sizes the packages copy the whole pool in each call, or refuse
_MOST = 256


def require_layer(backend: str, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, sinks: Tensor | None) -> None:
    """Refuse a layer that the package would compute wrongly, slowly or not at all.

    The model's probe calls every layer at load, so a server that starts has no such layer.

    Raises:
        ValueError: the layer has attention sinks, keys and values of different sizes, an indexer's keys between
            values, or a head size that is not a multiple of 8 up to 256.
    """
    key_dim = k_pages.shape[3]
    value_dim = v_pages.shape[3]
    if sinks is not None or key_dim != value_dim or key_dim > _MOST:
        raise ValueError(
            f"attention_backend {backend} takes no attention sinks, and keys and values of one size up to {_MOST}, not "
            f"{key_dim} and {value_dim}; choose triton"
        )
    if v_pages.stride(2) != value_dim and v_pages.shape[2] > 1:
        raise ValueError(
            f"attention_backend {backend} takes no pages with an indexer's keys between values; choose triton"
        )
    if key_dim % _MULTIPLE:
        raise ValueError(
            f"attention_backend {backend} takes head sizes that are multiples of {_MULTIPLE}, not {key_dim}: it would "
            f"copy all pages in every call; choose triton"
        )
    assert batch.key_end is None, "replicas with this attention refuse pictures whose rows see later keys"


def flash_attention(
    backend: str,
    attend: Callable[..., Tensor],
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
    """`crossdock.kernels.attention.reference_paged_attention` for 16-bit tensors on one GPU, by the package `backend`.

    Raises:
        ValueError: see `require_layer`.
    """
    require_layer(backend, k_pages, v_pages, batch, sinks)
    return attend(
        q,
        k_pages.transpose(1, 2),  # [pages, page, Hkv, D]
        v_pages.transpose(1, 2),
        batch,
        softmax_scale=scale,
        causal=True,  # aligned at the end, as chunks are
        window_size=(window - 1, 0) if window is not None else (-1, -1),
        softcap=softcap or 0.0,
    )
